"""The layers of fp8jax, top first: each imports only from those below it.

README.md shows them in its picture of the layers, which readme_test.py compares with this list.
"""

LAYERS = (
    "training",
    "inference",
    "interop",
    "figures",
    "telemetry",
    "analysis",
    "model",
    "nn",
    "nnx",
    "linear",
    "kernels",
    "optim",
    "stability",
    "data",
    "numerics",
    "records",
    "device",
    "lookup",
)
