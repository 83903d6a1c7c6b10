"""The command that generates text, as a shell would run it."""

import re

import numpy as np
import pytest

from fp8jax.data.bpe import train_bpe
from fp8jax.data.tokenizers import tokenizer
from fp8jax.inference.generate import Generator
from fp8jax.inference.sampling import Sampling
from fp8jax.interop.trained import load_model
from tests.support.commands import run_command
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


@pytest.mark.slow
def test_prompts_are_continued(folder):
    flags = ["--prompt=one two", "--prompt=seven", "--max_tokens=12", "--temperature=0"]
    done = run_command("generate", f"--from=hf:{folder}", *flags, "--stop=never to come")
    assert done.returncode == 0, done.stderr
    trained, words = load_model(f"hf:{folder}"), tokenizer(f"bpe:{folder}/tokenizer.json")
    generator = Generator(
        trained.model, trained.variables, words=words.vocab_size, max_length=64
    )  # fmt: skip
    texts = ["one two", "seven"]
    prompts = [[words.bos, *words.encode(text)] for text in texts]
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


@pytest.mark.slow
def test_a_chat_streams_the_same_text(folder):
    flags = [f"--from=hf:{folder}", "--chat", "--prompt=three", "--max_tokens=9", "--seed=3"]
    flags += ["--kv_cache=fp8", "--precision=fp8_rowwise", "--top_k=40"]
    whole, streamed = run_command("generate", *flags), run_command("generate", *flags, "--stream")
    assert whole.returncode == streamed.returncode == 0, whole.stderr + streamed.stderr
    assert whole.stdout == streamed.stdout and len(whole.stdout) > 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "give a --prompt, or several, or --prompts_file"),
        (["--prompt=a", "--prompt=b", "--stream"], "--stream prints one text, and there are 2"),
        (["--prompt=a", "--temperature=0", "--top_k=3"], "temperature=0 .* top_k=3 has no effect"),
        (["--prompt=one", "--max_length=9", "--max_tokens=8"], "prompt 0 has . tokens: .* cache"),
    ],
)
def test_bad_input_is_one_line(folder, flags, message):
    done = run_command("generate", f"--from=hf:{folder}", *flags)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert re.search(message, line), line
