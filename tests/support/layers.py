"""The layers of fp8jax, top first: each imports only from those below it.

README.md shows them in its picture of the layers, which readme_test.py compares with this list.
"""

LAYERS = (
    "lm/cli",
    "lm/training",
    "lm/inference",
    "lm/interop",
    "lm/figures",
    "lm/model",
    "lm/flash",
    "lm/optim",
    "lm/stability",
    "lm/corpus",
    "lm/sources",
    "lm/chat",
    "lm/data",
    "lm/records",
    "lm/mesh",
    "telemetry",
    "analysis",
    "nn",
    "histories",
    "nnx",
    "gemm",
    "gemm/backends",
    "gemm/histories",
    "gemm/sharding",
    "kernels",
    "numerics",
    "device",
    "hidden_jax",
    "text_table",
    "lookup",
)
