"""Parses the config key `data`: which sources a run reads, and with which weights.

The key lists sources, separated by commas. Each is `[NAME=][WEIGHT*]KIND[:ARGUMENT]`:

    books=0.7*jsonl:/data/books-*.jsonl.zst#body,code=0.3*python_stdlib

NAME appears in reports and metrics. A source without one is named after its kind and the stem of
its argument (`jsonl-books`). WEIGHT is the source's share of the training rows relative to the
other sources (data/mixture.py); either all sources have a weight or none has. KIND is a key of
`SOURCES`:

    python_stdlib               the .py files of the running Python's standard library
    text:GLOB[#split=SEPARATOR] each file is a document; or each part of one between separators
    jsonl:GLOB[#FIELD]          each line {"FIELD": "…"} is a document
    parquet:GLOB[#COLUMN]       each row is a document
    tfds:NAME[@SPLIT][#FIELD]   each example of a TensorFlow dataset is a document
    chat:GLOB[#turns]           each line is a conversation (chat/conversation.py), or with #turns
                                each of its assistant's turns, with what came before it
    rows:MODULE:OBJECT          rows of tokens of your own code; no other source beside it
                                (data/token_rows.py)

FIELD and COLUMN default to `text`. Files of `text`, `jsonl` and `chat` may be compressed, by gzip,
zstd, bzip2 or xz, and have a byte order mark (data/files.py). The text after the last # is a field
if it looks like a name: letters, digits, _, - and ., starting with a letter or _. SEPARATOR is any
text without commas, such as <|endoftext|>, or the word `blank` for one or more blank lines. White
space at its end is left out.

GLOB is a pattern of paths, where ** crosses folders; or hf:ORG/NAME[@REVISION]/GLOB for files of a
data set of Hugging Face's hub (data/hub.py); or s3://BUCKET/GLOB or gs://BUCKET/GLOB for objects of
a store (data/urls.py).

Each kind is one function from the ARGUMENT ("" if there is none) to a `Reader`. It is called when
the config is parsed, so it may look for files, and download
them, but must not read them.
"""

import glob
import os
import re
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

from fp8jax.lm.chat.conversation import ChatFiles
from fp8jax.lm.data.bad_examples import BAD_EXAMPLES
from fp8jax.lm.data.documents import log_skipped, read_documents, require_fraction
from fp8jax.lm.data.files import COMPRESSIONS, Tally
from fp8jax.lm.data.hub import data_folder, names_folder
from fp8jax.lm.data.readers import (
    JsonLines,
    ParquetFiles,
    Reader,
    Source,
    TensorFlowDataset,
    TextFiles,
)
from fp8jax.lm.data.token_rows import OwnRows
from fp8jax.lm.data.urls import find_urls, is_url
from fp8jax.lookup import lookup

_FIELD = re.compile(r"(?P<rest>.*)#(?P<field>[A-Za-z_][\w.-]*)", re.DOTALL)


def _found(pattern: str) -> tuple[Path, ...]:
    """Returns the files that a glob pattern (** allowed) matches, sorted by name.

    `hf:ORG/NAME[@REVISION]/GLOB` are files of a data set of the hub, which are downloaded;
    `gs://BUCKET/GLOB` and `s3://BUCKET/GLOB` are objects, which are not.
    """
    if is_url(pattern):
        if not (urls := find_urls(pattern)):
            raise ValueError(f"no file matches {pattern!r}")
        return tuple(urls)
    if names_folder(pattern):
        folder, inside = data_folder(pattern)
        own = glob.escape(str(folder)) + "/" + inside
    else:
        own = os.path.expanduser(pattern)
    _check_folders(own)
    names = glob.glob(own, recursive=True)
    matches = set(map(Path, names))
    if broken := sorted(path for path in matches if path.is_symlink() and not path.exists()):
        raise ValueError(f"{broken[0]} is a link to {os.readlink(broken[0])}, which is not there")
    paths = sorted((path for path in matches if path.is_file()), key=Path.as_posix)
    if not paths:
        hint = ""
        if os.path.isdir(os.path.expanduser(pattern)):
            inside = os.path.join(pattern, "**", "*.txt")
            hint = f": it is a folder; name its files, as in {inside!r}"
        raise ValueError(f"no file matches {pattern!r}{hint}")
    _refuse_twice(pattern, paths)
    return tuple(paths)


def _refuse_twice(pattern: str, paths: Sequence[Path]) -> None:
    """Raises ValueError if a link makes two folders of the files one, so that all come twice."""
    first: dict[str, Path] = {}
    for folder in dict.fromkeys(path.parent for path in paths):
        if (same := first.setdefault(os.path.realpath(folder), folder)) != folder:
            raise ValueError(
                f"{pattern!r} has files twice, since a link makes {same} and {folder} one folder:"
                " remove the link, or name the folders one by one"
            )


def _check_folders(pattern: str) -> None:
    """Raises ValueError for a folder that `glob` would pass over, because it may not be read, or
    never leave, because a link leads back to it."""
    folder = Path(pattern)
    while re.search(r"[*?[]", str(folder)):
        folder = folder.parent

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise ValueError(
                f"{pattern!r}: the folder {error.filename!r} cannot be read: {error.strerror}"
            )

    first: dict[str, str] = {}
    for path, inside, _ in os.walk(folder, onerror=refuse, followlinks=True):
        same = first.setdefault(os.path.realpath(path), path)
        if same != path:
            if Path(same) in Path(path).parents:
                raise ValueError(f"{pattern!r} has no end: {path!r} leads back to {same!r}")
            inside.clear()
        inside[:] = [name for name in inside if not name.startswith(".")]  # as ** passes over them
        if "**" not in pattern:
            break


def _stem(pattern: str) -> str:
    """Returns the file name without its endings: books-*.jsonl.zst -> books-*"""
    path = Path(pattern)
    return path.with_suffix("").stem if path.suffix in COMPRESSIONS else path.stem


def _with_field(argument: str) -> tuple[str, str]:
    """Splits an argument into the part before #FIELD, and the field."""
    match = _FIELD.fullmatch(argument)
    return (match["rest"], match["field"]) if match else (argument, "text")


def _python_stdlib(argument: str) -> Reader:
    """Reads the .py files of the running Python's standard library, without its tests."""
    if argument:
        raise ValueError(f"source python_stdlib takes no argument, got {argument!r}")
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = []
    for folder, folders, names in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in skipped]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return TextFiles(label="", paths=tuple(sorted(files, key=Path.as_posix)))


def _text(argument: str) -> Reader:
    pattern, given, separator = argument.rpartition("#split=")
    if not given:
        pattern, separator = separator, ""
    elif not separator:
        raise ValueError("#split= needs a separator, such as blank")
    return TextFiles(label=_stem(pattern), paths=_found(pattern), separator=separator)


def _jsonl(argument: str) -> Reader:
    pattern, field = _with_field(argument)
    return JsonLines(label=_stem(pattern), paths=_found(pattern), field=field)


def _parquet(argument: str) -> Reader:
    pattern, column = _with_field(argument)
    return ParquetFiles(label=_stem(pattern), paths=_found(pattern), column=column)


def _tfds(argument: str) -> Reader:
    dataset, field = _with_field(argument)
    name, at, split = dataset.partition("@")
    if not name or (at and not split):
        raise ValueError(f"expected NAME[@SPLIT][#FIELD], got {argument!r}")
    return TensorFlowDataset(name=name, split=split, field=field)


def _chat(argument: str) -> Reader:
    pattern, given, unit = argument.partition("#")
    if given and unit != "turns":
        raise ValueError(f"expected chat:GLOB or chat:GLOB#turns, got #{unit}")
    return ChatFiles(label=_stem(pattern), paths=_found(pattern), each_turn=bool(given))


def _rows(argument: str) -> Reader:
    module, colon, name = argument.partition(":")
    if not (module and name):
        raise ValueError(f"expected rows:MODULE:OBJECT, got {argument!r}")
    return OwnRows(argument)


SOURCES: dict[str, Callable[[str], Reader]] = {
    "python_stdlib": _python_stdlib,
    "text": _text,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "tfds": _tfds,
    "chat": _chat,
    "rows": _rows,
}


def chat_readers(sources: Sequence[Source]) -> dict[str, ChatFiles]:
    """Returns the readers of the sources of conversations, by name; {} for sources of text.

    Raises:
      ValueError: some sources are of conversations, and others of text.
    """
    chats = {s.name: s.reader for s in sources if isinstance(s.reader, ChatFiles)}
    if chats and len(chats) < len(sources):
        texts = ", ".join(source.name for source in sources if source.name not in chats)
        raise ValueError(
            f"conversations ({', '.join(chats)}) and text ({texts}) do not mix in a run, since "
            "conversations are packed as whole examples and text is cut; train on the text first, "
            "and on the conversations with config.initial_weights"
        )
    return chats


def own_rows(sources: Sequence[Source]) -> tuple[str, OwnRows] | None:
    """Returns name and reader of the source of a user's own rows; None if there is none.

    Raises ValueError if there are other sources, too.
    """
    found = [(s.name, s.reader) for s in sources if isinstance(s.reader, OwnRows)]
    if found and len(sources) > 1:
        others = ", ".join(source.name for source in sources if source.name != found[0][0])
        raise ValueError(
            f"rows of tokens ({found[0][0]}) mix with no other source ({others}): mix the rows"
            " themselves, as grain.MapDataset.mix does"
        )
    return found[0] if found else None


def _weight(text: str, spec: str) -> Fraction:
    """Returns the exact value of a decimal: 0.7 is 7/10."""
    number = Fraction(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?|\.[0-9]+", text) else Fraction(0)
    if not number:
        raise ValueError(f"weight {text!r} in {spec!r}: expected a positive decimal such as 0.7")
    return number


def _parse_source(spec: str) -> Source:
    """Parses one `[NAME=][WEIGHT*]KIND[:ARGUMENT]`."""
    head, _, argument = spec.partition(":")
    name, equals, weighted = head.rpartition("=")
    weight, times, kind = weighted.rpartition("*")
    if kind not in SOURCES and "/" in head:  # the star of a glob is no weight's
        raise ValueError(f"{spec!r} has no kind in front of its path: text:{weighted} reads files")
    resolve = lookup("source", kind, SOURCES)
    number = _weight(weight, spec) if times else None
    if equals and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(
            f"source name {name!r} in {spec!r}: use only letters, digits, '_', '-' and '.', and a "
            "letter or digit first, since it names files and metrics"
        )
    try:
        reader = resolve(argument)
    except ValueError as error:
        raise ValueError(f"{error}, in the source {spec!r}") from error
    if not equals:
        label = re.sub(r"[^A-Za-z0-9._-]+", "_", reader.label).strip("_.-")
        name = f"{kind}-{label}" if label else kind
    return Source(name=name, kind=kind, weight=number, reader=reader)


def parse_sources(data: str) -> list[Source]:
    """Parses the config key `data` (see the module's docstring). Looks for files but reads none.

    Raises:
      ValueError: a kind is unknown, a glob matches no file, a name occurs twice or cannot name a
        file, a weight is not a positive decimal, or only some of the sources have a weight.
    """
    sources = [_parse_source(spec.strip()) for spec in data.split(",")]
    names = [source.name for source in sources]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(
            f"two sources have the name {twice} in {data!r}: name them, as in NAME=text:GLOB"
        )
    bare = [source.name for source in sources if source.weight is None]
    if bare and len(bare) < len(sources):
        weighted = [name for name in names if name not in bare]
        raise ValueError(
            f"{', '.join(weighted)} have a weight and {', '.join(bare)} have none in {data!r}: "
            "give weights to all sources, as in NAME=0.7*text:GLOB, or to none"
        )
    return sources


def training_documents(data: str, valid_fraction: float) -> Iterator[str]:
    """Returns an iterator over the training documents of all sources, in order.

    They are the documents of a corpus's training split. A tokenizer is trained on them, since it
    must not see validation text. Weights have no effect here.

    Args:
      data: sources, see `parse_sources`.
      valid_fraction: fraction of the documents, between 0 and 1, that validate and are left out.

    Raises:
      ValueError: at the call, if the spec or the fraction is wrong; during iteration, if a file
        cannot be read. Bad records are skipped, and the log names the first ones.
    """
    require_fraction(valid_fraction)
    sources = parse_sources(data)

    def documents() -> Iterator[str]:
        for source in sources:
            tally = Tally(answer=BAD_EXAMPLES["skip"])
            for text, _, split in read_documents(source, tally, valid_fraction):
                if split == "train":
                    yield text
            log_skipped(source.name, tally.not_utf8 + tally.no_text, tally.first)

    return documents()
