"""The notebooks in colabs/: what they are made of. `pytest --nbmake colabs/` executes them."""

import ast
import base64
import functools
import importlib
import json
import re
import sys
import types

import pytest

from tests.support import ROOT

FOLDER = ROOT / "colabs"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
LARGEST_FIGURE = 60_000  # bytes
LARGEST_NOTEBOOK = 400_000
OTHERS = {
    "IPython",
    "configs",
    "flax",
    "jax",
    "matplotlib",
    "numpy",
    "optax",
    "pandas",
    "safetensors",
}
# What `__all__` of these modules has is public, and so is what README and guides import.
PUBLIC_MODULES = ("fp8jax", "fp8jax.figures", "fp8jax.nn", "fp8jax.nnx", "fp8jax.telemetry")


def cells(name: str, kind: str) -> list[dict]:
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def texts(name: str, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in cells(name, kind)]


def code(name: str) -> ast.Module:
    return ast.parse("\n\n".join(texts(name, "code")))


def documented() -> set[str]:
    """Names that README and guides import from modules of the library: "MODULE.NAME"."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    found = re.findall(r"^from (fp8jax[\w.]+) import ([\w, ]+)$", text, re.M)
    return {f"{module}.{name.strip()}" for module, names in found for name in names.split(",")}


def imported(tree: ast.Module) -> list[str]:
    """Full names of what is imported: "MODULE" or "MODULE.NAME"."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def check_public(name: str) -> None:
    """Raises AssertionError unless "fp8jax.a.b" is public: in `__all__`, or in a guide."""
    if name in PUBLIC_MODULES or name in documented():
        return
    module, _, attribute = name.rpartition(".")
    assert module in PUBLIC_MODULES, f"{name} is not public"
    assert attribute in public_module(module).__all__, f"{name} is not public"


def public_module(name: str) -> types.ModuleType:
    """A module by its public name, which may be an attribute of fp8jax."""
    found = importlib.import_module("fp8jax")
    return functools.reduce(getattr, name.split(".")[1:], found)


def fp8jax_names(tree: ast.Module) -> set[str]:
    """Attributes of fp8jax and of its public modules that the code reads: "fp8jax.nn.Dense"."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        chain: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            chain, inner = [inner.attr, *chain], inner.value
        if isinstance(inner, ast.Name) and inner.id == "fp8jax" and chain != ["__file__"]:
            head = ".".join(["fp8jax", chain[0]])
            found.add(".".join([head, *chain[1:2]]) if head in PUBLIC_MODULES else head)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "__file__"


def test_there_are_seven():
    assert [name[0] for name in NAMES] == list("1234567")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_notebook_with_its_texts_and_figures(name):
    """The pages show them, and execute nothing."""
    path = FOLDER / name
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and notebook["nbformat_minor"] >= 5
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert {cell["cell_type"] for cell in notebook["cells"]} == {"markdown", "code"}
    figures, said = 0, []
    for cell in cells(name, "code"):
        assert cell["execution_count"] is None
        for output in cell["outputs"]:
            if output["output_type"] == "display_data":
                assert list(output["data"]) == ["image/png"]
                png = base64.b64decode(output["data"]["image/png"])
                assert png.startswith(b"\x89PNG") and len(png) < LARGEST_FIGURE
                figures += 1
            elif output["output_type"] == "execute_result":
                assert list(output["data"]) == ["text/plain"]
                said += output["data"]["text/plain"]
            else:
                assert (output["output_type"], output["name"]) == ("stream", "stdout")
                said += output["text"]
    assert figures >= 2 and said, "a notebook teaches with what it shows: execute it, and keep that"
    assert not re.search(r"/(tmp/tmp|home/|root/|work/)", "".join(said)), "a path of one machine"
    assert path.stat().st_size < LARGEST_NOTEBOOK


@pytest.mark.parametrize("name", NAMES)
def test_it_installs_from_where_it_lies(name):
    """The project has no address yet: a notebook points to none."""
    install = texts(name, "code")[0]
    assert texts(name, "markdown")[0].startswith("# ")
    assert install == texts(NAMES[0], "code")[0], "one install cell for all notebooks"
    everything = "".join(texts(name, "markdown") + texts(name, "code"))
    assert "github.com" not in everything and "colab.research" not in everything


@pytest.mark.parametrize("name", NAMES)
def test_it_uses_public_names_only(name):
    tree = code(name)
    for full_name in imported(tree):
        root = full_name.split(".")[0]
        if root == "fp8jax":
            check_public(full_name)
        else:
            assert root in OTHERS or root in sys.stdlib_module_names, f"import of {full_name}"
    for full_name in fp8jax_names(tree):
        check_public(full_name)
    for node in ast.walk(tree):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        names += [node.id] if isinstance(node, ast.Name) and node.id != "_" else []
        assert not any(map(is_private, names)), names


@pytest.mark.parametrize("name", NAMES)
def test_what_it_names_exists(name):
    everything = "\n".join(texts(name, "markdown") + texts(name, "code"))
    for page in re.findall(r"docs/[\w/]+\.md", everything):
        assert (ROOT / page).exists(), page
    for command in re.findall(r"experiments\.([a-z]\w*)", everything):
        places = (ROOT / "experiments" / f"{command}.py", ROOT / "experiments" / command)
        assert any(place.exists() for place in places), command
    for number in re.findall(r"notebook (\d)", everything):
        assert number != name[0] and any(other.startswith(number) for other in NAMES)


def test_private_names_are_found():
    """The checks above see what they must refuse."""
    for bad in ("fp8jax.gemm.dot", "fp8jax.gemm.dot.dot_general", "fp8jax.nothing"):
        with pytest.raises(AssertionError, match="not public"):
            check_public(bad)
    names = fp8jax_names(ast.parse("fp8jax.gemm.dot.f(fp8jax.nn.Dense(8), fp8jax.cast.x)"))
    assert names == {"fp8jax.gemm", "fp8jax.nn", "fp8jax.nn.Dense", "fp8jax.cast"}
    check_public("fp8jax.nn.Dense")
    check_public("fp8jax.lm.interop.trained.load_model")
    assert is_private("_rows") and not is_private("rows")
