"""Training steps compiled for one or two H200s, without one: GEMMs, memory, what is gathered."""

import collections
import re

import pytest

from fp8jax.analysis.gemms import find_gemms, format_table, require_fp8
from fp8jax.analysis.hlo import ROLES
from fp8jax.device import xla
from fp8jax.kernels import lowered as kernels
from fp8jax.kernels import mesh_call
from fp8jax.lm.training.build import build
from fp8jax.lm.training.programs import lower_program
from fp8jax.numerics.module_paths import MODULES
from tests.support import h200
from tests.support.runs import tiny

pytestmark = h200.needs_plugin

LAYERS = 3


@pytest.mark.parametrize("unroll", [1, LAYERS])
@pytest.mark.parametrize("name", ["fp8_current", "fp8_block"])
def test_layers_run_each_gemm_once_and_scaled(data, name, unroll):
    """Layers so small that XLA would merge their GEMMs, with and without a loop. In a loop, whose
    results the backward reads, fp8_block would run GEMMs twice, and fp8_current round scales."""
    sizes = dict(
        model_overrides__d_model=256, model_overrides__d_ff=512, model_overrides__n_layers=LAYERS
    )
    with h200.default() as devices:
        run = build(tiny(data, precision=name, unroll=unroll, **sizes), list(devices))
        stage = run.stages[0]
        text = lower_program(run, stage, "step").compile().as_text()
        gemms = find_gemms(text, stage.policy, stage.model.config.linears)
        require_fp8(gemms)
    calls = collections.Counter[tuple[str, str | None]]()
    for gemm in gemms:
        for module in gemm.modules:
            calls[module, gemm.role] += gemm.count
    once = {
        (module, role): 1 if module == "lm_head" else LAYERS for module in MODULES for role in ROLES
    }
    assert {place: calls[place] for place in once} == once, format_table(gemms)


VOCAB = 640


def lowered(data, name: str, count: int, vocab: int = VOCAB, width: int = 512, unroll: int = 1):
    """Returns the step on so many GPUs, with 32 rows of 128 for each; to be compiled for H200s."""
    sizes = dict(d_model=width, d_ff=1024, n_layers=LAYERS, vocab_size=vocab)
    changes = {f"model_overrides__{key}": size for key, size in sizes.items()}
    config = tiny(
        data,
        precision=name,
        unroll=unroll,
        seq_len=128,
        batch_size=32 * count,
        mesh="fsdp",
        **changes,
    )
    with h200.default(count) as devices:
        run = build(config, list(devices))
        return lower_program(run, run.stages[0], "step")


def compiled(data, name: str, count: int, vocab: int = VOCAB):
    with h200.default(count):
        return lowered(data, name, count, vocab).compile()


def moved(text: str) -> dict[str, set[tuple[str, bool]]]:
    """Kind of collective -> (dtype, whether a dimension is the vocabulary) of what it gives."""
    found = collections.defaultdict(set)
    kinds = "all-gather|reduce-scatter|all-to-all|collective-permute"
    for shapes, kind in re.findall(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(", text):
        for dtype, sizes in re.findall(r"(\w+)\[(\d{3,},\d+)\]", shapes):  # no scales of blocks
            found[kind].add((dtype, str(VOCAB) in sizes.split(",")))
    return found


def check_codes_are_gathered(text: str):
    found = moved(text)
    assert found["all-gather"] == {("bf16", True), ("f8e4m3fn", False)}
    assert found.keys() == {"all-gather", "reduce-scatter"}
    assert {dtype for dtype, _ in found["reduce-scatter"]} == {"f32"}


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_block"])
def test_two_gpus_gather_codes_and_take_less_memory_each(data, name):
    """Weights travel as codes of one byte, the two tables of the vocabulary in bfloat16. Gradients
    are scattered in float32. The MLP is fused: a kernel makes the five codes of its backward."""
    one, two = compiled(data, name, 1), compiled(data, name, 2)
    assert xla.program_bytes(two) < xla.program_bytes(one)
    check_codes_are_gathered(two.as_text())
    kernels = re.findall(r"= (\(.*?\)) custom-call\(.*mosaic_gpu", two.as_text())
    assert max(len(re.findall(r"f8e\dm\d\w*\[", shapes)) for shapes in kernels) == 5


def test_two_gpus_do_not_move_an_embedding_of_more_rows_than_positions(data):
    """The head's table is gathered and its gradient scattered, once each. The embedding stays."""
    vocab = 2 * 32 * 128 + 64
    text = compiled(data, "fp8_delayed", 2, vocab).as_text()
    results = re.findall(r"= (\(.*?\)|\S+) ([a-z-]+?)(?:-start)?\(", text)
    count = collections.Counter(
        kind for shapes, kind in results if re.search(rf"\[({vocab},|\d+,{vocab}\])", shapes)
    )
    assert count["all-gather"] == count["reduce-scatter"] == 1
    exchanged = [shapes for shapes, kind in results if kind == "all-to-all"]
    assert len(exchanged) == 2 and all("bf16[" in shapes for shapes in exchanged)


@pytest.mark.parametrize("name", ["fp8_delayed", "fp8_block"])
def test_four_gpus_lower_each_kernel_once_and_gather_codes_of_ragged_shards(
    data, name, monkeypatch
):
    """A weight of 768 rows is 192 on each GPU, no whole tiles. XLA asks for each call of a kernel,
    in each of the layers, and each is lowered anew unless it is kept."""
    asked, made = [], []
    run, lower = mesh_call._on_shards, kernels._lower
    step = lowered(data, name, 4, width=768, unroll=LAYERS)
    monkeypatch.setattr(mesh_call, "_on_shards", lambda *args: asked.append(args) or run(*args))
    monkeypatch.setattr(kernels, "_read", lambda kernel: None)
    monkeypatch.setattr(kernels, "_lower", lambda kernel: made.append(kernel) or lower(kernel))
    with h200.default(4):
        text = step.compile().as_text()
    # All but the fused MLP's three: q, k, v and o, each forward, dgrad and wgrad.
    assert len(asked) > 12 * LAYERS > len(made) > 0
    texts = [str(kernel.exported.mlir_module()) for kernel in made]
    assert len(texts) == len(set(texts))
    check_codes_are_gathered(text)
