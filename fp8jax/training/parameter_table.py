"""TODO docstring."""

from collections.abc import Iterable

import jax

from fp8jax.numerics.recipes import HIGH_PRECISION
from fp8jax.training.programs import all_stages, device_bytes
from fp8jax.training.run import Run

# Parameters ---------------------------------------------------------------------------------------


def parameter_table(run: Run) -> str:
    """One line a parameter: path, shape, dtype, mesh axes of its dimensions, bytes on each device,
    and the recipe of the linear that multiplies by it ("-" for biases, norms and look-ups), in each
    stage of the precision schedule."""
    begins = [f"after step {begin}" for begin, _ in run.later]
    rows = [("parameter", "shape", "dtype", "sharding", "bytes a device", "recipe", *begins)]
    for path, leaf in jax.tree_util.tree_leaves_with_path(run.state.params):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        shape = "x".join(map(str, leaf.shape))
        sharding = str(leaf.sharding.spec)
        size = f"{device_bytes(leaf):,}"
        recipes = [_recipe_name(stage, name) for stage in all_stages(run)]
        rows.append((name, shape, str(leaf.dtype), sharding, size, *recipes))
    sizes = f"{device_bytes(run.state.params):,}"
    rows.append(("total", "", "", "", sizes, *("" for _ in all_stages(run))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i == 4 else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, *_exempt_notes(run)])


def _recipe_name(run: Run, parameter: str) -> str:
    module, _, leaf = parameter.rpartition("/")
    if run.model.config.tie_embeddings and parameter == "embedding":
        module, leaf = "lm_head", "kernel"  # multiplies by the embedding
    read_by_linear = leaf == "kernel" and module in run.model.config.modules
    return run.policy.recipe(module).name if read_by_linear else "-"


def _exempt_notes(run: Run) -> Iterable[str]:
    n_layers = run.model.config.n_layers
    for begin, stage in [(0, run), *run.later]:
        first, last = stage.policy.exempt(n_layers)
        if first + last:
            when = f"After step {begin:,}, of" if begin else "Of"
            yield (
                f"{when} the {n_layers} stacked layers, the first {first} and the last {last} run"
                f" in {HIGH_PRECISION.name}, whatever their recipe."
            )
