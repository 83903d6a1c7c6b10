"""The README: its tables equal the code, its examples run, its commands and links exist."""

import ast
import importlib.util
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.lm.model.models import MODELS
from fp8jax.lm.model.transformer import count_params
from fp8jax.lm.records.config_keys import by_path
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import POLICIES
from tests.support import ROOT
from tests.support.layers import LAYERS

README, RUNNING, YOUR_MODEL = (
    (ROOT / page).read_text(encoding="utf-8")
    for page in ("README.md", "docs/running.md", "docs/your_model.md")
)


# Tables -------------------------------------------------------------------------------------------


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def model_table() -> str:
    """Families in the order of `MODELS`, each with its sizes."""
    rows = []
    for name, config in MODELS.items():
        parts = [
            {"rms": "RMSNorm", "layer": "LayerNorm"}[config.norm],
            {"swiglu": "SwiGLU", "gelu": "GELU", "gelu_tanh": "GELU (tanh)"}[config.mlp],
            f"{config.learned_positions} positions" if config.learned_positions else "RoPE",
            {"none": "", "qkv": "biases of q k v", "all": "biases"}[config.biases],
            "q and k normalized" if config.qk_norm else "",
            "tied" if config.tie_embeddings else "",
        ]
        heads = f"{config.n_heads}/{config.n_kv_heads}"
        rows.append(
            [
                f"`{name}`",
                f"{count_params(config):,}",
                str(config.n_layers),
                str(config.d_model),
                heads,
                ", ".join(filter(None, parts)),
            ]
        )
    header = ["`model`", "parameters", "layers", "width", "heads/kv", "made of"]
    return markdown_table(header, rows)


def test_every_policy_has_its_line():
    table = RUNNING.split("| `precision` |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(POLICIES)
    section = README.split("## Precision is one word")[1].split("\n## ")[0]
    named = re.findall(r"^- .*", section, re.M)
    assert sorted(re.findall(r"`(\w+)`", "".join(named))) == sorted(POLICIES)
    landing = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    counted = re.search(r"(\d+) precision policies, (\d+) models", landing)
    assert counted and counted.groups() == (str(len(POLICIES)), str(len(MODELS)))


def test_policies_with_options_exist():
    specs = re.findall(r"`(\w+:[^`/]*=[^`]*)`", README + RUNNING)
    named = [spec for spec in specs if not spec.startswith("my_recipes:")]  # of a user's file
    assert len(named) == 5
    for spec in named:
        as_policy(spec)


def test_the_picture_of_the_layers_is_the_rule():
    picture = README.split("## Layers")[1].split("```")[1]
    layers, wing = [], ""
    for indent, name in re.findall(r"^( +)([a-z_]+)(?:\.py|/)  +\S", picture, re.M):
        wing = wing if len(indent) == 4 else name
        layers.append(f"{wing}/{name}" if len(indent) == 4 else name)
    assert tuple(layer for layer in layers if layer != "lm") == LAYERS


def test_the_readme_fits_three_screens():
    assert len(README.splitlines()) <= 150


def test_models_page_is_what_the_code_says():
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{model_table()}"), f"docs/models.md: {model_table()}"


def test_every_config_key_stands_on_its_page():
    """Each with its default; the page is what docs/config_keys.py writes."""
    page = (ROOT / "docs/config_keys.md").read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location("config_keys", ROOT / "docs/config_keys.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert page == module.page(), "run python docs/config_keys.py"
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)`(.*?) \| (.+) \|$", page, re.M)
    defaults = {key: ast.literal_eval(default) for key, default, _, _ in rows}
    assert defaults == by_path(base.get_config())
    assert len(rows) == len(defaults) > 80


# Examples -----------------------------------------------------------------------------------------

PYTHON = [
    block
    for page in (README, YOUR_MODEL.split("## NNX")[1], RUNNING)
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
]


def execute(source: str, monkeypatch, before: dict | None = None) -> dict:
    """What a block leaves behind, which may go on from what another one has left.

    It runs as a module: linen looks modules of classes up.
    """
    module = types.ModuleType("readme_example")
    module.__dict__.update(before or {})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "README.md", "exec"), module.__dict__)
    return module.__dict__


def test_examples_of_linen_and_nnx_train(monkeypatch, capsys):
    """The second goes on from the first one's data. Each fits a screen. The first ends with a line
    that says that it worked, and with what it prints: within a fifth, since the last loss varies
    with the order of float sums of a CPU, by a few percent between two."""
    linen, nnx = PYTHON[:2]
    for source in (linen, nnx):
        assert sum(bool(line.strip()) for line in source.splitlines()) < 30
    left = execute(linen, monkeypatch)
    (comment,) = re.findall(r'^print\(.*"\)  # (.*)$', linen, re.M)
    printed, numbers = capsys.readouterr().out, r"\d+\.\d+"
    assert re.sub(numbers, "", printed) == re.sub(numbers, "", comment) + "\n"
    said, seen = (list(map(float, re.findall(numbers, text))) for text in (comment, printed))
    assert len(said) == 2
    np.testing.assert_allclose(seen, said, rtol=0.2)
    histories = left["variables"][HISTORIES]
    assert set(histories) == {"Dense_0", "Dense_1"}
    for history in jax.tree.leaves(histories):
        assert history.dtype == jnp.float32
        assert np.all(np.asarray(history) > 0)  # every slot was written
    again = execute(nnx, monkeypatch, left)
    for losses in (np.asarray(left["losses"]), np.asarray(again["losses"])):
        assert len(losses) == 300 and losses[-1] < losses[0] / 20
    assert isinstance(again["losses"][0], jax.Array) and "gelu" in nnx


def test_example_of_the_pure_function(monkeypatch):
    left = execute(PYTHON[2], monkeypatch)
    x, w, state = left["x"], left["w"], left["state"]
    assert {operand: history.dtype for operand, history in state.items()} == dict.fromkeys(
        "xwg", jnp.float32
    )
    for operand, tensor in (("x", x), ("w", w)):
        np.testing.assert_array_equal(state[operand][:2], [jnp.abs(tensor).max()] * 2)
    # (c): dw = x^T (2 x w) with three casts to e4m3 (u = 2^-4) and one to e5m2 (u = 2^-3), each
    # element off by u relative, bounded as if nothing cancelled.
    bound = ((1 + 2**-4) ** 3 * (1 + 2**-3) - 1) * 2 * jnp.abs(x).T @ (jnp.abs(x) @ jnp.abs(w))
    error = jnp.abs(left["dw"] - 2 * x.T @ (x @ w))
    assert jnp.all(error <= bound) and jnp.any(error > 0)
    assert len(PYTHON) == 3, "a new example needs its test"


# Commands and links -------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["run", "test"])
def test_ci_finds_its_block(mark):
    blocks = re.findall(rf"^<!-- ci: {mark} -->\s*^```bash\n(.*?)^```$", README, re.M | re.S)
    assert len(blocks) == 1
    joined = blocks[0].replace("\\\n", "")
    assert joined.count("\n") == 1, "one command"
    assert joined.startswith("python3 -m venv .venv && .venv/bin/pip install ")
    if mark == "run":  # it ends with numbers that a person can judge
        assert re.search(
            r" -m experiments\.train --config=\S+ --workdir=(\S+) && +\S+ -m "
            r"experiments\.evaluate --workdir=\1\n",
            joined,
        )
    else:
        assert "-m pytest" in joined


def test_ci_finds_the_commands_that_use_a_run():
    (block,) = re.findall(r"^<!-- ci: use -->\s*^```bash\n(.*?)^```$", README, re.M | re.S)
    commands = re.findall(r"^\.venv/bin/python -m experiments\.(\w+) .*=runs/smoke ", block, re.M)
    assert commands == ["generate", "convert"] and block.count("\n") == 2


def test_commands_name_configs_and_keys_that_exist():
    text = README + RUNNING
    configs = set(re.findall(r"--config=(\S+\.py)", text))
    assert configs and all((ROOT / config).exists() for config in configs)
    config = base.get_config()
    for key in re.findall(r"--config\.([\w.]+)", text):
        group, _, name = key.rpartition(".")
        if key != "KEY":
            assert name in (config[group] if group else config), key
    for name in set(re.findall(r"--config\.precision=(\w+)", text)) - {"NAME", "my_recipes"}:
        assert name in POLICIES


PAGES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))


def prose(text: str) -> str:
    """A page without its code, in which brackets are no links."""
    return re.sub(r"^(```+).*?^\1$", "", text, flags=re.M | re.S)


def anchors(text: str) -> set[str]:
    """What a link to a heading of this page ends in, as GitHub makes it: lower case, hyphens."""
    headings = re.findall(r"^#+ +(.*?) *$", prose(text), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


def broken_links(page: str, text: str) -> list[str]:
    """The relative links of a page that lead to no file, or to no heading of a page."""
    broken = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)", prose(text)):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not target.exists():
            broken.append(link)
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *PAGES])
def test_links_lead_somewhere(page):
    assert broken_links(page, (ROOT / page).read_text(encoding="utf-8")) == []


def code_in_lists(text):
    """Lines of indented code that belong to the list before it, whose text they would be."""
    found, listed, fenced = [], False, False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced, listed = not fenced, False
        elif not fenced and line.strip():
            if listed and line.startswith("    ") and re.match(r" *(#|python|\$|\.venv)", line):
                found.append(line)
            listed = bool(re.match(r"[-*] |\d+\. ", line)) or (listed and line.startswith(" "))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_code_is_not_the_text_of_a_list(page):
    assert code_in_lists((ROOT / page).read_text(encoding="utf-8")) == []


def test_code_behind_a_list_is_found():
    code = "    # again\n    python -m experiments.study"
    assert len(code_in_lists(f"- one\n  more\n\n{code}\n")) == 2
    assert code_in_lists(f"- one\n\ntext\n\n{code}\n") == []
    assert code_in_lists("- one\n\n```bash\n    # again\n```\n") == []


def test_a_broken_link_is_found():
    text = "[a](no.md) [b](recipes.md#no) [c](recipes.md#six-casts) [d](https://e.org/x#y)"
    assert broken_links("docs/running.md", text) == ["no.md", "recipes.md#no"]
    assert anchors("# `a.b` and [c](d.md), e\n```\n# no\n```\n") == {"ab-and-c-e"}


def installed_from_an_index(text: str) -> list[str]:
    """The commands that take fp8jax from a package index, which has none of that name."""
    return re.findall(r"pip install [^\n`]*\bfp8jax\b", text)


def test_nothing_is_installed_from_an_index_that_lacks_it():
    files = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("colabs/*.ipynb")]
    files += [*ROOT.glob("fp8jax/**/*.py"), *ROOT.glob("experiments/**/*.py")]
    told = [
        f"{path.name}: {command}"
        for path in files
        for command in installed_from_an_index(path.read_text(encoding="utf-8"))
    ]
    assert told == [] and installed_from_an_index("(pip install 'fp8jax[plots]')") != []


def test_the_index_of_results_names_every_page():
    index = (ROOT / "docs/results/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\w+\.md)\]\(\1\)", index, re.M)
    pages = {path.name for path in (ROOT / "docs/results").glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(pages)


def test_reading_order_starts_at_the_bottom():
    """Each file is linked by its own name, and none imports a file that comes later in the list."""
    design = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    section = design.split("## Where to look first")[1].split("\n## ")[0]
    links = re.findall(r"\[`(\w+\.py)`\]\(\.\./(fp8jax/[\w/]+\.py)\)", section)
    assert len(links) >= 8 and all(path.endswith("/" + name) for name, path in links)
    modules = [path.removesuffix(".py").replace("/", ".") for _, path in links]
    for i, (_, path) in enumerate(links):
        later = set(modules[i + 1 :])
        assert later.isdisjoint(re.findall(r"^from (\S+) import", (ROOT / path).read_text(), re.M))
