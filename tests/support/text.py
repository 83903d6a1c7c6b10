"""Text to train on, and files of it: the library has none to give."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa


def generated_text(*, documents: int, seed: int = 0, words: int = 40) -> list[str]:
    """Documents of words that a small model can learn: each word fixes the next but for a few."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(64)]
    texts = []
    for _ in range(documents):
        word, text = rng.randrange(64), []
        for _ in range(rng.randint(words // 2, words)):
            text.append(vocabulary[word])
            word = (5 * word + rng.choice((1, 1, 1, 7))) % 64
        texts.append(" ".join(text) + ".")
    return texts


def write_jsonl(path: Path, texts: list[str]) -> str:
    """Writes the documents; returns the source's spec."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return f"jsonl:{path}"


def write_generated_text(folder: Path, *, documents: int = 200, seed: int = 0) -> str:
    """Writes generated documents; returns the spec to give as the config key `data`."""
    return write_jsonl(
        folder / f"generated-{seed}.jsonl", generated_text(documents=documents, seed=seed)
    )


def json_lines(texts: list[str], field: str = "text") -> bytes:
    return "".join(json.dumps({field: text}) + "\n" for text in texts).encode()


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(content)
        return sink.getvalue().to_pybytes()
    return gzip.compress(content) if suffix == ".gz" else content
