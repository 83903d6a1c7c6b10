"""The same work in PyTorch: GEMMs, attention, and training steps of the same layers.

torch is imported when a contestant is prepared. If it is not installed, the contestant's row says
so. Models are compiled (`torch.compile`) and have bfloat16 weights: in torch, the optimizer keeps
the float32 master weights. torchao converts all linears except the small head to FP8.
"""

import functools
from collections.abc import Callable
from typing import Any

from experiments.bench.timing import Contestants, Program
from fp8jax.lm.model.config import ModelConfig

DEVICE = "cuda"


BLOCK = 128


TORCHAO = ("tensorwise", "rowwise")  # recipes of torchao


def _torch() -> Any:
    import torch

    if DEVICE == "cuda" and not torch.cuda.is_available():
        raise NotImplementedError(f"torch {torch.__version__} sees no CUDA device")
    return torch


def _program(torch: Any, call: Callable[[], Any]) -> Program:
    on_gpu = DEVICE == "cuda"

    def close() -> None:
        torch._dynamo.reset()
        if on_gpu:
            torch.cuda.empty_cache()

    wait = (lambda _: torch.cuda.synchronize()) if on_gpu else (lambda _: None)
    return Program(call=call, wait=wait, close=close)


# GEMMs --------------------------------------------------------------------------------------------


def _gemm(m: int, k: int, n: int, scales: str | None) -> Program:
    """Prepares a GEMM of [M, K] and [K, N] with a bfloat16 result.

    `scales` is the kind of the FP8 operands' scales, as in `gemms`; None for bfloat16 operands.
    """
    torch = _torch()
    random = functools.partial(torch.randn, device=DEVICE, dtype=torch.bfloat16)
    a, b = random(m, k), random(n, k).t()
    if scales is None:
        return _program(torch, lambda: a @ b)
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    del a, b
    scale = lambda *shape: torch.rand(shape, device=DEVICE) + 0.5  # noqa: E731
    blocks = -(-k // BLOCK)
    # Scales of 1x128 have the row axis of their operand contiguous, those of 128x128 have K.
    tiles, of_b = {
        "tensor": lambda: (scale(), scale()),
        "row": lambda: (scale(m, 1), scale(1, n)),
        "block": lambda: (scale(blocks, m).t(), scale(-(-n // BLOCK), blocks).t()),
        "tile": lambda: (scale(blocks, m).t(), scale(blocks, n)),
    }[scales]()
    fast = scales in ("tensor", "row")
    return _program(
        torch,
        lambda: torch._scaled_mm(
            a8, b8, tiles, of_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        ),
    )


def gemms(m: int, k: int, n: int) -> Contestants:
    """Returns a bfloat16 GEMM, and `torch._scaled_mm` with each kind of scales.

    These are the kinds that cuBLAS takes on Hopper: one scale for the tensor, one for each row,
    1x128 by 128x128, and 1x128 by 1x128.
    """
    kinds = {
        "torch bf16": None,
        "torch._scaled_mm tensor": "tensor",
        "torch._scaled_mm rows": "row",
        "torch._scaled_mm 1x128 by 128x128": "block",
        "torch._scaled_mm 1x128 by 1x128": "tile",
    }
    return {name: functools.partial(_gemm, m, k, n, scales) for name, scales in kinds.items()}


# Attention ----------------------------------------------------------------------------------------


def attention(batch: int, length: int, heads: int, kv_heads: int, size: int) -> Contestants:
    """Returns causal attention, forward and backward, with the fused kernel that torch chooses."""

    def prepare() -> Program:
        torch = _torch()

        def random(n: int) -> Any:
            shape = (batch, n, length, size)
            x = torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)
            return x.requires_grad_()

        q, k, v, gradient = random(heads), random(kv_heads), random(kv_heads), random(heads)
        attend = torch.nn.functional.scaled_dot_product_attention

        def call() -> Any:
            y = attend(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
            return torch.autograd.grad(y, (q, k, v), gradient)

        return _program(torch, call)

    return {"torch scaled_dot_product_attention": prepare}


# Training steps -----------------------------------------------------------------------------------


def _model(torch: Any, c: ModelConfig, length: int) -> Any:
    """Returns a model of the shapes `c`: tokens and targets [B, L] -> mean loss."""
    nn, f = torch.nn, torch.nn.functional
    linear = functools.partial(nn.Linear, bias=False)
    frequency = c.rope_theta ** (-torch.arange(0, c.head_dim, 2, device=DEVICE) / c.head_dim)
    angle = torch.arange(length, device=DEVICE)[:, None] * frequency
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]

    def rotate(x: Any) -> Any:
        left, right = x.float().chunk(2, -1)
        rotated = torch.cat([left * cos - right * sin, right * cos + left * sin], -1)
        return rotated.to(x.dtype)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            width, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
            self.norms = nn.ModuleList(nn.RMSNorm(c.d_model, eps=c.norm_eps) for _ in range(2))
            self.qkv, self.o = linear(c.d_model, width + 2 * kv), linear(width, c.d_model)
            self.gate_up, self.down = linear(c.d_model, 2 * c.d_ff), linear(c.d_ff, c.d_model)

        def forward(self, x: Any) -> Any:
            heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, c.head_dim))
            q, k, v = heads.split([c.n_heads, c.n_kv_heads, c.n_kv_heads], 2)
            q, k, v = (y.transpose(1, 2) for y in (rotate(q), rotate(k), v))
            y = f.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=c.n_heads != c.n_kv_heads
            )
            x = x + self.o(y.transpose(1, 2).flatten(2))
            gate, up = self.gate_up(self.norms[1](x)).chunk(2, -1)
            return x + self.down(f.silu(gate) * up)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(c.vocab_size, c.d_model)
            self.layers = nn.ModuleList(Layer() for _ in range(c.n_layers))
            self.norm = nn.RMSNorm(c.d_model, eps=c.norm_eps)
            self.head = linear(c.d_model, c.vocab_size)

        def forward(self, tokens: Any, targets: Any) -> Any:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            logits = self.head(self.norm(x)).float()
            return f.cross_entropy(logits.flatten(0, 1), targets.flatten())

    with torch.device(DEVICE):
        return Model().to(torch.bfloat16)


def _step(c: ModelConfig, batch: int, length: int, recipe: str | None) -> Program:
    """Prepares forward and backward; `recipe` is one of TORCHAO, None for bfloat16."""
    torch = _torch()
    model = _model(torch, c, length)
    if recipe is not None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        convert_to_float8_training(
            model,
            config=Float8LinearConfig.from_recipe_name(recipe),
            module_filter_fn=lambda module, name: name.startswith("layers."),
        )
    compiled = torch.compile(model)
    tokens, targets = torch.randint(c.vocab_size, (2, batch, length), device=DEVICE)

    def call() -> None:
        compiled(tokens, targets).backward()
        for parameter in model.parameters():
            parameter.grad = None

    return _program(torch, call)


def steps(c: ModelConfig, batch: int, length: int) -> Contestants:
    """Returns forward and backward of a model in bfloat16 and in each of torchao's recipes.

    The model has RMSNorm, rotary positions and SwiGLU, and no biases.
    """
    recipes: dict[str, str | None] = {"torch.compile bf16": None}
    recipes |= {f"torchao {name}": name for name in TORCHAO}
    return {
        name: functools.partial(_step, c, batch, length, recipe) for name, recipe in recipes.items()
    }
