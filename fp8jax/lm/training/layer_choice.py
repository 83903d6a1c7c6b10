"""What the backward recomputes and whether the layers loop, where the config does not say.

On a GPU both follow from shapes and from the memory that JAX may use of it: the least recomputation
whose estimate, `step_bytes`, fits, and no loop over layers, unless a loop is next to free or so
many layers would compile for too long. The compiled programs confirm the estimate before the first
step (`Run.smaller`): where they take more than there is, the run goes on with a fallback, once.

On other devices, and where the memory is not known, nothing is recomputed. A run that is resumed
keeps what it began with: both change bits, though no formula.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict

from fp8jax.device import hardware
from fp8jax.lm.model.attention import ATTENTIONS
from fp8jax.lm.model.chunked_loss import CHUNK_BYTES
from fp8jax.lm.model.config import MLPS, ModelConfig
from fp8jax.lm.model.layer import Linears
from fp8jax.lm.model.transformer import Transformer

KEYS = ("remat", "unroll")  # of the config, that this file chooses

# From the least recomputation to the most. "quantized" and "dots" compute attention, norms and
# activations again, "full" also all forward GEMMs: a third more of them in a step.
_REMATS = ("none", "quantized", "dots", "full")

# Shares of the memory that JAX may use. XLA allocates temporaries as one block, which must fit
# beside the state's arrays; so neither is 1. The estimate's is less, by what it may be too low.
_MOST_ESTIMATED, _MOST_COMPILED = 0.92, 0.96

# Compile time grows with the layers that are unrolled (docs/results/layer_choice.md).
_MOST_UNROLLED = 48


# The estimate ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What decides the memory of a training step, on one device.

    Attributes:
      shape: of the model.
      tokens: of a microbatch.
      tensor, fsdp: devices that split heads and hidden units; that split a parameter besides.
      codes: path of a linear -> bytes of a number of its input, as the backward keeps it.
      weights: path of a linear -> bytes of a number of its kernel, as a GEMM reads it.
      fused: whether gate, up and down are one `fused_mlp`, which keeps no input of "down".
      attention: bytes of a token that attention keeps in a layer, besides q, k, v.
      whole_logits: whether the head computes all of its logits at once.
      state: bytes of parameters, optimizer, histories and batch.
      gradients: bytes of all gradients, in float32.
      masters: bytes of the parameters' copies in float32, 0 where they are stored so.
      accumulates: whether a step has several microbatches.
      seeds: whether the first step has a program of its own.
    """

    shape: ModelConfig
    tokens: int
    tensor: int
    fsdp: int
    codes: Mapping[str, int]
    weights: Mapping[str, int]
    fused: bool
    attention: int
    whole_logits: bool
    state: int
    gradients: int
    masters: int
    accumulates: bool
    seeds: bool


def saved_bytes(sizes: Sizes, remat: str) -> int:
    """Returns the bytes of a token that one layer keeps for its backward, on a device.

    D is the width of the residual stream; Q, K and F are queries, keys and hidden units of the
    device; c is what a code takes, 1 in FP8 and 2 in bfloat16.

        full       2 D                                      the layer's input
        dots       + 2 (Q + 2 K) + 2 F or 4 F + 2 D         results of q, k, v; up and gate; o
        quantized  + c D + c D + c F unless fused           inputs of q, k, v; gate, up; down
        none       + attention + 2 Q + 16                   what attention keeps; the input of o
        fp8_inputs as none, with 17/16 for the 2 of the layer's input, up and gate, and o

    "none" keeps the residual stream between attention and MLP, not the result of o: as many bytes.
    The 16 bytes are of the norms.
    """
    c, codes = sizes.shape, sizes.codes
    queries, keys = (n * c.head_dim // sizes.tensor for n in (c.n_heads, c.n_kv_heads))
    hidden, width = c.d_ff // sizes.tensor, c.d_model
    if remat == "full":
        return 2 * width
    saved = 4 * width + 2 * (queries + 2 * keys) + (4 if MLPS[c.mlp].gated else 2) * hidden
    if remat == "dots":
        return saved
    saved += width * (codes["layers/attention/q"] + codes["layers/mlp/up"])
    saved += 0 if sizes.fused and remat != "fp8_inputs" else hidden * codes["layers/mlp/down"]
    if remat == "quantized":
        return saved
    saved += sizes.attention + 2 * queries + 16
    if remat == "fp8_inputs":
        narrowed = 2 * width + (2 if MLPS[c.mlp].gated else 1) * hidden
        saved -= narrowed * 15 // 16
    return saved


def step_bytes(sizes: Sizes, remat: str, unroll: int) -> int:
    """Estimates what XLA allocates on a device for a training step, arguments included.

        loop       state + n saved + max(gradients + layer, head)
        no loop    state + max(n saved + weights + max(layer, head), gradients + layer)

    n layers keep `saved_bytes` of each token. In a loop the gradients of all layers have their
    place while all of that is kept; without one they take the place of what the backward has used.
    The others, for T tokens of a microbatch and V ids of the vocabulary on the device:

        layer      T (saved_bytes of "none" + 16 F): what it computes again, and its gradients. On
                   several devices also 6 bytes for each number of its kernels and of the head's,
                   gathered in bfloat16, and their gradients in float32 before they are scattered
        head       two chunks of float32 logits, 2 GiB at most each; 6 D V, as above
        weights    kernels as GEMMs read them, gathered: without a loop XLA keeps them for the
                   backward. 2 bytes a number, 1 in FP8
        state      also one more `gradients` for microbatches, which add up, and float32 copies of
                   bfloat16 master weights

    A policy that seeds its histories does so in a program of its own, with a loop and without a
    fused MLP, which needs scales before it knows the amaxes: then the larger one counts.
    The constants are from programs compiled for H200s; docs/results/layer_choice.md has the table.
    """
    c, layers = sizes.shape, sizes.shape.n_layers
    if sizes.seeds:
        step = dataclasses.replace(sizes, seeds=False)
        seeding = dataclasses.replace(step, fused=False)
        return max(step_bytes(seeding, remat, 1), step_bytes(step, remat, unroll))
    saved = layers * sizes.tokens * saved_bytes(sizes, remat)
    vocab, hidden = c.vocab_size // sizes.tensor, c.d_ff // sizes.tensor
    table = 6 * c.d_model * vocab
    layer = sizes.tokens * (saved_bytes(sizes, "none") + 16 * hidden)
    kernels = {path: k * n for path, (k, n) in c.linears.items() if path != "lm_head"}
    if sizes.fsdp * sizes.tensor > 1:
        layer += table + 6 * sum(kernels.values()) // sizes.tensor
    logits = 4 * sizes.tokens * vocab
    head = 2 * (logits if sizes.whole_logits else min(logits, CHUNK_BYTES)) + table
    state = sizes.state + sizes.masters + (sizes.gradients if sizes.accumulates else 0)
    if unroll < layers:
        return state + saved + max(sizes.gradients + layer, head)
    weights = sum(sizes.weights[path] * size for path, size in kernels.items())
    weights = layers * weights // sizes.tensor
    return state + max(saved + weights + max(layer, head), sizes.gradients + layer)


def sizes_of(
    model: Transformer,
    mesh: Mesh,
    *,
    rows: int,
    seq_len: int,
    state: int,
    gradients: int,
    masters: int,
    accumulates: bool,
    seeds: bool,
    promotes: bool,
) -> Sizes:
    """Returns the sizes of a step with `rows` rows of a microbatch on each device.

    Args:
      model: with its attention chosen.
      mesh: of all devices.
      promotes: whether layers may run in another policy.
      others: as in `Sizes`.
    """
    c, policy = model.config, model.resolved_policy
    tensor, codes, weights = mesh.shape["tensor"], {}, {}
    for path in c.modules:
        recipe = policy.recipe(path)
        # What is emulated is multiplied as bfloat16 numbers, and may be kept so.
        narrow = 2 if model.backend_of(recipe) == "emulated" else 1
        codes[path] = 2 if recipe.wgrad_x is None else narrow
        weights[path] = 2 if recipe.fwd_w is None else narrow
    mlp = Linears(c, policy, model.backend, "layers/mlp", None)
    fusible = MLPS[c.mlp].fusible and not promotes
    heads = c.n_heads // tensor
    scores = model.attention == ATTENTIONS["xla"]
    return Sizes(
        shape=c,
        tokens=rows * seq_len,
        tensor=tensor,
        fsdp=mesh.shape["fsdp"],
        codes=codes,
        weights=weights,
        fused=fusible and mlp.fuses(jax.ShapeDtypeStruct((1, c.d_model), model.dtype)),
        # Probabilities in bfloat16 and float32; or the output and one float32 number of each row.
        attention=6 * heads * seq_len if scores else heads * (2 * c.head_dim + 4),
        whole_logits=bool(policy.recipe("lm_head").casts),
        state=state,
        gradients=gradients,
        masters=masters,
        accumulates=accumulates,
        seeds=seeds,
    )


# The choice --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerChoice:
    """How the layers of a run run.

    Attributes:
      remat, unroll: as in `Transformer`.
      chosen: the keys of the config that do not say it, of `KEYS`.
      why: what was chosen and why, for the console; "" without an estimate.
      estimate: bytes of a step on each device; 0 without one.
      most: bytes that a compiled program may take.
      less: the candidates that take less, (remat, unroll) and their estimates, in their order.
    """

    remat: str
    unroll: int
    chosen: tuple[str, ...] = ()
    why: str = ""
    estimate: int = 0
    most: int = 0
    less: tuple[tuple[tuple[str, int], int], ...] = ()

    def fallback(self, allocated: int) -> tuple[str, int] | None:
        """Returns the remat and unroll to go on with if a compiled program takes `allocated` bytes.

        None if that fits, or if nothing else would take less. It is the first candidate that fits
        by an estimate that is enlarged as this one should have been; or else the smallest.
        """
        if allocated <= self.most or not self.less:
            return None
        fitting = [
            each for each, size in self.less if size * allocated <= self.most * self.estimate
        ]
        return fitting[0] if fitting else min(self.less, key=lambda each: each[1])[0]


def choose_layers(
    remat: str | None, unroll: int | None, stages: Sequence[Sizes], limit: int | None
) -> LayerChoice:
    """Chooses what the config does not say; all stages of a run take the same.

    Args:
      remat, unroll: what the config says; None for nothing.
      stages: of each stage of the run.
      limit: bytes that JAX may use of a device, None if they are not known.
    """
    if remat is not None and unroll is not None:
        return LayerChoice(remat=remat, unroll=unroll)
    chosen = tuple(key for key, said in zip(KEYS, (remat, unroll), strict=True) if said is None)
    layers = stages[0].shape.n_layers
    candidates = [
        (name, count)
        for name in (_REMATS if remat is None else (remat,))
        for count in (_unrolls(name, layers) if unroll is None else (unroll,))
    ]
    if limit is None:
        return LayerChoice(remat=candidates[0][0], unroll=candidates[0][1], chosen=chosen)
    needed = {each: max(step_bytes(sizes, *each) for sizes in stages) for each in candidates}
    fitting = [each for each in candidates if needed[each] <= _MOST_ESTIMATED * limit]
    taken = fitting[0] if fitting else min(candidates, key=lambda each: needed[each])
    before = candidates[: candidates.index(taken)]
    said = f"{_described(taken, layers)}: an estimate of {_gib(needed[taken])} of {_gib(limit)} GiB"
    if not fitting:
        said += ", more than there is, and the least of all"
    elif before:
        said += f"; {_described(before[-1], layers)} would take {_gib(needed[before[-1]])}"
    return LayerChoice(
        remat=taken[0],
        unroll=taken[1],
        chosen=chosen,
        why=said,
        estimate=needed[taken],
        most=int(_MOST_COMPILED * limit),
        less=tuple((each, size) for each, size in needed.items() if size < needed[taken]),
    )


def _unrolls(remat: str, layers: int) -> tuple[int, ...]:
    """Returns the values of unroll to try, the faster one first.

    On a GPU a loop writes what the layers keep into stacks and reads it from there: a tenth of the
    step of a narrow model. With remat=full that is next to nothing.
    """
    pays = hardware.platform() == "gpu" and remat != "full" and layers <= _MOST_UNROLLED
    return (layers, 1) if pays and layers > 1 else (1,)


def _described(candidate: tuple[str, int], layers: int) -> str:
    remat, unroll = candidate
    return f"remat={remat} and unroll={unroll} ({'a' if unroll < layers else 'no'} loop)"


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f}"


def memory_limit(mesh: Mesh) -> int | None:
    """Returns the bytes that JAX may use of each device of a mesh: the least of all processes.

    None where a device does not say. Each process of a run must call this, since all of them must
    choose the same program.
    """
    limit = hardware.memory_limit(mesh.local_devices)
    if limit is None or jax.process_count() == 1:
        return limit
    mebibytes = multihost_utils.process_allgather(np.int32(limit // 2**20))
    return int(mebibytes.min()) * 2**20


def with_layers_of(config: ConfigDict, record: Mapping[str, Any]) -> ConfigDict:
    """Returns the config with remat and unroll of a run's record, where it does not say them."""
    unsaid = [key for key in KEYS if config[key] is None and key in record]
    known = {key: record[key] for key in unsaid if record[key] is not None}
    if not known:
        return config
    said = config.copy_and_resolve_references()
    said.update(known)
    return said
