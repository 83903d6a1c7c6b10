"""Generated text: decoded as it grows, and ended by stop strings.

Stop strings are looked for in decoded text, on the host: a token may hold the end of one and what
follows it.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from fp8jax.lm.data.byte_tokenizer import Tokenizer
from fp8jax.lm.inference.generate import Generator, Prompt
from fp8jax.lm.inference.sampling import Sampling

_UNFINISHED = "\ufffd"  # what the first bytes of a character decode to

_BEFORE = 8  # ids of a prompt that new ids are decoded behind

STOP_ID, STOP_STRING, LENGTH = "stop id", "stop string", "length"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """The text that follows a prompt.

    Attributes:
      text: up to the stop string or the stop id, without it.
      ids: all new ids. They may go a little beyond a stop string.
      ended_by: `STOP_ID`, `STOP_STRING`, or `LENGTH` for as many tokens as were asked for.

    Example:
      >>> from fp8jax.lm.inference.text import Completion
      >>> Completion(text="4", ids=(52, 10), ended_by="stop string").text
      '4'
    """

    text: str
    ids: tuple[int, ...]
    ended_by: str


def complete_text(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    num_tokens: int,
    *,
    stop_strings: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    answers: bool = False,
) -> list[Completion]:
    """Returns the completion of each of any number of prompts.

    Args:
      generator: of the model.
      tokenizer: of the model.
      prompts: ids, such as those of BOS and a text.
      sampling: how tokens are drawn.
      num_tokens: the most new tokens of each prompt.
      stop_strings: strings that end a text; not empty.
      stop_ids: ids that end a text; None for the tokenizer's EOS.
      seeds: as in `Generator.generate`.
      answers: whether a text is a message of its own and does not continue its prompt, whose space
        before it some tokenizers write as a part of its first token.

    Returns:
      A `Completion` for each prompt.

    Raises:
      ValueError: as `Generator.generate`, and for an empty stop string.

    Example:
      >>> from fp8jax.lm.data.tokenizers import tokenizer
      >>> from fp8jax.lm.inference.generate import Generator
      >>> from fp8jax.lm.inference.sampling import Sampling
      >>> from fp8jax.lm.inference.text import complete_text
      >>> config = dataclasses.replace(fp8jax.MODELS["llama_tiny"], n_layers=1)
      >>> model, text = fp8jax.Transformer(config, "bf16"), tokenizer("bytes")
      >>> ids = jnp.zeros((1, 8), jnp.int32)
      >>> variables = jax.jit(model.init)(jax.random.key(0), ids, ids + 1, ids)
      >>> generator = Generator(model, variables, vocab_size=text.vocab_size, max_length=64)
      >>> prompt = [text.bos, *text.encode("def main(")]
      >>> (found,) = complete_text(generator, text, [prompt], Sampling(), 5, stop_ids=[])
      >>> len(found.ids), found.ended_by
      (5, 'length')
    """
    seeds, most = range(len(prompts)) if seeds is None else seeds, generator.max_requests
    found: list[Completion] = []
    for begin in range(0, len(prompts), most):
        part = slice(begin, begin + most)
        streamed = stream_text(
            generator,
            tokenizer,
            prompts[part],
            sampling,
            num_tokens,
            stop_strings=stop_strings,
            stop_ids=stop_ids,
            seeds=seeds[part],
            answers=answers,
            every=min(8, generator.tokens_per_call),
        )
        found += [growing.completion() for growing in list(streamed)[-1]]
    return found


def stream_text(
    generator: Generator,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    num_tokens: int,
    *,
    stop_strings: Sequence[str] = (),
    stop_ids: Sequence[int] | None = None,
    seeds: Sequence[int] | None = None,
    answers: bool = False,
    every: int = 4,
) -> Iterator[list["GrowingText"]]:
    """Yields the texts so far, again and again until all have ended.

    Args:
      generator: of the model.
      tokenizer: of the model.
      prompts: ids; at most `max_requests` of the generator.
      sampling: how tokens are drawn.
      num_tokens: the most new tokens of each prompt.
      stop_strings: strings that end a text; not empty.
      stop_ids: ids that end a text; None for the tokenizer's EOS.
      seeds: as in `Generator.generate`.
      answers: as in `complete_text`.
      every: tokens between two looks at the texts.

    Raises:
      ValueError: as `Generator.generate`, and for an empty stop string.
    """
    if "" in stop_strings:
        raise ValueError("a stop string is empty: it would end every text at once")
    stop_ids = [tokenizer.eos] if stop_ids is None else list(stop_ids)
    texts = [
        GrowingText(tokenizer, tuple(stop_strings), tuple(stop_ids), () if answers else prompt)
        for prompt in prompts
    ]
    run = generator.start(prompts, sampling, num_tokens, stop_ids, seeds=seeds)
    for piece in run.pieces(every):
        for index, (text, ids) in enumerate(zip(texts, piece, strict=True)):
            text.add(ids)
            if text.ended_by == STOP_STRING:
                run.end(index)
        yield texts
    for text in texts:
        text.close()
    yield texts


class GrowingText:
    """One text that is being generated.

    Attributes:
      ended_by: as in `Completion`; "" while the text grows.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_strings: tuple[str, ...],
        stop_ids: tuple[int, ...],
        prompt: Prompt = (),
    ) -> None:
        self._tokenizer, self._stop_strings, self._stop_ids = tokenizer, stop_strings, stop_ids
        self._before = [int(each) for each in prompt[-_BEFORE:]]
        self._ids: list[int] = []
        self._text, self._shown = "", 0
        self.ended_by = ""

    def add(self, ids: np.ndarray) -> None:
        """Adds new ids; those behind the end of the text are dropped."""
        if self.ended_by or not len(ids):
            return
        self._ids += ids.tolist()
        ended = self._ids[-1] in self._stop_ids
        self._text = self._decoded(self._ids[:-1] if ended else self._ids)
        found = [at for stop in self._stop_strings if (at := self._text.find(stop)) >= 0]
        if found:
            self._text, self.ended_by = self._text[: min(found)], STOP_STRING
        elif ended:
            self.ended_by = STOP_ID

    def _decoded(self, ids: list[int]) -> str:
        """Returns the text of new ids, as it stands behind the prompt.

        Alone, a first token with a space would lose it in tokenizers of SentencePiece's kind.
        """
        before = self._tokenizer.decode(self._before)
        whole = self._tokenizer.decode(self._before + ids)
        return whole[len(before) :] if whole.startswith(before) else self._tokenizer.decode(ids)

    def close(self) -> None:
        """Says that no more ids come."""
        self.ended_by = self.ended_by or LENGTH

    def fresh(self) -> str:
        """Returns what has been added since the last call and cannot change any more.

        The beginning of a character, or of a stop string, is held back until what follows is known.
        """
        end = len(self._text) if self.ended_by else self._certain()
        begin, self._shown = self._shown, max(end, self._shown)
        return self._text[begin : self._shown]

    def _certain(self) -> int:
        """Returns the length of the text that no further token can change or cut off."""
        text = self._text.rstrip(_UNFINISHED)
        for size in range(max(map(len, self._stop_strings), default=1) - 1, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop_strings if text[-size:]):
                return len(text) - min(size, len(text))
        return len(text)

    def completion(self) -> Completion:
        return Completion(text=self._text, ids=tuple(self._ids), ended_by=self.ended_by)
