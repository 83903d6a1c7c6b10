"""Hugging Face folders by name: `hf:DIR`, `hf:ORG/NAME[@REVISION]` of the hub, `hf:s3://…`.

A folder that exists goes first. Of an object store the files are copied (stored_folders.py). Files
of the hub lie in the cache of the package huggingface_hub (HF_HUB_CACHE), whose variables hold here
too: HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE. Without a connection, what the cache has of a revision
is taken.

A process asks once which commit a revision is. Branches move, so a run that must be the same later
names a commit.
"""

import functools
import logging as python_logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from absl import logging

from fp8jax.lm.data.stored_folders import stored_folder
from fp8jax.lm.data.urls import is_url

SHAPE_FILES = ("config.json", "generation_config.json")
BESIDE_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    *BESIDE_TOKENIZER,
)
INDEX = "model.safetensors.index.json"  # which file has which weights

_SMALL = (*SHAPE_FILES, *TOKENIZER_FILES, INDEX, "additional_chat_templates/*.jinja")
_NAME = r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9][A-Za-z0-9_.-]*)"
_MODEL = re.compile(rf"{_NAME}(@(?P<revision>.+))?")
_DATA = re.compile(rf"{_NAME}(@(?P<revision>[^/]+))?/(?P<glob>.+)")


def names_folder(spec: str) -> bool:
    """Whether a spec is `hf:…`, be there such a folder or not."""
    return spec.startswith("hf:")


def as_folder(spec: str) -> Path | None:
    """Returns the folder that `hf:DIR`, `hf:ORG/NAME` or `hf:s3://…` names; None for other specs.

    Of the hub or of a store, it has the small files; `add_files` brings others.

    Raises:
      ValueError: there is no such folder, and hub or store does not give it; or the name is empty.
    """
    if not names_folder(spec):
        return None
    path = spec.removeprefix("hf:")
    folder = Path(os.path.expanduser(path))
    if not path:
        raise ValueError("hf: needs a folder: give hf:DIR, or hf:ORG/NAME of the hub")
    if folder.is_dir():
        return folder
    if is_url(path):
        return stored_folder(path, _SMALL)
    named = _MODEL.fullmatch(path)
    if named is None or folder.exists():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise ValueError(f"{spec}: {folder} {what}")
    return _download(spec, "model", named["name"], named["revision"], _SMALL)


def tokenizer_json(spec: str) -> Path:
    """Returns the path of the tokenizer.json that `bpe:PATH` or `hf:NAME` names.

    There may be no such file. Of a store, the files beside it are copied as well.

    Raises ValueError as `as_folder` does.
    """
    folder = as_folder(spec)
    if folder is not None:
        return folder / "tokenizer.json"
    path = spec.removeprefix("bpe:")
    if not is_url(path):
        return Path(path).expanduser()
    above, _, name = path.rpartition("/")
    return stored_folder(above, (name, *BESIDE_TOKENIZER)) / name


def add_files(spec: str, names: Iterable[str]) -> None:
    """Brings further files into the copy of a hub's or a store's folder, as far as it has them.

    Raises ValueError as `as_folder` does.
    """
    if is_url(spec.removeprefix("hf:")):
        stored_folder(spec.removeprefix("hf:"), names)
        return
    folder = as_folder(spec)
    named = _MODEL.fullmatch(spec.removeprefix("hf:"))
    if folder is None or named is None or Path(spec.removeprefix("hf:")).is_dir():
        return
    if missing := sorted(name for name in names if not (folder / name).exists()):
        _download(spec, "model", named["name"], folder.name, tuple(missing))


def data_folder(spec: str) -> tuple[Path, str]:
    """Returns a folder with files of the data set `hf:ORG/NAME[@REVISION]/GLOB`, and GLOB.

    The folder has at least the files that match.

    Raises:
      ValueError: the spec has another form, or the hub does not give the files.
    """
    named = _DATA.fullmatch(spec.removeprefix("hf:"))
    if named is None:
        raise ValueError(f"expected hf:ORG/NAME[@REVISION]/GLOB, a data set of the hub, got {spec}")
    pattern = named["glob"]
    # The library's * also matches /, and its **/ no empty path.
    ignored = () if "**" in pattern else ("*/" * (pattern.count("/") + 1) + "*",)
    wanted = tuple({pattern, pattern.replace("**/", "")})
    folder = _download(spec, "dataset", named["name"], named["revision"], wanted, ignored)
    return folder, pattern


@functools.cache
def _download(
    spec: str,
    kind: str,
    name: str,
    revision: str | None,
    patterns: tuple[str, ...],
    ignored: tuple[str, ...] = (),
) -> Path:
    """Returns the library's folder of a commit, with the files that match.

    Raises ValueError that says where the files were looked for, and why they did not come.
    """
    import huggingface_hub  # slow to import, and only names of the hub need it
    from huggingface_hub import constants, utils

    for client in ("httpx", "httpx2"):  # one line for each request
        python_logging.getLogger(client).setLevel(python_logging.WARNING)
    asked = unquote(revision or "main")  # as in the library's own names, a / is %2F
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name,
                repo_type=kind,
                revision=asked,
                cache_dir=constants.HF_HUB_CACHE,
                allow_patterns=list(patterns),
                ignore_patterns=list(ignored),
            )
        )
    except Exception as error:  # of the library, its HTTP client, the connection, the disk
        if isinstance(error, utils.GatedRepoError):
            why = "it is given on request: ask on its page, and set HF_TOKEN"
        elif isinstance(error, utils.RepositoryNotFoundError):
            why = "there is none, or it is private and HF_TOKEN does not open it"
        elif isinstance(error, utils.RevisionNotFoundError):
            why = "it has no such revision"
        elif constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set"
        else:
            reason = error.__cause__ or error
            why = f"{type(reason).__name__}: {' '.join(str(reason).split())}"
        local = "" if kind == "dataset" else f"no folder {spec.removeprefix('hf:')} is here, and "
        raise ValueError(
            f"{spec}: {local}the {kind} {name}, revision {asked}, did not come from "
            f"{constants.ENDPOINT}: {why}. The cache {constants.HF_HUB_CACHE} does not have it "
            "either; without a connection, copy the files and name their path"
        ) from error
    if folder.name != asked:
        logging.info("%s is commit %s; @%s keeps it", spec, folder.name, folder.name)
    return folder
