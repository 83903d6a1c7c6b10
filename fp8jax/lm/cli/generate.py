"""Generates text with a trained model.

    fp8jax generate --from=runs/smoke --prompt='def main(' --max_tokens=64
    fp8jax generate --from=hf:DIR --chat --prompt='What is FP8?' --stream

--from is a workdir, or hf:DIR. Several --prompt, and the lines of --prompts_file, are batched. With
--chat each prompt is a user's message, rendered by the template of the model's folder; without
prompts, --chat reads messages from the terminal, until an empty one.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags, logging

from fp8jax.device import xla
from fp8jax.lm.chat.chat_template import ChatTemplate, load_chat_template
from fp8jax.lm.cli import command
from fp8jax.lm.cli.solve import stop_ids
from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.inference.generate import MOST_POSITIONS, SEEDS, Generator
from fp8jax.lm.inference.memory_check import memory_errors
from fp8jax.lm.inference.sampling import Sampling
from fp8jax.lm.inference.text import LENGTH, Completion, complete_text, stream_text
from fp8jax.lm.interop.trained import TrainedModel, load_model
from fp8jax.lm.model.freeze import freeze
from fp8jax.lm.model.transformer import count_params
from fp8jax.lm.records.checkpoint import DamagedError

_FROM = flags.DEFINE_string("from", None, "A workdir, or hf:DIR.", required=True)
_STEP = flags.DEFINE_integer("step", None, "Which checkpoint of a workdir; the newest without.")
_PROMPT = flags.DEFINE_multi_string("prompt", [], "A text to continue; may be repeated.")
_PROMPTS_FILE = flags.DEFINE_string("prompts_file", None, "A file with one prompt a line.")
_CHAT = flags.DEFINE_bool("chat", False, "Prompts are messages, rendered by the chat template.")
_SYSTEM = flags.DEFINE_string("system", None, "The system's message, for --chat.")
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", 128, "The most new tokens of a text.", 1, MOST_POSITIONS
)
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length",
    None,
    "Tokens of the cache, for prompt and text; as many as needed without.",
    1,
    MOST_POSITIONS,
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 takes the most likely token.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Draws from the K most likely tokens only.")
_TOP_P = flags.DEFINE_float("top_p", None, "Draws from the most likely tokens of this probability.")
_STOP = flags.DEFINE_multi_string("stop", [], "A text that ends a text; may be repeated.")
_SEED = flags.DEFINE_integer("seed", 0, "Prompt i draws with the seed SEED + i.", 0, SEEDS - 1)
_PRECISION = flags.DEFINE_string("precision", None, "A policy; the run's own, or bf16, without.")
_FREEZE = flags.DEFINE_bool("freeze", True, "Quantize the weights once, not in each step.")
_KV_CACHE = flags.DEFINE_enum("kv_cache", "bf16", ["bf16", "fp8"], "What the cache stores.")
_STREAM = flags.DEFINE_bool("stream", False, "Print the text as it grows; takes one prompt.")

ERRORS = (*command.ERRORS, DamagedError, MemoryError)
VERBOSITY = logging.WARNING

_CHAT_LENGTH = 4096  # of the cache of a chat in the terminal, without --max_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prompts:
    """How prompts become ids, with BOS in front or not, and which ids end a text."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    stop_ids: tuple[int, ...]
    begin: bool

    def ids(self, text: str, place: str) -> Any:
        """Returns the ids of a prompt; `place` names it in errors."""
        if self.template is not None:
            asked = {"role": "user", "content": text}
            return self.template.prompt([*_system(), asked], place=place)
        ids = self.tokenizer.encode(text).tolist()
        return [self.tokenizer.bos, *ids] if self.begin or not ids else ids


def _system() -> list[dict[str, str]]:
    return [] if _SYSTEM.value is None else [{"role": "system", "content": _SYSTEM.value}]


def _texts() -> list[str]:
    """Returns the prompts of the flags."""
    texts = list(_PROMPT.value)
    if _PROMPTS_FILE.value is not None:
        texts += _lines(_PROMPTS_FILE.value)
    if not texts and not _CHAT.value:
        raise ValueError("give a --prompt, or several, or --prompts_file")
    if _STREAM.value and len(texts) > 1:
        raise ValueError(f"--stream prints one text, and there are {len(texts)} prompts")
    if _SYSTEM.value is not None and not _CHAT.value:
        raise ValueError("--system is for --chat")
    return texts


def _lines(name: str) -> list[str]:
    """Returns the prompts of --prompts_file. They end at \\n; U+2028 and the like are text."""
    if not name:
        raise ValueError("--prompts_file= names no file")
    try:
        text = Path(name).expanduser().read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts_file={name} is not UTF-8: {error}") from error
    if not text:
        raise ValueError(f"--prompts_file={name} has no prompt")
    lines = [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]
    if not all(lines):
        raise ValueError(f"--prompts_file={name} has an empty line")
    return lines


def _check_flags(texts: Sequence[str]) -> None:
    """Raises ValueError if flags cannot be honored, whatever the model is."""
    if "" in _STOP.value:
        raise ValueError("--stop= is empty: it would end every text at once")
    if (last := _SEED.value + len(texts) - 1) >= SEEDS:
        raise ValueError(
            f"--seed={_SEED.value} gives the last of {len(texts)} prompts the seed {last}: seeds "
            f"are in [0, {SEEDS})"
        )
    if not texts or _MAX_LENGTH.value is not None:
        _require_fits("the shortest prompt", 1, _MAX_LENGTH.value or _CHAT_LENGTH)


def _require_fits(what: str, tokens: int, max_length: int) -> None:
    """Raises ValueError unless the tokens and --max_tokens new ones fit the cache."""
    if tokens + _MAX_TOKENS.value > max_length:
        raise ValueError(
            f"{what} has {tokens} tokens: with --max_tokens={_MAX_TOKENS.value} new ones it does "
            f"not fit the cache of --max_length={max_length}: lower --max_tokens, or raise "
            "--max_length"
        )


def _prompts(trained: TrainedModel) -> _Prompts:
    if trained.tokenizer is None:
        raise ValueError(f"{trained.name} has no tokenizer.json, so it has no words to read")
    stops, template = [trained.tokenizer.eos, *stop_ids(trained)], None
    if _CHAT.value:
        if trained.files is None:
            raise ValueError(f"{trained.name} has no chat template: --chat needs one")
        template = load_chat_template(trained.files, trained.tokenizer)
        stops += template.turn_ends()
    return _Prompts(
        tokenizer=trained.tokenizer,
        template=template,
        stop_ids=tuple({*stops}),
        begin=trained.begins_texts,
    )


def _generator(trained: TrainedModel, vocab_size: int, max_length: int) -> Generator:
    variables = trained.variables
    if _FREEZE.value:
        variables = freeze(trained.model, variables)
    return Generator(
        trained.model,
        variables,
        vocab_size=vocab_size,
        max_length=max_length,
        cache=_KV_CACHE.value,
    )


def _print_stream(generator: Generator, prompts: _Prompts, ids: Any, sampling: Sampling, seed: int):
    """Prints a text as it grows, and returns it."""
    for (text,) in stream_text(
        generator,
        prompts.tokenizer,
        [ids],
        sampling,
        _MAX_TOKENS.value,
        stop_strings=_STOP.value,
        stop_ids=prompts.stop_ids,
        seeds=[seed],
        answers=_CHAT.value,
    ):
        print(text.fresh(), end="", flush=True)
    print(flush=True)
    return text.completion()


def _say_ends(completions: Sequence[Completion]) -> None:
    """Says which texts were to end with a stop string that never came."""
    for index, completion in enumerate(completions):
        if _STOP.value and completion.ended_by == LENGTH:
            print(
                f"prompt {index}: no stop string came within {len(completion.ids)} tokens",
                file=sys.stderr,
            )


def _message() -> str:
    """Returns what the user types, "" at the end of the input."""
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _chat(generator: Generator, prompts: _Prompts, sampling: Sampling) -> None:
    """Talks with the user, until an empty message. A message that does not fit is left out."""
    assert prompts.template is not None
    messages: list[Any] = _system()
    turn = 0
    while text := _message():
        asked = [*messages, {"role": "user", "content": text}]
        try:
            ids = prompts.template.prompt(asked, place="the conversation")
            _require_fits("the conversation", len(ids), generator.max_length)
        except ValueError as error:
            print(f"error: {error}. The last message was not sent.", file=sys.stderr)
            continue
        seed = (_SEED.value + turn) % SEEDS
        answer = _print_stream(generator, prompts, ids, sampling, seed)
        messages = [*asked, {"role": "assistant", "content": answer.text}]
        turn += 1


def main(arguments: Sequence[str]) -> None:
    command.refuse_arguments(arguments)
    sampling = Sampling(temperature=_TEMPERATURE.value, top_k=_TOP_K.value, top_p=_TOP_P.value)
    texts = _texts()
    _check_flags(texts)
    xla.set_compilation_cache()
    trained = load_model(_FROM.value, precision=_PRECISION.value, step=_STEP.value)
    prompts = _prompts(trained)
    if trained.record is not None and sys.stderr.isatty():
        print(_about(trained, trained.record), file=sys.stderr)
    with memory_errors("lower --max_tokens or --max_length, or give fewer prompts"):
        _generate(trained, prompts, texts, sampling)


def _about(trained: TrainedModel, record: Mapping[str, Any]) -> str:
    """Says from how much the model has learned, by which its text is to be judged."""
    tokens = trained.step * record["batch_size"] * record["seq_len"]
    return (
        f"{trained.name} at step {trained.step:,}: {count_params(trained.model.config):,}"
        f" parameters, which saw {tokens:,} tokens in this run"
    )


def _generate(
    trained: TrainedModel, prompts: _Prompts, texts: Sequence[str], sampling: Sampling
) -> None:
    """Prints what the model writes after the prompts; without any, talks with the user."""
    vocab_size = prompts.tokenizer.vocab_size
    if not texts:
        _chat(_generator(trained, vocab_size, _MAX_LENGTH.value or _CHAT_LENGTH), prompts, sampling)
        return
    ids = [prompts.ids(text, f"prompt {index}") for index, text in enumerate(texts)]
    needed = max(map(len, ids)) + _MAX_TOKENS.value
    max_length = _MAX_LENGTH.value or min(needed, MOST_POSITIONS)
    for index, each in enumerate(ids):
        _require_fits(f"prompt {index}", len(each), max_length)
    generator = _generator(trained, vocab_size, max_length)
    if _STREAM.value:
        _say_ends([_print_stream(generator, prompts, ids[0], sampling, _SEED.value)])
        return
    seeds = range(_SEED.value, _SEED.value + len(ids))
    found = complete_text(
        generator,
        prompts.tokenizer,
        ids,
        sampling,
        _MAX_TOKENS.value,
        stop_strings=_STOP.value,
        stop_ids=prompts.stop_ids,
        seeds=seeds,
        answers=_CHAT.value,
    )
    for index, (text, completion) in enumerate(zip(texts, found, strict=True)):
        title = "" if len(texts) == 1 else f"[{index}] "
        print(f"{title}{text}{completion.text}" if not _CHAT.value else title + completion.text)
    _say_ends(found)
