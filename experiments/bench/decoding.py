"""Benchmarks of inference: the prefill of a prompt, and decoding with a cache, beside BF16.

Both run what fp8jax.lm.inference runs: `prefill` and `decode`, with layers one by one, weights that
are quantized once (lm/model/freeze.py), and draws on the device. Weights are random and made on the
device: their values change no time. A policy such as fp8_rowwise:only=fwd_w has narrow weights and
activations in bfloat16.

A step of decoding reads every weight and the keys and values of all tokens so far. The limit of its
row is the time in which a copy moves that many bytes; the limit of a prefill is that of its matmuls
at the measured rate of their precision. Figures, for each shape:

    decode_share/SHAPE/POLICY     of the copy's bandwidth that decoding reaches, with its own bytes
    decode_speedup/SHAPE/POLICY   speed of decoding over bf16's
    prefill_speedup/SHAPE/POLICY  speed of the prefill over bf16's
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp

from experiments.bench.operators import Limits, policy_and_backend, sizes
from experiments.bench.report import Report, Row
from experiments.bench.timing import Program, Timer
from fp8jax.gemm.histories.amax_history import HISTORIES
from fp8jax.lm.inference.decoding import LEAST_ROWS, NO_TOKEN, Decoding, Requests, decode, prefill
from fp8jax.lm.inference.sampling import Sampling
from fp8jax.lm.model.cache import empty_cache
from fp8jax.lm.model.config import ModelConfig, flops_per_token
from fp8jax.lm.model.freeze import freeze
from fp8jax.lm.model.models import model_config
from fp8jax.lm.model.prepare import compiler_options, inference_model, prepare
from fp8jax.lm.model.transformer import Transformer, abstract_variables
from fp8jax.numerics.names import as_policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """What is timed: a model, and a batch of equally long requests."""

    name: str
    config: ModelConfig
    requests: int
    prompt: int
    tokens: int  # new ones


def shape_of(text: str) -> Shape:
    """Returns the shape MODEL_BxPxT: a key of `MODELS`, B requests, P tokens of prompt, T new ones.

    Raises:
      ValueError: the model is unknown, or a number is missing.
    """
    model, _, size = text.rpartition("_")
    if "x" not in size:
        raise ValueError(f"shape {text!r}: expected MODEL_BxPxT, such as llama3_8b_1x1024x256")
    requests, prompt, tokens = sizes(size, "BxPxT")
    return Shape(
        name=text, config=model_config(model, {}), requests=requests, prompt=prompt, tokens=tokens
    )


def measure_decoding(
    shapes: Sequence[str], policies: Sequence[str], timed: Timer, limits: Limits, *, cache: str
) -> Report:
    """Measures prefill and decoding of each shape under each policy.

    Args:
      shapes: as for `shape_of`.
      policies: POLICY or POLICY@BACKEND.
      timed: times contestants.
      limits: the device's.
      cache: a key of `CACHES`.
    """
    rows: list[Row] = []
    figures: dict[str, float] = {}
    for shape in map(shape_of, shapes):
        params = random_params(shape.config)
        made = {policy: _Contestant(shape, policy, cache, params) for policy in policies}
        for kind in ("prefill", "decode"):
            found = timed({policy: getattr(one, kind) for policy, one in made.items()})
            base = found["bf16"].seconds if "bf16" in found else math.nan
            for policy, timing in found.items():
                one, seconds = made[policy], timing.seconds
                limit = one.prefill_floor(limits) if kind == "prefill" else one.bytes / limits.copy
                per_call = shape.requests * (shape.prompt if kind == "prefill" else 1)
                rows.append(
                    Row(
                        case=f"{shape.name} {kind}",
                        name=policy,
                        timing=timing,
                        limit=limit,
                        work=math.nan if kind == "prefill" else one.bytes,
                        baseline=base,
                        note=f"{per_call / seconds:,.0f} tokens/s" if seconds > 0 else "",
                    )
                )
                if policy != "bf16":
                    figures[f"{kind}_speedup/{shape.name}/{policy}"] = base / seconds
                if kind == "decode":
                    figures[f"decode_share/{shape.name}/{policy}"] = limit / seconds
        del made, params  # before the next shape's are made
    notes = [
        limits.note(),
        f"KV cache in {cache}. Times of decoding are those of one token of each request; the bytes "
        "are all weights, and keys and values of the mean number of tokens.",
    ]
    return Report(title="Decoding", rate="GB/s", rows=rows, figures=figures, notes=notes)


class _Contestant:
    """One policy at one shape. Its weights are quantized when it is first prepared."""

    def __init__(self, shape: Shape, policy: str, cache: str, params: Any) -> None:
        name, backend = policy_and_backend(policy)
        self.shape, self._cache, self._params = shape, cache, params
        model = Transformer(shape.config, as_policy(name), backend)
        self._model = inference_model(model)
        self.quantizes = bool(as_policy(name).recipe("layers/mlp/up").fwd_x)
        self.bytes = math.nan  # that decoding one token of each request reads, once prepared

    @functools.cached_property
    def _variables(self) -> Any:
        model = self._model
        variables = {"params": self._params} | full_histories(model)
        if any(recipe.fwd_w is not None for _, recipe in as_policy(model.policy).rules):
            variables = freeze(model, variables)
        variables = prepare(model, variables, unrolled=True)
        self.bytes = weight_bytes(model.config, variables["params"]) + self._cache_bytes()
        return variables

    def _cache_bytes(self) -> float:
        """Returns the bytes of keys and values that a step reads, on average."""
        one = jax.eval_shape(lambda: empty_cache(self.shape.config, 1, 1, self._cache))
        of_token = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))
        return self.shape.requests * (self.shape.prompt + self.shape.tokens / 2) * of_token

    def prefill_floor(self, limits: Limits) -> float:
        """Returns the least seconds of a prefill: its matmuls, and a third of training's FLOPs."""
        config, tokens = self.shape.config, self.shape.requests * self.shape.prompt
        # The head runs for the last token only.
        head = 2 * config.d_model * config.vocab_size * (tokens - self.shape.requests)
        flops = flops_per_token(config, self.shape.prompt) / 3 * tokens - head
        return flops / limits.matrix(self.quantizes)

    @property
    def _rows(self) -> int:
        return max(self.shape.requests, LEAST_ROWS)

    def _for_requests(self, value: int) -> jax.Array:
        """Returns the value for each request, and 0 for the other rows of the batch."""
        return jnp.where(jnp.arange(self._rows) < self.shape.requests, value, 0)

    def _requests(self) -> Requests:
        return Requests(
            keys_B=jax.random.split(jax.random.key(0), self._rows),
            limits_B=self._for_requests(self.shape.tokens + 1),
            stops=jnp.array([NO_TOKEN]),
            rule=Sampling(temperature=0.8).rule(),
            vocab_size=self.shape.config.vocab_size,
        )

    def _prefill(self) -> Callable[[], Decoding]:
        shape, model = self.shape, self._model
        lengths = self._for_requests(shape.prompt)
        prompts = jax.random.randint(
            jax.random.key(1), (self._rows, shape.prompt), 0, shape.config.vocab_size
        )

        def run(variables, prompts_BP, lengths_B, requests):
            slots = shape.prompt + shape.tokens
            cache = empty_cache(model.config, len(lengths_B), slots, self._cache, unrolled=True)
            return prefill(model, variables, cache, prompts_BP, lengths_B, requests)

        arguments = self._variables, prompts, lengths, self._requests()
        return _called(jax.jit(run, compiler_options=compiler_options(model)), *arguments)

    def prefill(self) -> Program:
        return Program(call=self._prefill())

    def decode(self) -> Program:
        """A call draws all new tokens of all requests; the state it begins with is kept."""
        tokens = self.shape.tokens
        arguments = self._variables, self._prefill()(), self._requests(), jnp.int32(tokens)
        loop = functools.partial(decode, self._model, tokens=tokens)
        jitted = jax.jit(loop, compiler_options=compiler_options(self._model))
        call = _called(jitted, *arguments)
        return Program(call=lambda: call()[1], items=tokens)


def _called(jitted: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """Returns a call of a function that has compiled it already, by calling it once.

    `jitted.lower` would fill the trees of arguments with descriptions of arrays, and frozen kernels
    check what they are made of where types are checked.
    """
    jax.block_until_ready(jitted(*arguments))
    return functools.partial(jitted, *arguments)


def random_params(config: ModelConfig) -> Any:
    """Returns random parameters in bfloat16, made on the device; no recipe changes their shapes."""
    shapes = linen.meta.unbox(abstract_variables(Transformer(config)))["params"]
    leaves, tree = jax.tree.flatten(shapes)
    # Its numbers are made by one instruction: compiling them takes no time.
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))

    @functools.partial(jax.jit, static_argnums=1)
    def drawn(key, shape):
        return 0.02 * jax.random.normal(key, shape, jnp.bfloat16)

    return jax.tree.unflatten(
        tree, [drawn(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True)]
    )


def full_histories(model: Transformer) -> dict[str, Any]:
    """Returns {HISTORIES: amaxes of 8}, or {} for a policy without delayed scaling."""
    shapes = linen.meta.unbox(abstract_variables(model))
    histories = shapes[HISTORIES] if HISTORIES in shapes else {}
    filled = jax.tree.map(lambda h: jnp.full(h.shape, 8.0, h.dtype), histories)
    return {HISTORIES: filled} if filled else {}


def weight_bytes(config: ModelConfig, params: Any) -> int:
    """Returns the bytes of the weights that a token reads: all but the tables that are looked up.

    A tied head reads the table of the embedding, unless it has frozen codes of its own.
    """
    looked_up = {"embedding", "position_embedding"}
    if config.tie_embeddings and "lm_head" not in params:
        looked_up -= {"embedding"}
    read = [tree for name, tree in params.items() if name not in looked_up]
    return sum(leaf.nbytes for leaf in jax.tree.leaves(read))
