"""Writes config_keys.md, the page of all config keys: `python docs/config_keys.py`.

Keys, defaults and texts are read from fp8jax/lm/training/config.py, and the names that a key takes
from the tables that hold them. A test compares the page.
"""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fp8jax.lm.model.attention import ATTENTIONS
from fp8jax.lm.model.config import MLPS
from fp8jax.lm.model.rope import ROPE_SCALINGS
from fp8jax.lm.model.transformer import REMAT
from fp8jax.lm.optim.moment_formats import MOMENTS
from fp8jax.lm.optim.optimizers import OPTIMIZERS
from fp8jax.lm.optim.schedules import SCHEDULES
from fp8jax.lm.training import config

PAGE = Path(__file__).with_name("config_keys.md")
NAMES: dict[str, Iterable[str]] = {
    "ATTENTIONS": ATTENTIONS,
    "MLPS": MLPS,
    "MODELS": (),  # a page of their own
    "MOMENTS": MOMENTS,
    "OPTIMIZERS": OPTIMIZERS,
    "REMAT": REMAT,
    "ROPE_SCALINGS": ROPE_SCALINGS,
    "SCHEDULES": SCHEDULES,
}
# Where a guide says more, for keys whose comment does not.
MORE = {
    "precision": "[recipes](recipes.md#policies)",
    "precision_schedule": "[running](running.md#precision)",
    "backend": "[backends](running.md#backends)",
    "attention": "[attention](running.md#attention)",
    "remat": "[rematerialization](running.md#rematerialization-and-unrolling)",
    "model": "[models](models.md)",
    "initial_weights": "[Hugging Face](hugging_face.md#training)",
    "initial_state": "[resuming](running.md#workdir-and-resume)",
    "mesh": "[devices](running.md#devices)",
    "data": "[text](running.md#text), [chats](running.md#fine-tuning-on-chats)",
    "tokenizer": "[text](running.md#text)",
    "long_examples": "[chats](running.md#fine-tuning-on-chats)",
    "optimizer.name": "[your own](running.md#precision)",
    "optimizer.schedule": "[your own](running.md#precision)",
    "optimizer.moments": "[results](results/moments.md)",
    "recovery.ladder": "[reliability](reliability.md)",
    "gnmr.alpha": "[results](results/gnmr.md)",
    "telemetry.every": "[telemetry](telemetry.md)",
}
BEGIN = """# Config keys

Every key of a run's config with its default. `--config.KEY=VALUE` changes it on the command line,
`config.KEY = value` in a file that begins with `config = fp8jax.base_config()`
([how](running.md#configs)). An unknown key is an error that names the nearest one. Keys that are
`None` say what they take; no other key may be `None`.

`python docs/config_keys.py` writes this page from [`config.py`](../fp8jax/lm/training/config.py).
"""

KEY = re.compile(r"    config\.([\w.]+) = (placeholder\(\s*\w+\s*\)|.*?)  # (.*)")
UNSET = re.compile(r"placeholder\(\s*(\w+)\s*\)")


def page() -> str:
    """Return the text of the page."""
    parts = [BEGIN]
    for heading, text, keys in sections():
        parts += [f"\n## {heading}\n", f"\n{text}\n" if text else "", "\n| key | default | |\n"]
        parts.append("| --- | --- | --- |\n")
        parts += [f"| `{key}` | {default} | {words} |\n" for key, default, words in keys]
    return "".join(parts)


def sections() -> Iterator[tuple[str, str, list[tuple[str, str, str]]]]:
    """Yield the heading of each part of the config, its text, and (key, default, words) of each."""
    source = Path(str(config.__file__)).read_text(encoding="utf-8")
    for part in re.split(r"\n\n    # ", source)[1:]:
        head, _, lines = part.partition("\n")
        heading = re.split(r"[:;]| \(", head)[0]
        rest = head.removeprefix(heading)
        text = in_code(head if rest.startswith(" (") else rest.lstrip(":; "))
        yield heading, text and f"{text[0].upper()}{text[1:]}.", list(keys(lines))


def keys(lines: str) -> Iterator[tuple[str, str, str]]:
    for key, default, comment in KEY.findall(lines):
        unset = UNSET.fullmatch(default)
        words = re.sub(r"a key of ([A-Z_]+)(?: \([^)]*\))?", names, in_code(escaped(comment)))
        if key in MORE:
            words += f"; {MORE[key]}"
        yield key, f"`None`, or {unset[1]}" if unset else f"`{default}`", words


def names(found: re.Match[str]) -> str:
    """Return the names that "a key of NAMES" stands for."""
    return ", ".join(f"`{name}`" for name in NAMES[found[1]]) or "a name"


def in_code(text: str) -> str:
    """Return a text with keys such as num_steps in the font of code."""
    return re.sub(r"\b[a-z]\w*_\w+", r"`\g<0>`", text)


def escaped(text: str) -> str:
    """Return a text that Markdown shows as it is, in a table; a list of [PART]s as code."""
    found = re.compile(r"(\[\S+\],…)|([\[\]*|<>])")
    return found.sub(lambda part: f"`{part[1]}`" if part[1] else f"\\{part[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
