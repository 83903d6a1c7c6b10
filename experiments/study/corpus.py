"""The text of the study: source code and documentation of a machine, as shards with a manifest.

The machines that train have no network, but their Python and CUDA folders hold half a gigabyte of
text. The shards are made there and stay there: the text is trained on and never distributed. What
is committed is a manifest of hashes, from which another machine can tell whether it has made the
same shards, and if not, in which packages they differ.

    OUTPUT/train-00.jsonl …   a line {"text": …} for each file, in the order of the files' hashes
    OUTPUT/heldout.jsonl      the same for packages of which nothing is trained on
    OUTPUT/tokenizer.json     a byte-pair encoding
    OUTPUT/manifest.json      the manifest of what is here

The order by hashes is a random one that all machines share: a shard is a sample of the whole. The
tokenizer learns from the first shard. It is a byte-pair encoding of 32,000 tokens, not bytes: with
bytes the model would lose more than half of its parameters, and a row would hold thirty lines.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from configs import study
from experiments.study.corpus_files import File, Root, find_files
from experiments.study.corpus_split import held_out_packages, unseen
from fp8jax.lm.corpus import build_corpus
from fp8jax.lm.data.bpe import train_bpe
from fp8jax.lm.data.tokenizers import tokenizer

VOCAB_SIZE = 32_000  # that of llama_60m
SHARD_BYTES = 2**26
VALID_FRACTION = 0.001  # of the training text: what is held out for the study is other packages
TRAIN, HELD_OUT = "train", "heldout"
MANIFEST, TOKENIZER = "manifest.json", "tokenizer.json"

Manifest = dict[str, Any]


def make_corpus(roots: list[Root], output: Path, manifest: Path, vocab_size: int) -> list[str]:
    """Writes the shards, and the manifest if there is none yet; returns what differs from it.

    A folder whose manifest is the committed one is left as it is.
    """
    if manifest.exists() and read_manifest(manifest) == _manifest_of(output):
        return []
    output.mkdir(parents=True, exist_ok=True)
    for path in (output / MANIFEST, *output.glob("*.jsonl")):
        path.unlink(missing_ok=True)  # of another corpus, perhaps with more shards
    split = _split(find_files(roots))
    shards = write_shards(split[TRAIN], output, TRAIN)
    shards |= write_shards(split[HELD_OUT], output, HELD_OUT)
    learned = train_bpe(_texts(output / f"{TRAIN}-00.jsonl"), vocab_size).to_str(pretty=True)
    (output / TOKENIZER).write_text(learned, encoding="utf-8")
    made = {
        "packages": {
            name: entry for part, files in split.items() for name, entry in _packages(files, part)
        },
        "shards": shards,
        "tokenizer": {"tokens": vocab_size, "sha256": _sha256(learned.encode())},
    }
    _write(output / MANIFEST, made)
    if not manifest.exists():
        _write(manifest, made)
    return differences(read_manifest(manifest), made)


def training_text(output: Path) -> str:
    """Returns the text that trains, as the config key `data` has it."""
    return f"code=jsonl:{output}/{TRAIN}-*.jsonl"


def tokenize(output: Path) -> str:
    """Tokenizes the training text into the cache that all runs read; returns the counts.

    Without it, the first runs of all GPUs would do the same work side by side.
    """
    config = study.get_config()
    text_tokenizer = tokenizer(f"bpe:{output / TOKENIZER}")
    return build_corpus(
        training_text(output),
        text_tokenizer,
        seq_len=config.seq_len,
        valid_fraction=VALID_FRACTION,
        cache_dir=config.cache_dir,
    ).summary()


def _split(files: Sequence[File]) -> dict[str, list[File]]:
    sizes: Counter[str] = Counter()
    for file in files:
        sizes[file.package] += file.size
    held_out = held_out_packages(sizes)
    train = [file for file in files if file.package not in held_out]
    others = [file for file in files if file.package in held_out]
    return {TRAIN: train, HELD_OUT: unseen(others, train)}


# Shards -------------------------------------------------------------------------------------------


def write_shards(files: Iterable[File], output: Path, name: str) -> dict[str, dict]:
    """Writes files as JSON lines, ordered by their hashes; the held-out ones as one shard.

    Returns:
      What the manifest has of each shard, by its name.

    Raises:
      ValueError: a file has changed since it was hashed.
    """
    written: dict[str, dict] = {}
    for number, shard in enumerate(_shards(files, name)):
        path = output / (f"{name}-{number:02}.jsonl" if name == TRAIN else f"{name}.jsonl")
        digest, size = hashlib.sha256(), 0
        with open(path, "wb") as out:
            for file in shard:
                content = file.path.read_bytes()
                if _sha256(content) != file.digest:
                    raise ValueError(f"{file.path} has changed while it was read")
                line = json.dumps({"text": content.decode("utf-8")}, ensure_ascii=False) + "\n"
                out.write(line.encode("utf-8"))
                digest.update(line.encode("utf-8"))
                size += len(content)
        written[path.name] = {"files": len(shard), "bytes": size, "sha256": digest.hexdigest()}
    return written


def _shards(files: Iterable[File], name: str) -> Iterator[list[File]]:
    """Yields the files of each shard: a training shard ends with the file that fills it."""
    shard: list[File] = []
    size = 0
    for file in sorted(files, key=lambda file: file.digest):
        shard.append(file)
        size += file.size
        if name == TRAIN and size >= SHARD_BYTES:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


def _texts(shard: Path) -> Iterator[str]:
    with open(shard, "rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]


# The manifest -------------------------------------------------------------------------------------


def _packages(files: Sequence[File], part: str) -> Iterator[tuple[str, dict]]:
    """Yields what the manifest has of each package, by name."""
    for name in sorted({file.package for file in files}):
        own = [file for file in files if file.package == name]
        digests = "".join(sorted(file.digest for file in own))
        yield (
            name,
            {
                "split": part,
                "license": own[0].license,
                "files": len(own),
                "bytes": sum(file.size for file in own),
                "sha256": _sha256(digests.encode()),
            },
        )


def differences(before: Manifest, now: Manifest) -> list[str]:
    """Returns in what two manifests differ, a line for each package, shard and the tokenizer."""
    lines = []
    for kind in ("packages", "shards"):
        for name in sorted({*before[kind], *now[kind]}):
            if name not in now[kind]:
                lines.append(f"{name} is missing")
            elif name not in before[kind]:
                lines.append(f"{name} is new: {now[kind][name]}")
            elif before[kind][name] != now[kind][name]:
                old, new = before[kind][name], now[kind][name]
                parts = [f"{key} {old[key]} -> {new[key]}" for key in new if old[key] != new[key]]
                lines.append(f"{name}: {', '.join(parts)}")
    if before["tokenizer"] != now["tokenizer"]:
        lines.append(f"the tokenizer: {before['tokenizer']} -> {now['tokenizer']}")
    return lines


def read_manifest(path: Path) -> Manifest:
    return json.loads(path.read_text(encoding="utf-8"))


def digest_of(manifest: Path) -> str:
    """Returns what the ledger calls the data."""
    return _sha256(manifest.read_bytes())[:16]


def _manifest_of(output: Path) -> Manifest | None:
    path = output / MANIFEST
    return read_manifest(path) if path.exists() else None


def _write(path: Path, manifest: Manifest) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(path.name + ".tmp")
    half.write_text(json.dumps(manifest, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(half, path)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
