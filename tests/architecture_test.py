"""The shape of the project: who may import whom, how large a file may grow, which habits are out.

Each checker takes source text and returns its problems, `line: what is wrong`. It is run on the
files of the project, and shown to fail on a snippet that breaks its rule.
"""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

import fp8jax
from tests.support import ROOT
from tests.support.layers import LAYERS

TYPED = (
    "gemm",
    "gemm/backends",
    "gemm/histories",
    "gemm/sharding",
    "nn",
)  # folders that pass the type checker without exceptions

MAX_FUNCTION_LINES = 60
# The loop reads top to bottom.
MAX_LINES_OF = {
    "fp8jax/lm/training/loop.py:_train_in": 120,
    "fp8jax/lm/training/config.py:base_config": 140,  # a line for each key
}
MAX_CONFIG_KEYS = 120
IMPERATIVES = frozenset(
    "Add Apply Check Compute Convert Create Draw Find Give Merge Multiply Quantize Raise Read"
    " Return Take Write Yield".split()
)
FOLDERS = ("fp8jax", "configs", "experiments", "tests", "colabs")
MAX_UNFORMATTED = 20  # statements that the formatter leaves alone
MAX_ARROWS = 60  # pairs of folders of which one imports from the other


def files(*folders: str) -> list[str]:
    """The Python files below some folders, as paths relative to the root."""
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert found, f"no Python files in {folders}"
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


@functools.cache
def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def check_all(checker, paths: list[str]) -> None:
    """Fails with all problems that a checker of (source, path) finds in some files."""
    problems = [f"{path}:{problem}" for path in paths for problem in checker(read(path), path)]
    assert not problems, "\n".join(problems)


# Imports ------------------------------------------------------------------------------------------


def imports(source: str, path: str) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of everything imported anywhere in a file, relative names resolved.

    `from a import b` gives "a.b", whether b is a module or not.
    """
    package = path.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            for alias in node.names:
                yield node.lineno, ".".join([*base, *filter(None, [node.module]), alias.name])


def layer_of(path: str) -> str:
    """fp8jax/gemm/backends/xla.py -> gemm/backends, fp8jax/nn.py -> nn; "" for the top itself.

    A file may be a layer beside folders: fp8jax/lm/mesh.py -> lm/mesh.
    """
    module = path.removeprefix("fp8jax/").removesuffix(".py")
    folder, _, file = module.rpartition("/")
    return module if module in LAYERS else folder or file.removesuffix("__init__")


def layer_named(name: str) -> str:
    """gemm.backends.xla.f -> gemm/backends, gemm.dot.dots -> gemm, lm -> lm."""
    first, _, rest = name.partition(".")
    both = f"{first}/{rest.partition('.')[0]}"
    return both if both in LAYERS else first


def check_layers(source: str, path: str) -> Iterator[str]:
    """A folder of fp8jax imports only from folders below it; fp8jax/__init__.py from all."""
    layer = layer_of(path)
    if path in ("fp8jax/__init__.py", "fp8jax/lm/__init__.py"):
        return
    if layer not in LAYERS:
        yield f"1: {layer} is not in LAYERS of tests/support/layers.py: place it there"
        return
    for line, name in imports(source, path):
        top, _, rest = name.partition(".")
        if top != "fp8jax":
            continue
        imported = layer_named(rest)
        if imported not in LAYERS:
            yield f"{line}: imports {name}: name the module, in one of LAYERS"
        elif imported != layer and LAYERS.index(imported) < LAYERS.index(layer):
            yield f"{line}: {layer} imports {imported}, which lies above it"


def module_graph(paths: list[str]) -> dict[str, set[str]]:
    """module -> the modules of those files that it imports, at its top or in a function."""
    names = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in paths
    }
    graph: dict[str, set[str]] = {}
    for module, path in names.items():
        found = {name for _, name in imports(read(path), path)}
        found |= {name.rpartition(".")[0] for name in found}
        graph[module] = (found & names.keys()) - {module}
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; [] if there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module not in done:
            for other in sorted(graph[module]):
                if found := visit(other, [*path, module]):
                    return found
            done.add(module)
        return []

    return next((found for module in graph if (found := visit(module, []))), [])


def check_tops(source: str, path: str) -> Iterator[str]:
    """Nothing but tests imports experiments or tests, and nothing colabs. The library does not
    import configs either: they are not installed with it."""
    folder = path.split("/")[0]
    banned = {"experiments", "tests", "colabs"} | ({"configs"} if folder == "fp8jax" else set())
    allowed = {"tests": {"tests", "experiments"}, "experiments": {"experiments"}}
    for line, name in imports(source, path):
        top = name.partition(".")[0]
        if top in banned and top not in (allowed[folder] if folder in allowed else ()):
            yield f"{line}: imports {name}: {folder} may not import {top}"


def check_test_imports(source: str, path: str) -> Iterator[str]:
    """What two test modules need lies in tests/support."""
    for line, name in imports(source, path):
        if name.startswith("tests.") and any(part.endswith("_test") for part in name.split(".")):
            yield f"{line}: imports {name}, a test module: move what both need to tests/support"


def check_config_imports(source: str, path: str) -> Iterator[str]:
    """A config imports ml_collections and what has all keys, and names recipes by string."""
    keys = (["fp8jax"], ["configs", "base"], ["configs", "pipeline"])
    for line, name in imports(source, path):
        if name.split(".")[0] != "ml_collections" and name.split(".")[:2] not in keys:
            yield (
                f"{line}: imports {name}: configs import only ml_collections, fp8jax by itself, "
                "configs.base and configs.pipeline"
            )


def test_folders_import_only_from_folders_below():
    check_all(check_layers, files("fp8jax"))


def test_every_layer_exists():
    found = {layer_of(path) for path in files("fp8jax")} - {"", "lm"}
    assert found == set(LAYERS)


def test_few_folders_import_from_each_other():
    folders = {layer for layer in LAYERS if (ROOT / "fp8jax" / layer).is_dir()}
    arrows = {
        (layer_of(path), layer_named(name.removeprefix("fp8jax.")))
        for path in files("fp8jax")
        for _, name in imports(read(path), path)
        if name.startswith("fp8jax.")
    }
    found = sorted(
        (one, other) for one, other in arrows if one != other and {one, other} <= folders
    )
    assert len(found) <= MAX_ARROWS, found


def test_no_module_imports_itself_by_a_detour():
    graph = module_graph([path for path in files("fp8jax") if path != "fp8jax/__init__.py"])
    assert circle(graph) == []


def test_nothing_imports_experiments_tests_or_colabs():
    check_all(check_tops, files("fp8jax", "configs", "experiments", "tests", "colabs"))


def test_test_modules_do_not_import_each_other():
    check_all(check_test_imports, files("tests"))


def test_configs_import_only_ml_collections_and_base():
    check_all(check_config_imports, files("configs"))


# Habits -------------------------------------------------------------------------------------------

CASTS = {"astype", "convert_element_type", "array", "asarray"}


def last_name(node: ast.AST) -> str:
    """x.y.name and name -> name; the text of a string; "" for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return str(node.value) if isinstance(node, ast.Constant) else ""


def names_narrow_dtype(argument: ast.AST) -> bool:
    """Whether float8*, float4* or the dtype of a Format (fmt.dtype, FORMATS[...].dtype) occurs."""
    for node in ast.walk(argument):
        if re.match("float[48]_", last_name(node)):
            return True
        if isinstance(node, ast.Attribute) and node.attr == "dtype":
            owner = node.value.value if isinstance(node.value, ast.Subscript) else node.value
            if last_name(owner) in ("fmt", "format", "FORMATS"):
                return True
    return False


def check_casts(source: str, path: str) -> Iterator[str]:
    """Only formats.py and the kernels convert to FP8 or FP4: a plain astype does not saturate."""
    if path == "fp8jax/numerics/formats.py" or path.startswith("fp8jax/kernels/"):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and last_name(node.func) in CASTS:
            if any(map(names_narrow_dtype, [*node.args, *(k.value for k in node.keywords)])):
                yield f"{node.lineno}: a cast to FP8 or FP4: use fp8jax.cast"


def check_get(source: str, path: str) -> Iterator[str]:
    """No .get(key, default): a key that is missing is an error, and a default hides it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            defaults = len(node.args) == 2 or any(k.arg == "default" for k in node.keywords)
            if node.func.attr == "get" and defaults:
                yield f"{node.lineno}: .get with a default"


def check_hidden_jax(source: str, path: str) -> Iterator[str]:
    """What is used of JAX that is not public stands in one file, each with its reason."""
    for line, name in imports(source, path):
        if name.startswith("jax._src") and path != "fp8jax/hidden_jax.py":
            yield f"{line}: imports {name}: fp8jax/hidden_jax.py has what is not public"


def check_future(source: str, path: str) -> Iterator[str]:
    """Annotations as strings would escape the runtime check of shapes."""
    for line, name in imports(source, path):
        if name == "__future__.annotations":
            yield f"{line}: from __future__ import annotations"


def check_ignores(source: str, path: str) -> Iterator[str]:
    """The core passes the type checker without exceptions."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and re.match(r"#\s*type:\s*ignore", token.string):
            yield f"{token.start[0]}: {token.string}"


def check_name(source: str, path: str) -> Iterator[str]:
    """A helper stands beside its only user."""
    if path.endswith("/utils.py") or path.endswith("/utils/__init__.py"):
        yield "1: no utils: put a helper beside its user"


def test_only_formats_and_kernels_cast_to_fp8():
    check_all(check_casts, files("fp8jax", "configs", "experiments"))


def test_no_get_with_default():
    check_all(check_get, files("fp8jax", "configs", "experiments"))


def test_no_postponed_annotations():
    check_all(check_future, files("fp8jax", "configs", "experiments", "tests"))


def test_one_file_imports_what_jax_does_not_make_public():
    check_all(check_hidden_jax, files("fp8jax", "configs", "experiments"))


def test_core_ignores_no_type_error():
    check_all(check_ignores, [path for path in files("fp8jax") if layer_of(path) in TYPED])


def check_mood(source: str, path: str) -> Iterator[str]:
    """A docstring says what a function does: "Returns x", not "Return x"."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition(" ")[0]
            if first in IMPERATIVES:
                yield f"{node.lineno}: the docstring of {node.name} begins with {first!r}"


def test_docstrings_say_what_functions_do():
    check_all(check_mood, files("fp8jax", "configs", "experiments"))


def test_no_utils():
    check_all(check_name, files("fp8jax", "configs", "experiments", "tests"))


# Sizes --------------------------------------------------------------------------------------------


def check_function_length(source: str, path: str) -> Iterator[str]:
    """From `def` to the last line, docstring included, but not the example at its end."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            example = "".join((ast.get_docstring(node) or "").partition("\n\nExample:\n")[1:])
            key = f"{path}:{node.name}"
            lines = node.end_lineno - node.lineno + 1 - len(example.splitlines()[1:])
            limit = MAX_LINES_OF[key] if key in MAX_LINES_OF else MAX_FUNCTION_LINES
            if lines > limit:
                yield f"{node.lineno}: {node.name} has {lines} lines, at most {limit}"


def count_keys(config) -> int:
    """Leaves of a nested mapping; an empty one is a leaf."""
    if not (hasattr(config, "values") and len(config)):
        return 1
    return sum(map(count_keys, config.values()))


def test_the_formatter_lays_out_nearly_all():
    off = [path for path in files(*FOLDERS) for _ in range(read(path).count("# fmt: " + "skip"))]
    assert 0 < len(off) <= MAX_UNFORMATTED, off


def test_functions_are_short():
    check_all(check_function_length, files("fp8jax", "experiments"))


def test_base_config_is_small():
    keys = count_keys(fp8jax.base_config())
    assert keys <= MAX_CONFIG_KEYS, f"base_config() has {keys} keys, at most {MAX_CONFIG_KEYS}"


# Every checker fails on what it forbids -----------------------------------------------------------

LOOP = "def _train_in():"

BAD = [
    (
        check_layers,
        "fp8jax/numerics/a.py",
        "from fp8jax.gemm.dot import dots",
        "1: numer",
    ),
    (check_layers, "fp8jax/numerics/a.py", "from fp8jax.lm import data", "which lies"),
    (
        check_layers,
        "fp8jax/numerics/a.py",
        "from ..lm.model.config import MODELS",
        "imports lm/model",
    ),
    (
        check_layers,
        "fp8jax/device/hardware.py",
        "def f():\n    import fp8jax.gemm.dot as d",
        "2: ",
    ),
    (check_layers, "fp8jax/gemm/dot.py", "from fp8jax import cast", "imports fp8jax.cast: name"),
    (check_layers, "fp8jax/gemm/dot.py", "import fp8jax", "imports fp8jax: name the"),
    (check_layers, "fp8jax/gemm/dot.py", "from fp8jax.nn import Dense", "imports nn, which"),
    (check_layers, "fp8jax/novelty.py", "", "place it there"),
    (check_tops, "fp8jax/lm/training/a.py", "from configs import base", "may not import configs"),
    (
        check_tops,
        "fp8jax/lm/training/a.py",
        "from ....tests import a",
        "may not import tests",
    ),
    (check_tops, "configs/smoke.py", "import experiments.train", "may not import experiments"),
    (check_tops, "experiments/bench/steps.py", "import tests.support", "may not import tests"),
    (
        check_tops,
        "tests/lm/training/loop_test.py",
        "from colabs import a",
        "tests may not import colabs",
    ),
    (check_test_imports, "tests/a_test.py", "from tests.gemm.dot_test import run", "test module"),
    (check_config_imports, "configs/smoke.py", "from fp8jax.recipe import RECIPES", "only ml_"),
    (check_config_imports, "configs/smoke.py", "import os", "imports os"),
    (check_config_imports, "configs/smoke.py", "from configs import lm_125m", "configs.lm_125m"),
    (check_config_imports, "configs/meshes/pod.py", "from . import base", "configs.meshes.base"),
    (check_casts, "fp8jax/dot.py", "x.astype(jnp.float8_e4m3fn)", "1: a cast to FP8"),
    (check_casts, "fp8jax/dot.py", "(x + y).astype('float4_e2m1fn')", "use fp8jax.cast"),
    (check_casts, "fp8jax/dot.py", "x.astype(dtype=fmt.dtype)", "a cast to FP8"),
    (check_casts, "fp8jax/dot.py", "x.astype(cast.format.dtype)", "a cast to FP8"),
    (check_casts, "fp8jax/dot.py", "jnp.asarray(x, FORMATS[name].dtype)", "a cast to FP8"),
    (check_casts, "fp8jax/nn.py", "lax.convert_element_type(x, float8_e5m2)", "a cast to FP8"),
    (check_get, "fp8jax/lm/training/a.py", "config.get('seed', 0)", "1: .get with a default"),
    (
        check_get,
        "fp8jax/lm/training/a.py",
        "config.model.get(key, default=None)",
        ".get with a default",
    ),
    (check_hidden_jax, "fp8jax/nnx.py", "from jax._src import core", "1: imports jax._src.core"),
    (check_future, "fp8jax/dot.py", "from __future__ import annotations", "1: from __future__"),
    (check_ignores, "fp8jax/dot.py", "x = 1\ny = x.z  # type: ignore[attr]", "2: # type: ignore"),
    (check_ignores, "fp8jax/dot.py", "x = 1  #type:ignore", "1: #type:ignore"),
    (check_name, "fp8jax/utils.py", "", "no utils"),
    (check_mood, "fp8jax/dot.py", 'def f():\n  """Return x."""', "of f begins with 'Return'"),
    (check_function_length, "fp8jax/dot.py", "def f():" + "\n    0" * 60, "f has 61 lines"),
    (check_function_length, "fp8jax/dot.py", "class A:\n  async def f():" + "\n    0" * 60, "2: f"),
    (
        check_function_length,
        "fp8jax/lm/training/loop.py",
        LOOP + "\n    0" * 120,
        "121 lines, at most 120",
    ),
]

GOOD = [
    (
        check_layers,
        "fp8jax/numerics/a.py",
        "from fp8jax.numerics.formats import cast\nimport jax",
    ),
    (check_layers, "fp8jax/gemm/dot.py", "from ..device import hardware\nfrom . import backends"),
    (check_layers, "fp8jax/nn.py", "from fp8jax.gemm.modules import Dense"),
    (check_layers, "fp8jax/__init__.py", "from fp8jax.lm.training.loop import train_and_evaluate"),
    (
        check_tops,
        "tests/gemm/dot_test.py",
        "from tests.support import reference\nfrom configs import smoke",
    ),
    (check_test_imports, "tests/a_test.py", "from tests.support.runs import tiny"),
    (check_config_imports, "configs/smoke.py", "import ml_collections\nfrom configs import base"),
    (check_config_imports, "configs/smoke.py", "from configs.base import get_config"),
    (check_config_imports, "configs/smoke.py", "import fp8jax"),
    (check_casts, "fp8jax/numerics/formats.py", "x.astype(fmt.dtype)"),
    (check_casts, "fp8jax/kernels/gemm.py", "x.astype(jnp.float8_e4m3fn)"),
    (check_casts, "fp8jax/dot.py", "x.astype(y.dtype)\nx.astype(f32)\nx == jnp.float8_e5m2"),
    (
        check_get,
        "fp8jax/lm/training/a.py",
        "config.get('seed')\nx.at[0].get(mode='fill', fill_value=0)",
    ),
    (check_ignores, "fp8jax/dot.py", "'# type: ignore'\nx = 1  # what type: ignore it"),
    (check_name, "fp8jax/nn.py", ""),
    (check_mood, "fp8jax/dot.py", 'def f():\n  """Returns x."""'),
    (check_function_length, "fp8jax/dot.py", "def f():" + "\n    0" * 59),
    (
        check_function_length,
        "fp8jax/dot.py",
        "def f():\n  '''A.\n\n  Example:\n" + "    >>> 1\n" * 60 + "  '''",
    ),
    (
        check_function_length,
        "fp8jax/lm/training/loop.py",
        LOOP + "\n    0" * 119,
    ),
]


@pytest.mark.parametrize("checker, path, source, message", BAD)
def test_checker_fails(checker, path, source, message):
    problems = list(checker(source, path))
    assert len(problems) == 1 and message in problems[0], problems


@pytest.mark.parametrize("checker, path, source", GOOD)
def test_checker_passes(checker, path, source):
    assert list(checker(source, path)) == []


def test_checkers_report_together(monkeypatch):
    monkeypatch.setitem(globals(), "read", {"fp8jax/a.py": "", "fp8jax/b.py": ""}.__getitem__)
    with pytest.raises(AssertionError, match=r"/a\.py:1: a is not .*\n *fp8jax/b\.py:1: b is"):
        check_all(check_layers, ["fp8jax/a.py", "fp8jax/b.py"])


def test_a_circle_is_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_missing_folder_is_no_success():
    with pytest.raises(AssertionError, match="no Python files"):
        files("no_such_folder")


def test_keys_are_counted_through_nesting():
    assert count_keys({"a": 1, "b": {"c": "text", "d": {"e": None}}, "f": {}, "g": (1, 2)}) == 5
