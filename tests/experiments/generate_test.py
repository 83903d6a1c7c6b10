"""The command that generates text, in this process."""

import re
import sys

import numpy as np
import pytest

from fp8jax.lm.data.bpe import train_bpe
from fp8jax.lm.data.tokenizers import tokenizer
from fp8jax.lm.inference.generate import Generator
from fp8jax.lm.inference.sampling import Sampling
from fp8jax.lm.inference.text import GrowingText
from fp8jax.lm.interop.trained import TrainedModel, load_model
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.transformer import Transformer
from tests.support.commands import command_here, run_here
from tests.support.hf_folders import config_json, tensors, write_folder

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Hugging Face folder: a model with random weights, a tokenizer, and a chat template."""
    folder = tmp_path_factory.mktemp("model")
    learned = train_bpe(iter(["one two three four five six seven eight"] * 9), 270)
    config = config_json("llama", vocab_size=learned.get_vocab_size() + 3)
    write_folder(folder, config, tensors(config, np.float32))
    (folder / "tokenizer.json").write_text(learned.to_str())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_prompts_are_continued(folder):
    flags = ["--prompt=one two", "--prompt=seven", "--max_tokens=12", "--temperature=0"]
    done = run_here("generate", f"--from=hf:{folder}", *flags, "--stop=never to come")
    assert done.returncode == 0, done.stderr
    trained, words = load_model(f"hf:{folder}"), tokenizer(f"bpe:{folder}/tokenizer.json")
    generator = Generator(
        trained.model, trained.variables, vocab_size=words.vocab_size, max_length=64
    )
    texts = ["one two", "seven"]
    assert not trained.begins_texts  # the file puts no BOS in front, as Qwen's
    prompts = [words.encode(text) for text in texts]
    new = generator.generate(prompts, Sampling(temperature=0), 12, stops=[words.eos])
    lines = [
        f"[{i}] {text}{words.decode(ids)}"
        for i, (text, ids) in enumerate(zip(texts, new, strict=True))
    ]
    assert done.stdout == "\n".join(lines) + "\n"
    assert done.stderr.splitlines() == [
        f"prompt {i}: no stop string came within {len(ids)} tokens"
        for i, ids in enumerate(new)
        if len(ids) == 12
    ]


def test_a_chat_streams_the_same_text(folder):
    flags = [f"--from=hf:{folder}", "--chat", "--prompt=three", "--max_tokens=9", "--seed=3"]
    flags += ["--kv_cache=fp8", "--precision=fp8_rowwise", "--top_k=40"]
    whole, streamed = run_here("generate", *flags), run_here("generate", *flags, "--stream")
    assert whole.returncode == streamed.returncode == 0, whole.stderr + streamed.stderr
    assert whole.stdout == streamed.stdout and len(whole.stdout) > 4


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "give a --prompt, or several, or --prompts_file"),
        (["--prompt=a", "--prompt=b", "--stream"], "--stream prints one text, and there are 2"),
        (["--prompt=a", "--temperature=0", "--top_k=3"], "temperature=0 .* top_k=3 has no effect"),
    ],
)
def test_bad_input_is_one_line(folder, flags, message):
    done = run_here("generate", f"--from=hf:{folder}", *flags)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line), line


@pytest.fixture
def generate():
    with command_here("generate") as run:
        yield run


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--prompt=a", "--max_tokens=3000000000"], r"--max_tokens=3000000000: .* 2147483647\]"),
        (["--prompt=a", "--seed=4294967296"], r"--seed=4294967296: .* 4294967295\]"),
        (["--prompt=a", "--prompt=b", "--seed=4294967295"], r"last of 2 .* in \[0, 4294967296\)"),
        (["--prompt=a", "--max_length=9", "--max_tokens=9"], "raise --max_length$"),
        (["--prompt=a", "--stop="], "--stop= is empty"),
        (["--prompt=a\udcff"], r"the argument '--prompt=a.*udcff' is not UTF-8"),
        (["--chat", "--max_tokens=4096"], "fit the cache of --max_length=4096: lower --max_tokens"),
        (["--chat", "--stop="], "--stop= is empty"),
        (["--prompts_file="], "--prompts_file= names no file"),
        (["--chat", "--prompts_file=EMPTY"], "empty.txt has no prompt"),
        (["--prompts_file=LATIN"], "latin.txt is not UTF-8: .* 0xe9"),
        (["--prompts_file=GAP"], "gap.txt has an empty line"),
    ],
)
def test_what_no_model_can_do_is_refused_before_one_is_read(tmp_path, generate, flags, message):
    for name, content in (("empty", b""), ("latin", b"caf\xe9\n"), ("gap", b"a\n\nb\n")):
        (tmp_path / f"{name}.txt").write_bytes(content)
        flags = [flag.replace(name.upper(), f"{tmp_path}/{name}.txt") for flag in flags]
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        generate(f"--from={tmp_path}/nowhere", *flags)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--max_length=9", "--max_tokens=8"], "prompt 0 has . tokens: .* --max_length=9: lower"),
        (["--max_tokens=2000000000"], "rows of 2.* tokens would take .* lower max_tokens"),
    ],
)
def test_texts_that_do_not_fit_the_cache(folder, generate, flags, message):
    with pytest.raises(SystemExit, match=f"^error: .*{message}"):
        generate(f"--from=hf:{folder}", "--prompt=one two", *flags)


def test_a_line_of_a_file_is_a_prompt(tmp_path, generate, monkeypatch):
    """Also one with a separator that str.splitlines would split at; a byte order mark is none."""
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufeffone\u2028two\x0cthree\r\nfour\n".encode())
    with pytest.raises(SystemExit):
        generate("--from=nowhere", f"--prompts_file={path}")
    module = sys.modules["fp8jax.lm.cli.generate"]
    assert module._texts() == ["one\u2028two\x0cthree", "four"]


def test_a_person_is_told_from_how_much_a_model_has_learned(generate):
    with pytest.raises(SystemExit):
        generate("--from=nowhere", "--prompt=a")
    model = Transformer(MODELS["llama_tiny"], "bf16")
    record = {"batch_size": 16, "seq_len": 256}
    trained = TrainedModel(
        model=model, variables={}, tokenizer=None, name="runs/a", record=record, step=150
    )
    said = sys.modules["fp8jax.lm.cli.generate"]._about(trained, record)
    assert re.fullmatch(r"runs/a at step 150: \d{3},\d{3} parameters, which saw 614,400 .*", said)


def test_a_chat_goes_on_after_a_message_that_does_not_fit(folder, generate, monkeypatch, capsys):
    """The model reads what it reads in the same chat without that message."""
    read = []

    def answer(generator, words, prompts, *unused, **also_unused):
        read.append(*prompts)
        text = GrowingText(words, (), ())
        text.add(words.encode("yes"))
        yield [text]

    monkeypatch.setattr("fp8jax.lm.inference.text.stream_text", answer)  # before it is imported

    def chat(*messages):
        typed = iter([*messages, ""])
        monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
        read.clear()
        generate(f"--from=hf:{folder}", "--chat", "--max_length=64", "--max_tokens=4")
        return [ids.tolist() for ids in read], capsys.readouterr().err

    found, said = chat("one", "two " * 64, "two\ud800", "three")
    long, lone = said.splitlines()
    assert re.match(
        r"error: the conversation has \d+ tokens: with --max_tokens=4 new ones it does not fit the "
        r"cache of --max_length=64: lower .*, or raise --max_length. The last message was not sent",
        long,
    )
    place = "error: the conversation: message 3: content: "
    assert re.match(f"{place}the text is not Unicode: .* not sent", lone)
    assert len(found) == 2 and (found, "") == chat("one", "three")
