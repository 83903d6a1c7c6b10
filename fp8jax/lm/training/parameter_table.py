"""The table of --show_params: every parameter with its sharding and its recipe."""

from collections.abc import Iterable

import jax

from fp8jax.lm.training.programs import device_bytes
from fp8jax.lm.training.run import Run, Stage
from fp8jax.numerics.recipes import HIGH_PRECISION
from fp8jax.text_table import aligned


def parameter_table(run: Run) -> str:
    """One line a parameter: path, shape, dtype, mesh axes of its dimensions, bytes on each device,
    and its recipe in each stage.

    The recipe is that of the linear which multiplies by the parameter, "-" for biases, norms and
    look-ups.
    """
    first, *later = run.stages
    begins = [f"after step {stage.begins}" for stage in later]
    rows = [("parameter", "shape", "dtype", "sharding", "bytes a device", "recipe", *begins)]
    for path, leaf in jax.tree_util.tree_leaves_with_path(first.state.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = "x".join(map(str, leaf.shape))
        size = f"{device_bytes(leaf):,}"
        recipes = [_recipe_name(stage, name) for stage in run.stages]
        rows.append((name, shape, str(leaf.dtype), str(leaf.sharding.spec), size, *recipes))
    total = f"{device_bytes(first.state.params):,}"
    rows.append(("total", "", "", "", total, *("" for _ in run.stages)))
    return "\n".join([*aligned(rows, right=(4,)), *_exempt_notes(run)])


def _recipe_name(stage: Stage, parameter: str) -> str:
    shape = stage.model.config
    module, _, leaf = parameter.rpartition("/")
    if shape.tie_embeddings and parameter == "embedding":
        module, leaf = "lm_head", "kernel"  # the head multiplies by the embedding
    of_linear = leaf == "kernel" and module in shape.modules
    return stage.policy.recipe(module).name if of_linear else "-"


def _exempt_notes(run: Run) -> Iterable[str]:
    n_layers = run.stages[0].model.config.n_layers
    for stage in run.stages:
        first, last = stage.policy.exempt(n_layers)
        if first + last:
            when = f"After step {stage.begins:,}, of" if stage.begins else "Of"
            yield (
                f"{when} the {n_layers} stacked layers, the first {first} and the last {last} run"
                f" in {HIGH_PRECISION.name}, whatever their recipe."
            )
