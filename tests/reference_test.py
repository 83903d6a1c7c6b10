"""The reference: every public name has a docstring with its arguments, results, errors and an
example, and the example's output is what it says. docs/public_names.py lists the names."""

import dataclasses
import doctest
import importlib.util
import inspect
import re
import types

import flax.linen as nn
import pytest

import fp8jax
from tests.support import ROOT


def _load_public_names() -> types.ModuleType:
    """docs is no package."""
    spec = importlib.util.spec_from_file_location("public_names", ROOT / "docs/public_names.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODULES = _load_public_names().MODULES
PUBLIC = {
    name: (value, text)
    for name, (value, text) in _load_public_names().public_names().items()
    if not isinstance(value, types.ModuleType)
}
CLASSES = [name for name, (value, _) in PUBLIC.items() if isinstance(value, type)]
FUNCTIONS = [name for name, (value, _) in PUBLIC.items() if inspect.isfunction(value)]

GIVEN: dict = {}  # the imports that docs/reference/index.md says examples start from
_INDEX = (ROOT / "docs/reference/index.md").read_text(encoding="utf-8")
exec(re.search(r"^```python\n(.*?)^```$", _INDEX, re.M | re.S)[1], GIVEN)

NEVER_RAISES = (
    "fp8jax.base_config",
    "fp8jax.gemm_table",
    "fp8jax.nn.to_max_combining",
    "fp8jax.telemetry.out_of_line",
)


def section(text: str, title: str) -> str:
    """The indented lines below "Args:" and so on; "" if there is no such section."""
    found = re.search(rf"^{title}:\n((?:(?:  .*)?\n?)+)", text, re.M)
    return inspect.cleandoc(found[1]) if found else ""


def entries(text: str, title: str) -> set[str]:
    """The names that a section explains: "a" and "b" of the line "a, b: what they are"."""
    lines = re.findall(r"^(\w[\w, ]*):", section(text, title), re.M)
    return {name.strip() for line in lines for name in line.split(",")}


def example(name: str) -> doctest.DocTest:
    return doctest.DocTestParser().get_doctest(PUBLIC[name][1], dict(GIVEN), name, None, 0)


# Those that compile a transformer; a second test of each one's numbers is in the default tier.
_DEAR = {
    "fp8jax.lm.inference.generate.Generator",
    "fp8jax.lm.inference.score.log_likelihoods",
    "fp8jax.lm.inference.text.complete_text",
    "fp8jax.lm.interop.trained.load_model",
    "fp8jax.lm.model.freeze.freeze",
    "fp8jax.train_and_evaluate",
}


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in _DEAR])
def test_example_runs(name):
    run_example(name)


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(_DEAR))
def test_example_with_a_transformer_runs(name):
    run_example(name)


def run_example(name):
    test, said = example(name), []
    assert any(one.want for one in test.examples), f"{name} has no example with an output"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert runner.run(test, out=said.append).failed == 0, "".join(said)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_explains_arguments_results_and_errors(name):
    value, text = PUBLIC[name]
    parameters = inspect.signature(value).parameters
    assert entries(text, "Args") == set(parameters)
    returns_nothing = inspect.signature(value).return_annotation is None
    assert bool(section(text, "Returns")) != returns_nothing
    assert bool(section(text, "Raises")) != (name in NEVER_RAISES)


@pytest.mark.parametrize("name", CLASSES)
def test_class_explains_its_fields(name):
    value, text = PUBLIC[name]
    fields = set()
    if dataclasses.is_dataclass(value):
        fields = {field.name for field in dataclasses.fields(value)}
        if issubclass(value, nn.Module):
            fields -= {"parent", "name"}  # flax's own
    elif hasattr(value, "_fields"):
        fields = set(value._fields)
    assert fields <= entries(text, "Attributes")
    for member, function in vars(value).items():
        if inspect.isfunction(function) and member not in fields and not member.startswith("_"):
            assert inspect.getdoc(function), f"{name}.{member} has no docstring"


def test_every_name_has_one_entry_in_the_pages():
    pages = "".join(p.read_text("utf-8") for p in (ROOT / "docs/reference").glob("*.md"))
    listed = re.findall(r"^\.\. auto(?:data|class|function):: (\S+)$", pages, re.M)
    assert sorted(listed) == sorted(PUBLIC)
    assert {name for name in dir(fp8jax) if name[0] != "_"} == set(fp8jax.__all__)
    assert len(PUBLIC) > 60 and set(MODULES) >= {"fp8jax", "fp8jax.nn", "fp8jax.nnx"}
