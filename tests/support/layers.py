"""The layers of fp8jax, top first: each imports only from those below it.

README.md shows them in its picture of the layers, which readme_test.py compares with this list.
"""

LAYERS = (
    "training",
    "inference",
    "interop",
    "figures",
    "model",
    "optim",
    "stability",
    "data",
    "records",
    "telemetry",
    "analysis",
    "nn",
    "nnx",
    "linear",
    "kernels",
    "numerics",
    "device",
    "text_table",
    "lookup",
)
