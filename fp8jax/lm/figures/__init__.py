"""Figures: what a run directory holds, drawn. One function a figure; matplotlib is an extra.

run = fp8jax.figures.read_run(WORKDIR)                            also while the run goes on
figure = fp8jax.figures.scaling_bias(run)                         dark=True for dark pages
fp8jax.figures.save(figure, "figures/bias")                       bias.png and bias.svg
"""

from fp8jax.lm.figures.benchmarks import roofline, step_breakdown
from fp8jax.lm.figures.bias import scaling_bias, scaling_bias_by_linear
from fp8jax.lm.figures.formats import number_formats, relative_error
from fp8jax.lm.figures.gnmr import promotions
from fp8jax.lm.figures.heat_maps import saturation, underflow
from fp8jax.lm.figures.loss_curves import losses
from fp8jax.lm.figures.memory import memory_by_kind
from fp8jax.lm.figures.run_files import RunFiles, read_run
from fp8jax.lm.figures.style import NothingToDraw, save, style, svg_text

__all__ = [
    "NothingToDraw",
    "RunFiles",
    "losses",
    "memory_by_kind",
    "number_formats",
    "promotions",
    "read_run",
    "relative_error",
    "roofline",
    "saturation",
    "save",
    "scaling_bias",
    "scaling_bias_by_linear",
    "step_breakdown",
    "style",
    "svg_text",
    "underflow",
]
