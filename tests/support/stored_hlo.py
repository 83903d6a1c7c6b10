"""Stored programs of a GPU: tests/analysis/hlo/ has excerpts of real ones.

Each is a loss and its gradients, layers unrolled, jax 0.11.2 on an H200 unless the name says
otherwise, made by `excerpt` of gemms_test.py.
"""

import functools
import gzip

from fp8jax.analysis.hlo import ROLES
from fp8jax.device import hardware
from fp8jax.numerics.module_paths import MODULES
from tests.support import ROOT

HLO = ROOT / "tests/analysis/hlo"
H200 = hardware.Device("gpu", "NVIDIA H200", (9, 0))
LAYERS = MODULES[:-1]
SEPARATE = {(module, product) for module in LAYERS for product in ROLES}
# What XLA makes of q, k, v and of gate, up where they are small; dgrads have no common operand.
QKV, GATE_UP = "layers/attention/q+k+v", "layers/mlp/gate+up"
MERGED = {(module, "dgrad") for module in LAYERS} | {
    (module, product)
    for module in (QKV, "layers/attention/o", GATE_UP, "layers/mlp/down")
    for product in ("fwd", "wgrad")
}
K_AND_V = (SEPARATE - {(f"layers/attention/{m}", p) for m in "kv" for p in ("fwd", "wgrad")}) | {
    ("layers/attention/k+v", "fwd"),
    ("layers/attention/k+v", "wgrad"),
}
STORED = {  # name: policy, layers, the products of a layer
    "h200_bf16": ("bf16", 2, MERGED),
    "h200_llama_bf16": ("bf16", 4, K_AND_V),
    "h200_llama_delayed": ("fp8_delayed", 4, SEPARATE),
    "h200_delayed": ("fp8_delayed", 2, SEPARATE),
    "h200_current": ("fp8_current", 2, MERGED),
    "h200_rowwise": ("fp8_rowwise", 2, MERGED),
    "h200_rowwise_wgrad_bf16": ("fp8_rowwise_wgrad_bf16", 2, MERGED),
    "h200_block": ("fp8_block", 2, SEPARATE),
}


@functools.cache
def stored(name: str) -> str:
    return gzip.decompress((HLO / f"{name}.txt.gz").read_bytes()).decode()
