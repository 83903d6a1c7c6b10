"""The data of the study, on a made-up machine: packages, split, shards and manifest."""

import hashlib
import json

import pytest

from experiments.study import corpus, corpus_files, corpus_split
from experiments.study.corpus_files import Root, find_files

LINES = 40  # of a file


def text(name: str, first: int = 0) -> str:
    """A file of lines that no other name has."""
    return "".join(f"{name}_variable_{i} = compute_{name}({i})\n" for i in range(first, LINES))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Folders of two roots, and the roots."""
    monkeypatch.setattr(corpus_split, "PACKAGE_BYTES", (0, 2**20))
    monkeypatch.setattr(corpus_split, "HELD_OUT_BYTES", 1)  # one package
    monkeypatch.setattr(corpus, "SHARD_BYTES", 3000)
    site, cuda = tmp_path / "site-packages", tmp_path / "cuda"
    for package in ("alpha", "beta", "gamma"):
        write(site / package / "__init__.py", text(package))
        write(site / package / "deep" / "module.h", text(f"{package}_deep"))
    write(site / "nvidia" / "cublas" / "include" / "api.h", text("cublas"))
    write(site / "single.py", text("single"))
    write(site / "alpha-1.0.dist-info" / "METADATA", "Name: alpha\nLicense-Expression: MIT\n")
    write(site / "alpha-1.0.dist-info" / "RECORD", "alpha/__init__.py,,\n")
    write(cuda / "include" / "cuda.h", text("cuda"))
    write(cuda / "lib" / "site-packages" / "other.py", text("other"))
    return site, cuda, [Root(site), Root(cuda, "cuda", "EULA")]


def write(path, content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def test_files_are_named_by_package_and_license(machine):
    site, cuda, roots = machine
    files = find_files(roots)
    named = {(file.package, file.path.name): file.license for file in files}
    assert named == {
        ("alpha", "__init__.py"): "MIT",
        ("alpha", "module.h"): "MIT",
        ("beta", "__init__.py"): "not stated",
        ("beta", "module.h"): "not stated",
        ("gamma", "__init__.py"): "not stated",
        ("gamma", "module.h"): "not stated",
        ("nvidia/cublas", "api.h"): "not stated",
        ("single", "single.py"): "not stated",
        ("cuda", "cuda.h"): "EULA",
    }
    assert files == find_files(roots[::-1])
    assert find_files([]) == []


def test_copies_and_what_is_no_text_are_left_out(machine):
    site, cuda, roots = machine
    before = find_files(roots)
    write(site / "beta" / "copy.py", text("alpha"))  # alpha comes first
    write(site / "beta" / "latin.py", b"caf\xe9 " * 100)
    write(site / "beta" / "table.py", "x" * 400)  # a line of 400 bytes
    write(site / "beta" / "tiny.py", "x = 1\n")
    write(site / "beta" / "big.py", text("big") * 1000)
    write(site / "beta" / "weights.bin", text("weights"))
    write(site / "beta" / "__pycache__" / "cached.py", text("cached"))
    (site / "beta" / "link.py").symlink_to(site / "single.py")
    assert find_files(roots) == before


def test_licenses_as_metadata_has_them(machine):
    site, *_ = machine
    write(
        site / "beta-2.dist-info" / "METADATA",
        "Name: beta\nLicense: all of it\nClassifier: License :: OSI Approved :: BSD License\n",
    )
    write(site / "beta-2.dist-info" / "RECORD", "beta/__init__.py,,\n")
    write(site / "single-2.dist-info" / "METADATA", "Name: single\nLicense: Zlib\n and more\n")
    write(site / "single-2.dist-info" / "RECORD", "single.py,,\n")
    licenses = {file.package: file.license for file in find_files([Root(site)])}
    assert (licenses["beta"], licenses["single"]) == ("BSD License", "Zlib")


def test_whole_packages_are_held_out_by_a_hash():
    sizes = {f"package{i}": 2**19 for i in range(100)} | {"tiny": 10, "huge": 2**30}
    chosen = corpus_split.held_out_packages(sizes)
    assert sum(sizes[name] for name in chosen) == corpus_split.HELD_OUT_BYTES
    by_hash = sorted(
        sizes.keys() - {"tiny", "huge"}, key=lambda n: hashlib.sha256(n.encode()).digest()
    )
    assert chosen == set(by_hash[: len(chosen)])


def test_a_near_copy_of_what_trains_is_not_held_out(machine):
    site, _, roots = machine
    write(site / "beta" / "vendored.py", text("alpha", first=30) + text("own", first=31))
    write(site / "beta" / "inspired.py", text("alpha", first=31) + text("mine", first=30))
    files = find_files(roots)
    held_out = [file for file in files if file.package == "beta"]
    kept = corpus_split.unseen(held_out, [file for file in files if file.package != "beta"])
    # 10 of 19 lines are alpha's, and 9 of 19.
    assert {file.path.name for file in held_out} - {file.path.name for file in kept} == {
        "vendored.py"
    }


def test_shards_hold_every_file_once_and_are_the_same_again(tmp_path, machine):
    site, _, roots = machine
    output, manifest = tmp_path / "out", tmp_path / "manifest.json"
    assert corpus.make_corpus(roots, output, manifest, 300) == []
    made = corpus.read_manifest(manifest)
    split = {name: entry["split"] for name, entry in made["packages"].items()}
    assert sorted(split.values()).count("heldout") == 1
    (held_out,) = (name for name, part in split.items() if part == "heldout")
    shards = sorted(output.glob("train-*.jsonl"))
    assert len(shards) > 1 and f"jsonl:{output}/train-*.jsonl" in corpus.training_text(output)
    lines = b"".join(path.read_bytes() for path in shards).splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    digests = [hashlib.sha256(each.encode()).hexdigest() for each in texts]
    files = find_files(roots)
    assert digests == sorted(file.digest for file in files if file.package != held_out)
    for name, entry in made["shards"].items():
        assert entry["sha256"] == hashlib.sha256((output / name).read_bytes()).hexdigest()
    stored = {path.name: path.read_bytes() for path in output.iterdir()}
    again = tmp_path / "again"
    assert corpus.make_corpus(roots[::-1], again, manifest, 300) == []
    assert {path.name: path.read_bytes() for path in again.iterdir()} == stored


def test_another_machine_says_what_differs(tmp_path, machine):
    site, _, roots = machine
    output, manifest = tmp_path / "out", tmp_path / "manifest.json"
    corpus.make_corpus(roots, output, manifest, 300)
    committed = manifest.read_bytes()
    write(site / "gamma" / "deep" / "module.h", text("changed"))
    write(site / "extra.py", text("extra"))
    (site / "single.py").unlink()
    differing = corpus.make_corpus(roots, tmp_path / "other", manifest, 300)
    told = {line.partition(" ")[0].rstrip(":") for line in differing}
    assert {"gamma", "extra", "single"} <= told and "alpha" not in told
    assert "single is missing" in differing
    assert manifest.read_bytes() == committed
    # A finished folder with the committed manifest is not made again.
    assert corpus.make_corpus([], output, manifest, 300) == []


def test_roots_of_this_machine_are_folders_with_python_s_own():
    roots = corpus_files.machine_roots()
    assert "python" in {root.name for root in roots}
    assert all(root.folder.is_dir() for root in roots)
