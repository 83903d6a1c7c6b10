"""Figures: what a run directory holds, drawn. One function a figure; matplotlib is an extra.

run = fp8jax.figures.read_run(WORKDIR)                            also while the run goes on
"""

from fp8jax.figures.run_files import RunFiles, read_run

__all__ = ["RunFiles", "read_run"]
