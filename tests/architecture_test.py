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
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A module imports only from strictly lower floors. Modules that are still to come are listed, too.
FLOORS = {
    "names": -1,
    "formats": 0,
    "runtime": 0,
    "sharding": 0,
    "text": 0,
    "rope": 0,
    "metrics": 0,
    "checkpoint": 0,
    "stability": 0,
    "gnmr": 0,
    "sources": 0,
    "scaling": 1,
    "corpus": 1,
    "data": 2,
    "embedding": 1,
    "model_config": 1,
    "tasks": 1,
    "plots": 1,
    "recipe": 2,
    "policy": 3,
    "cost": 4,
    "gate": 4,
    "moments": 2,
    "optim": 3,
    "diagnostics": 2,
    "report": 2,
    "attention": 2,
    "kernels": 2,
    "backends": 3,
    "dot": 4,
    "gated": 5,
    "switch": 5,
    "lowering": 4,
    "nn": 5,
    "model": 6,
    "inference": 7,
    "interop": 7,
    "evaluate": 8,
    "step": 8,
    "diagnose": 9,
    "faults": 9,
    "run": 9,
    "train": 10,
    "pipeline": 11,
    "study": 11,
    "timing": 0,
    "torch_peers": 2,
    "benchmark": 10,
    "benchmark_steps": 11,
    "benchmark_gains": 11,
    "plan": 10,
}
CORE = ("formats", "scaling", "recipe", "backends", "dot", "nn")

MAX_CORE_LINES = 2000
MAX_LIBRARY_LINES = 13800
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_LINES_OF = {"fp8jax/train.py:train_and_evaluate": 200}  # the loop reads top to bottom
MAX_CONFIG_KEYS = 120

# Test modules that mirror no module of the library.
UNMIRRORED = {
    "architecture",
    "configs",
    "end_to_end",
    "resume",
    "examples",
    "experiments",
    "families",
    "readme",
    "peers",
    "schedule",
    "sqnr",
}


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


def module_of(path: str) -> str:
    """fp8jax/dot.py -> dot, fp8jax/kernels/gemm.py -> kernels, fp8jax/__init__.py -> __init__."""
    return path.split("/")[1].removesuffix(".py")


def check_floors(source: str, path: str) -> Iterator[str]:
    """A module of fp8jax imports only from lower floors; the package itself may import them all."""
    module = module_of(path)
    if module == "__init__":
        return
    if module not in FLOORS:
        yield f"1: {module} has no floor: put it in the table FLOORS of tests/architecture_test.py"
        return
    for line, name in imports(source, path):
        top, _, rest = name.partition(".")
        if top != "fp8jax":
            continue
        imported = rest.partition(".")[0]
        if imported not in FLOORS:
            yield f"{line}: imports {name}: name the module, one of the table FLOORS"
        elif imported == module and path.count("/") > 1:
            continue  # files of one folder
        elif FLOORS[imported] >= FLOORS[module]:
            yield (
                f"{line}: {module} (floor {FLOORS[module]}) imports {imported} "
                f"(floor {FLOORS[imported]}): only lower floors may be imported"
            )


def check_tops(source: str, path: str) -> Iterator[str]:
    """Nothing imports experiments, tests or colabs, but tests one another. The library does not
    import configs either: they are not installed with it."""
    folder = path.split("/")[0]
    banned = {"experiments", "tests", "colabs"} | ({"configs"} if folder == "fp8jax" else set())
    for line, name in imports(source, path):
        top = name.partition(".")[0]
        if top in banned and not folder == top == "tests":
            yield f"{line}: imports {name}: {folder} may not import {top}"


def check_config_imports(source: str, path: str) -> Iterator[str]:
    """A config imports ml_collections and configs.base, and names recipes by string."""
    for line, name in imports(source, path):
        if name.split(".")[0] != "ml_collections" and name.split(".")[:2] != ["configs", "base"]:
            yield f"{line}: imports {name}: configs import only ml_collections and configs.base"


def test_modules_import_only_from_lower_floors():
    check_all(check_floors, files("fp8jax"))


def test_nothing_imports_experiments_tests_or_colabs():
    check_all(check_tops, files("fp8jax", "configs", "experiments", "tests", "colabs"))


def test_configs_import_only_ml_collections_and_base():
    check_all(check_config_imports, files("configs"))


def test_design_page_has_the_same_floors():
    """docs/design.md shows the same table, and says truly which modules are still planned."""
    row = r"^\| `(\w+)(?:\.py|/)` \| (-?\d+) \| (planned: )?"
    rows = re.findall(row, read("docs/design.md"), re.M)
    assert {name: int(floor) for name, floor, _ in rows} == FLOORS
    existing = {module_of(path) for path in files("fp8jax")} - {"__init__"}
    wrong = existing ^ {name for name, _, planned in rows if not planned}
    assert not wrong, f"docs/design.md: 'planned: ' is missing or no longer true: {sorted(wrong)}"


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
    if path == "fp8jax/formats.py" or path.startswith("fp8jax/kernels/"):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and last_name(node.func) in CASTS:
            if any(map(names_narrow_dtype, [*node.args, *(k.value for k in node.keywords)])):
                yield f"{node.lineno}: a cast to FP8 or FP4: use fp8jax.formats.cast"


def check_get(source: str, path: str) -> Iterator[str]:
    """No .get(key, default): a key that is missing is an error, and a default hides it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            defaults = len(node.args) == 2 or any(k.arg == "default" for k in node.keywords)
            if node.func.attr == "get" and defaults:
                yield f"{node.lineno}: .get with a default"


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


def test_core_ignores_no_type_error():
    check_all(check_ignores, [f"fp8jax/{module}.py" for module in CORE])


def test_no_utils():
    check_all(check_name, files("fp8jax", "configs", "experiments", "tests"))


# Sizes --------------------------------------------------------------------------------------------


def count_lines(source: str) -> int:
    return len(source.splitlines())


def check_file_length(source: str, path: str) -> Iterator[str]:
    if count_lines(source) > MAX_FILE_LINES:
        yield f"1: {count_lines(source)} lines, at most {MAX_FILE_LINES}"


def check_function_length(source: str, path: str) -> Iterator[str]:
    """From `def` to the last line, docstring included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            key, lines = f"{path}:{node.name}", node.end_lineno - node.lineno + 1
            limit = MAX_LINES_OF[key] if key in MAX_LINES_OF else MAX_FUNCTION_LINES
            if lines > limit:
                yield f"{node.lineno}: {node.name} has {lines} lines, at most {limit}"


def check_total(sources: list[str], limit: int) -> Iterator[str]:
    total = sum(map(count_lines, sources))
    if total > limit:
        yield f"{total} lines together, at most {limit}"


def count_keys(config) -> int:
    """Leaves of a nested mapping; an empty one is a leaf."""
    if not (hasattr(config, "values") and len(config)):
        return 1
    return sum(map(count_keys, config.values()))


def test_files_are_short():
    check_all(check_file_length, files("fp8jax"))


def test_functions_are_short():
    check_all(check_function_length, files("fp8jax", "experiments"))


def test_core_is_small():
    assert not list(check_total([read(f"fp8jax/{m}.py") for m in CORE], MAX_CORE_LINES))


def test_library_is_small():
    assert not list(check_total([read(path) for path in files("fp8jax")], MAX_LIBRARY_LINES))


def test_base_config_is_small():
    from configs import base

    keys = count_keys(base.get_config())
    assert keys <= MAX_CONFIG_KEYS, f"configs/base.py has {keys} keys, at most {MAX_CONFIG_KEYS}"


# Tests mirror modules -----------------------------------------------------------------------------


def unmirrored(tests: list[str], modules: list[str]) -> list[str]:
    """Test modules tests/X_test.py without an fp8jax/X.py or fp8jax/kernels/X.py."""
    mirrored = UNMIRRORED | {Path(module).stem for module in modules}
    return [
        test
        for test in tests
        if test.endswith("_test.py") and Path(test).stem.removesuffix("_test") not in mirrored
    ]


def test_tests_mirror_modules():
    assert not unmirrored(files("tests"), files("fp8jax")), "rename, or extend UNMIRRORED"


# Every checker fails on what it forbids -----------------------------------------------------------

BAD = [
    (check_floors, "fp8jax/scaling.py", "from fp8jax.recipe import Cast", "1: scaling (floor 1)"),
    (check_floors, "fp8jax/scaling.py", "from fp8jax import data", "only lower floors"),
    (check_floors, "fp8jax/scaling.py", "from .dot import einsum", "imports dot (floor 4)"),
    (check_floors, "fp8jax/scaling.py", "from . import nn", "imports nn (floor 5)"),
    (check_floors, "fp8jax/scaling.py", "def f():\n    import fp8jax.dot as d", "2: scaling"),
    (check_floors, "fp8jax/recipe.py", "from fp8jax import formats, train", "imports train"),
    (check_floors, "fp8jax/dot.py", "from fp8jax import cast", "imports fp8jax.cast: name the"),
    (check_floors, "fp8jax/dot.py", "import fp8jax", "imports fp8jax: name the module"),
    (check_floors, "fp8jax/kernels/gemm.py", "from ..dot import BACKENDS", "imports dot"),
    (check_floors, "fp8jax/nn.py", "from .nn import f", "imports nn"),
    (check_floors, "fp8jax/novelty.py", "", "put it in the table FLOORS"),
    (check_tops, "fp8jax/train.py", "from configs import base", "may not import configs"),
    (check_tops, "fp8jax/train.py", "from ..tests import reference", "may not import tests"),
    (check_tops, "configs/smoke.py", "import experiments.train", "may not import experiments"),
    (check_tops, "experiments/bench.py", "from experiments import train", "may not import"),
    (check_tops, "tests/train_test.py", "from colabs import a", "tests may not import colabs"),
    (check_config_imports, "configs/smoke.py", "from fp8jax.recipe import RECIPES", "only ml_"),
    (check_config_imports, "configs/smoke.py", "import os", "imports os"),
    (check_config_imports, "configs/smoke.py", "from configs import lm_125m", "configs.lm_125m"),
    (check_config_imports, "configs/meshes/pod.py", "from . import base", "configs.meshes.base"),
    (check_casts, "fp8jax/dot.py", "x.astype(jnp.float8_e4m3fn)", "1: a cast to FP8"),
    (check_casts, "fp8jax/dot.py", "(x + y).astype('float4_e2m1fn')", "use fp8jax.formats.cast"),
    (check_casts, "fp8jax/dot.py", "x.astype(dtype=fmt.dtype)", "a cast to FP8"),
    (check_casts, "fp8jax/dot.py", "x.astype(cast.format.dtype)", "a cast to FP8"),
    (check_casts, "fp8jax/dot.py", "jnp.asarray(x, FORMATS[name].dtype)", "a cast to FP8"),
    (check_casts, "fp8jax/nn.py", "lax.convert_element_type(x, float8_e5m2)", "a cast to FP8"),
    (check_get, "fp8jax/train.py", "config.get('seed', 0)", "1: .get with a default"),
    (check_get, "fp8jax/train.py", "config.model.get(key, default=None)", ".get with a default"),
    (check_future, "fp8jax/dot.py", "from __future__ import annotations", "1: from __future__"),
    (check_ignores, "fp8jax/dot.py", "x = 1\ny = x.z  # type: ignore[attr]", "2: # type: ignore"),
    (check_ignores, "fp8jax/dot.py", "x = 1  #type:ignore", "1: #type:ignore"),
    (check_name, "fp8jax/utils.py", "", "no utils"),
    (check_file_length, "fp8jax/dot.py", "\n" * 601, "601 lines, at most 600"),
    (check_function_length, "fp8jax/dot.py", "def f():" + "\n    0" * 60, "f has 61 lines"),
    (check_function_length, "fp8jax/dot.py", "class A:\n  async def f():" + "\n    0" * 60, "2: f"),
    (
        check_function_length,
        "fp8jax/train.py",
        "def train_and_evaluate():" + "\n    0" * 200,
        "201 lines, at most 200",
    ),
]

GOOD = [
    (check_floors, "fp8jax/scaling.py", "from fp8jax.formats import cast\nimport jax"),
    (check_floors, "fp8jax/dot.py", "from . import runtime\nfrom .kernels import gemm"),
    (check_floors, "fp8jax/kernels/gemm.py", "from ..scaling import Tile"),
    (check_floors, "fp8jax/__init__.py", "from fp8jax.train import train_and_evaluate"),
    (check_tops, "tests/dot_test.py", "from tests import reference\nfrom configs import smoke"),
    (check_config_imports, "configs/smoke.py", "import ml_collections\nfrom configs import base"),
    (check_config_imports, "configs/smoke.py", "from configs.base import get_config"),
    (check_casts, "fp8jax/formats.py", "x.astype(fmt.dtype)"),
    (check_casts, "fp8jax/kernels/gemm.py", "x.astype(jnp.float8_e4m3fn)"),
    (check_casts, "fp8jax/dot.py", "x.astype(y.dtype)\nx.astype(f32)\nx == jnp.float8_e5m2"),
    (check_get, "fp8jax/train.py", "config.get('seed')\nx.at[0].get(mode='fill', fill_value=0)"),
    (check_ignores, "fp8jax/dot.py", "'# type: ignore'\nx = 1  # what type: ignore it"),
    (check_name, "fp8jax/nn.py", ""),
    (check_file_length, "fp8jax/dot.py", "\n" * 600),
    (check_function_length, "fp8jax/dot.py", "def f():" + "\n    0" * 59),
    (check_function_length, "fp8jax/train.py", "def train_and_evaluate():" + "\n    0" * 199),
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
    with pytest.raises(AssertionError, match=r"/a\.py:1: a has no .*\n *fp8jax/b\.py:1: b has"):
        check_all(check_floors, ["fp8jax/a.py", "fp8jax/b.py"])


def test_missing_folder_is_no_success():
    with pytest.raises(AssertionError, match="no Python files"):
        files("no_such_folder")


def test_totals_fail():
    assert list(check_total(["a\nb", "c\n"], 2)) == ["3 lines together, at most 2"]
    assert not list(check_total(["a\nb", "c\n"], 3))


def test_keys_are_counted_through_nesting():
    assert count_keys({"a": 1, "b": {"c": "text", "d": {"e": None}}, "f": {}, "g": (1, 2)}) == 5


def test_unmirrored_is_found():
    tests = ["tests/dot_test.py", "tests/gemm_test.py", "tests/misc_test.py", "tests/helper.py"]
    assert unmirrored(tests, ["fp8jax/dot.py", "fp8jax/kernels/gemm.py"]) == ["tests/misc_test.py"]
    assert not unmirrored(["tests/readme_test.py"], [])
