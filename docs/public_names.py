"""The public names of fp8jax with their docstrings, for the pages (conf.py) and for the tests.

Python keeps no docstring of a constant. The string below its assignment is taken from the source.
"""

import ast
import importlib
import inspect
import types
from pathlib import Path

# How users name the public modules, and where they are.
MODULES = {
    "fp8jax": "fp8jax",
    "fp8jax.nn": "fp8jax.nn",
    "fp8jax.histories": "fp8jax.histories",
    "fp8jax.nnx": "fp8jax.nnx",
    "fp8jax.telemetry": "fp8jax.telemetry",
    "fp8jax.figures": "fp8jax.lm.figures",
}

# What users import from modules of the language model, beside what fp8jax itself gives.
LM_NAMES = {
    "fp8jax.lm.chat.chat_template": ["ChatExample", "ChatTemplate", "load_chat_template"],
    "fp8jax.lm.data.byte_tokenizer": ["Tokenizer"],
    "fp8jax.lm.data.tokenizers": ["tokenizer"],
    "fp8jax.lm.inference.generate": ["Generator"],
    "fp8jax.lm.inference.sampling": ["Sampling"],
    "fp8jax.lm.inference.score": ["log_likelihoods"],
    "fp8jax.lm.inference.text": ["Completion", "complete_text"],
    "fp8jax.lm.interop.trained": ["TrainedModel", "load_model"],
    "fp8jax.lm.model.freeze": ["freeze"],
    "fp8jax.lm.optim.config": ["OptimizerConfig"],
}


def public_names() -> dict[str, tuple[object, str]]:
    """Return full name, such as "fp8jax.nn.Dense" -> (the object, its docstring or "")."""
    found = {}
    listed = {name: (place, None) for name, place in MODULES.items()}
    listed |= {name: (name, names) for name, names in LM_NAMES.items()}
    for module_name, (place, names) in listed.items():
        module = importlib.import_module(place)
        for name in module.__all__ if names is None else names:
            value = getattr(module, name)
            if isinstance(value, type | types.FunctionType | types.ModuleType):
                text = inspect.getdoc(value) or ""
            else:
                text = constant_docstring(place, name)
            found[f"{module_name}.{name}"] = value, text
    return found


def constant_docstring(module_name: str, name: str) -> str:
    """Return the string below a constant's assignment, in the module that imports end at; or ""."""
    tree = ast.parse(Path(str(importlib.import_module(module_name).__file__)).read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return constant_docstring(str(node.module), alias.name)
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        named = any(isinstance(target, ast.Name) and target.id == name for target in targets)
        if named and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return inspect.cleandoc(str(following.value.value))
    return ""
