"""Which GEMMs are FP8: stored programs of an H200, doctored ones, and programs of this machine.

The stored programs are excerpts of real ones, made by `excerpt` (tests/support/stored_hlo.py).
"""

import collections
import re

import jax
import jax.numpy as jnp
import pytest

from fp8jax.analysis.gemms import Fp8FallbackError, _missing, find_gemms, format_table, require_fp8
from fp8jax.analysis.hlo import ROLES, UNNAMED, Gemm, HloProgram, parse_gemms
from fp8jax.device import hardware
from fp8jax.gemm.backends.choice import choose_backend
from fp8jax.gemm.modules import Dense
from fp8jax.lm.data.loader import to_devices
from fp8jax.lm.records.jsonl import read_jsonl
from fp8jax.lm.training import hooks, loop, run
from fp8jax.lm.training.build import build
from fp8jax.lm.training.loop import train_and_evaluate
from fp8jax.lm.training.programs import abstract_numbers
from fp8jax.numerics.module_paths import MODULES
from fp8jax.numerics.names import as_policy
from fp8jax.numerics.policy import POLICIES, Policy
from fp8jax.numerics.recipes import RECIPES
from tests.support.products import IN_BF16
from tests.support.runs import one_layer, tiny
from tests.support.stored_hlo import (
    GATE_UP,
    H200,
    LAYERS,
    QKV,
    STORED,
    stored,
)


def excerpt(text: str) -> str:
    """What `find_gemms` reads of a program: products and custom calls, the definitions of their
    operands, and the calls of the computations that they stand in."""
    program, kept = HloProgram(text), []
    product = re.compile(r" (dot|scaled-dot|convolution|custom-call)\(([^)]*)")
    bodies = program.computations.items()
    needed = [name for name, body in bodies if any(map(product.search, body.values()))]
    for computation in needed:  # which grows meanwhile
        needed += [call[0] for call in program._calls[computation] if call[0] not in needed]
    for computation, body in bodies:
        names = set()
        for name, right in body.items():
            if found := product.search(right):
                names |= {name, *re.findall(r"%([\w.-]+)", found[2])}
            elif set(re.findall(r"=\{?%([\w.-]+)", right)) & set(needed):
                names.add(name)
        if computation in needed:
            lines = [f"  %{name} = {right}" for name, right in body.items() if name in names]
            kept += [f"%{computation} () -> () {{", *lines, "}"]
    return "\n".join(kept) + "\n"


def gemms_of(name: str, device: hardware.Device = H200) -> list[Gemm]:
    return find_gemms(stored(name), POLICIES[STORED[name][0]], device=device)


def counts(gemms: list[Gemm]) -> dict[tuple[str, str | None], int]:
    found: dict[tuple[str, str | None], int] = {}
    for gemm in gemms:
        found[gemm.name, gemm.role] = found.setdefault((gemm.name, gemm.role), 0) + gemm.count
    return found


# Stored programs of a GPU -------------------------------------------------------------------------


@pytest.mark.parametrize("name", STORED)
def test_every_product_of_a_stored_program_is_found(name):
    policy, layers, products = STORED[name]
    head = {("lm_head", product): 1 for product in ROLES}
    gemms = gemms_of(name)
    assert counts(gemms) == {place: layers for place in products} | head
    assert {g.recipe for g in gemms if g.module != "lm_head"} == {policy}
    assert all(g.trips == 1 and g.shape for g in gemms)


@pytest.mark.parametrize("name", STORED)
def test_the_precision_that_runs_is_the_one_that_is_shown(name):
    policy, layers, products = STORED[name]
    recipe = RECIPES[policy]
    fp8 = {
        (module, product)
        for module, product in products
        if policy != "fp8_block" and None not in recipe.gemms[product]
    }
    for gemm in gemms_of(name):
        assert gemm.fp8 == ((gemm.name, gemm.role) in fp8)
        assert (gemm.kernel == "__cublas$lt$matmul$f8") == gemm.fp8
        if gemm.fp8:
            casts = recipe.gemms[gemm.role]
            hlo = {"e4m3": "f8e4m3fn", "e5m2": "f8e5m2"}
            assert gemm.operands == tuple(hlo[cast.format.name] for cast in casts)
        elif policy == "fp8_block" and gemm.module != "lm_head":
            assert gemm.operands == ("f32", "f32")
        else:
            assert gemm.operands == ("bf16", "bf16") and gemm.reason is None


def test_shapes_are_those_of_the_products():
    """d_model 4096, d_ff 14336, 16,384 tokens."""
    shapes = {(g.module, g.role): g.shape for g in gemms_of("h200_llama_delayed")}
    assert shapes["layers/mlp/down", "fwd"] == (16384, 14336, 4096)
    assert shapes["layers/mlp/down", "dgrad"] == (16384, 4096, 14336)
    assert shapes["layers/mlp/down", "wgrad"] == (14336, 16384, 4096)
    assert shapes["lm_head", "fwd"] == (16384, 4096, 256)


def test_what_should_be_fp8_and_is_passes():
    for name in STORED:
        if name not in ("h200_block", "h200_current"):
            require_fp8(gemms_of(name))


def test_a_scale_that_xla_did_not_fold_is_found():
    """In a real program: XLA merged q, k and v, whose scales differ, and gate and up. It multiplies
    the bfloat16 results by scales that it rounds to bfloat16; the float32 weight gradients exactly.
    """
    gemms = gemms_of("h200_current")
    after = {(g.name, g.role) for g in gemms if g.scaled is False}
    assert after == {(name, role) for name in (QKV, GATE_UP) for role in ("fwd", "wgrad")}
    assert {(g.name, g.role) for g in gemms if g.reason} == {(QKV, "fwd"), (GATE_UP, "fwd")}
    assert all(g.scaled for g in gemms if g.fp8 and (g.name, g.role) not in after)
    with pytest.raises(
        Fp8FallbackError,
        match=r"^4 GEMMs .* should multiply their sums by their scale and do not:\n  NOT SCALED: "
        r".*q\+k\+v fwd in f8e4m3fn \(2\), .*gate\+up fwd .*: scale: .* rounds it to bf16; .*"
        "xla_gpu_dot_merger_threshold_mb=0",
    ):
        require_fp8(gemms)
    assert "__cublas$lt$matmul$f8, fast, scaled after" in format_table(gemms)


def test_scales_that_are_powers_of_two_are_not_rounded():
    text = stored("h200_current").replace("fp8_current.", "fp8_amax.")
    gemms = find_gemms(text, POLICIES["fp8_amax"], device=H200)
    assert any(g.scaled is False for g in gemms)
    require_fp8(gemms)


@pytest.mark.parametrize("name", ["h200_delayed", "h200_llama_delayed"])
def test_scales_of_gemms_that_are_not_merged_are_folded(name):
    """Also where cuBLAS adds the result to a third operand, which comes before the scales."""
    assert {g.scaled for g in gemms_of(name) if g.fp8} == {True}
    assert {g.scaled for g in gemms_of(name) if not g.fp8} == {None}


def test_the_emulated_backend_is_a_fall_back_and_says_so():
    def said_of(recipe: str, backend: str | None, dtype: str = "f32") -> str:
        text = stored("h200_block").replace("fp8_block.", f"{recipe}.").replace("f32[", f"{dtype}[")
        gemms = find_gemms(text, POLICIES[recipe], backend=backend, device=H200)
        with pytest.raises(Fp8FallbackError) as error:
            require_fp8(gemms)
        return str(error.value)

    said = said_of("fp8_block", "emulated")
    assert said.startswith("42 GEMMs of the program should run in FP8 and do not")
    assert "layers/mlp/up fwd in f32 (2), layers/mlp/up dgrad in f32 (2)" in said
    assert said.endswith("backend: emulated")
    assert "lm_head" not in said
    # Hopper multiplies MXFP8 in bfloat16, which holds its numbers.
    said = said_of("mxfp8", None, "bf16")
    assert "no matrix unit for scales of 32 elements; this GEMM of codes times scales is" in said
    assert said.endswith("exact in bf16")


def test_fp4_has_no_unit_on_a_hopper():
    text = stored("h200_block").replace("fp8_block.", "fp4_block.")
    reasons = {
        g.role: g.reason
        for g in find_gemms(text, POLICIES["fp4_block"], backend="emulated", device=H200)
        if g.module != "lm_head"
    }
    assert reasons["fwd"] == "backend: NVIDIA H200 has no FP4 matrix unit"
    assert "emulated" in reasons["dgrad"] and "emulated" in reasons["wgrad"]


def test_the_table_has_one_line_for_a_product_of_all_layers():
    lines = format_table(gemms_of("h200_llama_delayed")).splitlines()
    assert len(lines) == 1 + 7 * 3 + 3 + 1
    assert re.fullmatch(
        r"layers/mlp/up +fp8_delayed.dgrad +4 +f8e5m2 x f8e4m3fn +16384 x 14336 x 4096 +"
        r"__cublas\$lt\$matmul\$f8, fast",
        lines[1 + 5 * 3 + 1],
    )
    assert lines[-1] == "FP8: 84 of 84 GEMMs that recipes cast to it; others: lm_head bf16 (3)"


# Programs that fell back --------------------------------------------------------------------------


def fallen(line: str) -> str:
    """The lines that XLA leaves of an FP8 product that it widens (TurnF8DotIntoF16Dot)."""
    operands = re.findall(r"%[\w.-]+", line.partition("custom-call(")[2].partition(")")[0])
    for i, operand in enumerate(operands[:2]):
        line = line.replace(operand, f"%wide.{i}", 1)
    wide = [
        f"  %wide.{i} = bf16[16384,14336]{{1,0}} convert({operand})"
        for i, operand in enumerate(operands[:2])
    ]
    return "\n".join([*wide, line.replace("matmul$f8", "matmul")])


def doctored(change, place="mlp/up/fp8_delayed.dgrad/dot_general", times=1) -> str:
    """h200_llama_delayed with the first GEMMs of a name changed."""
    lines = stored("h200_llama_delayed").splitlines()
    hit = [i for i, line in enumerate(lines) if " custom-call(" in line and place in line]
    for i in hit[:times]:
        lines[i] = change(lines[i])
    return "\n".join(lines)


def judged(text: str) -> list[Gemm]:
    return find_gemms(text, POLICIES["fp8_delayed"], device=H200)


def test_one_gemm_that_fell_back_to_bf16_is_found_with_its_reason():
    gemms = judged(doctored(fallen))
    [bad] = [gemm for gemm in gemms if gemm.reason]
    assert (bad.module, bad.role, bad.recipe) == ("layers/mlp/up", "dgrad", "fp8_delayed")
    assert bad.operands == ("bf16", "bf16") and bad.kernel == "__cublas$lt$matmul"
    with pytest.raises(
        Fp8FallbackError, match="1 GEMMs .*\n.*mlp/up dgrad in bf16 .1.: pattern: XLA"
    ):
        require_fp8(gemms)
    lines = format_table(gemms).splitlines()
    assert sum(line.startswith("layers/mlp/up ") for line in lines) == 4  # dgrad in two lines
    assert any(line.startswith("FP8: 83 of 84 GEMMs") for line in lines)
    assert any(line.startswith("NOT FP8: layers/mlp/up dgrad in bf16 (1): ") for line in lines)


def test_the_accumulation_that_runs_is_shown():
    """All FP8 GEMMs of the stored programs are fast: XLA's default."""
    shown = {
        (name, gemm.kernel, gemm.accumulation)
        for name in ("h200_bf16", "h200_delayed", "h200_block")
        for gemm in gemms_of(name)
        if gemm.module != "lm_head"
    }
    assert shown == {
        ("h200_bf16", "__cublas$lt$matmul", None),
        ("h200_delayed", "__cublas$lt$matmul$f8", "fast"),
        ("h200_block", "__cublas$lt$matmul", None),
    }


def test_a_split_sum_that_runs_fast_is_found():
    """Three of 28 dgrads are fast although the policy splits them."""
    split = '"operand_precision":["HIGHEST","HIGHEST"]'
    change = lambda line: line.replace('"operand_precision":["DEFAULT","DEFAULT"]', split)  # noqa: E731
    policy = as_policy("fp8_delayed:dgrad_accumulation=split")
    everywhere = doctored(change, place="fp8_delayed.dgrad/dot_general", times=99)
    gemms = find_gemms(everywhere, policy, device=H200)
    require_fp8(gemms)
    assert {g.role: g.accumulation for g in gemms if g.fp8} == {
        "fwd": "fast",
        "dgrad": "split",
        "wgrad": "fast",
    }
    assert "f8e5m2 x f8e4m3fn  16384 x 14336 x 4096  __cublas$lt$matmul$f8, split" in format_table(
        gemms
    )
    mixed = everywhere.replace(split, '"operand_precision":["DEFAULT","DEFAULT"]', 3)
    gemms = find_gemms(mixed, policy, device=H200)
    assert all(gemm.fp8 for gemm in gemms if gemm.module != "lm_head")
    with pytest.raises(
        Fp8FallbackError,
        match=r"3 GEMMs .* split their sums and do not:\n  NOT SPLIT: .*: accumulation: split was"
        " asked for, and fast runs$",
    ):
        require_fp8(gemms)


def test_tritons_gemms_are_fast():
    """XLA's Triton GEMMs keep FP8 sums in the matrix unit, whatever the precision."""
    text = """
%fused (p.0: f8e4m3fn[64,128], p.1: f8e4m3fn[64,128]) -> f32[64,64] {
  %p.0 = f8e4m3fn[64,128]{1,0} parameter(0)
  %p.1 = f8e4m3fn[64,128]{1,0} parameter(1)
  %dot.1 = f32[64,64]{1,0} dot(%p.0, %p.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}, \
operand_precision={highest,highest}, metadata={op_name="jit(f)/mlp/up/fp8_delayed.fwd/dot_general"}
}
%main (a: f8e4m3fn[64,128], b: f8e4m3fn[64,128]) -> f32[64,64] {
  %f = f32[64,64]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused, \
backend_config={"kind":"__triton_gemm"}
}
"""
    [gemm] = parse_gemms(text)
    assert (gemm.kernel, gemm.accumulation) == ("__triton_gemm", "fast")


def test_a_shape_that_fp8_units_do_not_take_is_the_reason():
    text = doctored(lambda line: fallen(line).replace("14336]", "14328]"))
    [bad] = [gemm for gemm in judged(text) if gemm.reason]
    assert bad.reason == ("shape: FP8 matrix units need multiples of 16, not 16384 x 14328 x 4096")


@pytest.mark.parametrize("size, reason", [(14344, "shape"), (14352, "pattern")])
def test_a_shape_is_the_reason_only_where_16_does_not_divide_it(size, reason):
    text = doctored(lambda line: fallen(line).replace("14336]", f"{size}]"))
    assert [gemm.reason.partition(":")[0] for gemm in judged(text) if gemm.reason] == [reason]


def test_a_bare_dot_on_a_gpu_is_no_matrix_unit():
    dot = ", lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata"
    text = doctored(
        lambda line: re.sub(
            r"custom-call\((\S+), (\S+),.*?, custom_call.*?metadata", rf"dot(\1, \2){dot}", line
        )
    )
    [bad] = [gemm for gemm in judged(text) if gemm.reason]
    assert bad.operands == ("f8e5m2", "f8e4m3fn") and not bad.fp8
    assert bad.reason == "layout: no library runs it, XLA left a bare dot"


def test_a_product_that_lost_its_name_is_listed_and_missed():
    text = doctored(lambda line: re.sub(r"op_name=\S+ ", "", fallen(line)), times=4)
    gemms = judged(text)
    [lost] = [gemm for gemm in gemms if gemm.reason]
    assert (lost.module, lost.role, lost.count) == ("layers/mlp/up", "dgrad", 4)
    assert lost.reason == "name: no GEMM has this name (4 of the program have none)"
    assert counts(gemms)[UNNAMED, None] == 4
    table = format_table(gemms)
    assert f"{UNNAMED} bf16 (4)" in table
    with pytest.raises(Fp8FallbackError, match="4 GEMMs .*\n.*mlp/up dgrad in nothing"):
        require_fp8(gemms)


def test_one_lost_name_of_four_layers_is_missed_too():
    gemms = judged(doctored(lambda line: re.sub(r"op_name=\S+ ", "", line)))
    assert [(g.name, g.role, g.count) for g in gemms if g.reason] == [("layers/mlp/up", "dgrad", 1)]


def test_layers_that_are_exempt_are_not_missed():
    """Two of four layers in BF16; and of one layer, exempt, nothing is FP8."""
    policy = as_policy("fp8_delayed:bf16_last=2")
    text = stored("h200_llama_delayed")
    for module in LAYERS:
        for product in ROLES:
            name = f"{module.removeprefix('layers/')}/fp8_delayed.{product}/dot_general"
            text = re.sub(
                rf"(custom-call\(.*){name}",
                rf"\1{name.replace('fp8_delayed', 'bf16')}",
                text,
                count=2,
            )
    gemms = find_gemms(text, policy, device=H200)
    assert sum(g.recipe == "fp8_delayed" and g.fp8 for g in gemms) == 2 * 7 * 3
    require_fp8(gemms)
    require_fp8(find_gemms(stored("h200_bf16"), as_policy("fp8_delayed:bf16_last=2"), device=H200))


# What else may stand in a program -----------------------------------------------------------------

NAME = "jit(step)/transpose(jvp(Transformer))/while/body/Block/mlp/up"
PARTS = """%wide (p: f8e4m3fn[64,32]) -> bf16[64,16] {
  %a = f8e4m3fn[64,32]{1,0} parameter(0)
  %b = f8e4m3fn[32,16]{0,1} parameter(1)
  %s = f32[64,1]{1,0} parameter(2)
  ROOT %y = INSTRUCTION
}

%body.1 (t: (s32[], bf16[64,16])) -> (s32[], bf16[64,16]) {
  %x = bf16[64,16]{1,0} fusion(%t), kind=kCustom, calls=%wide, backend_config={"kind":"KIND"}
}

%cond.1 (t: (s32[], bf16[64,16])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (t: (s32[], bf16[64,16])) -> bf16[64,16] {
  %t = (s32[], bf16[64,16]{1,0}) tuple(%i, %z)
  %while.1 = (s32[], bf16[64,16]{1,0}) while(%t), condition=%cond.1, body=%body.1TRIPS
}
"""
CONTRACTS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def program(instruction: str, kind: str = "loop", trips: int | None = 12) -> str:
    known = "" if trips is None else f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    text = PARTS.replace("INSTRUCTION", instruction).replace("KIND", kind)
    return text.replace("TRIPS", known)


def only(text: str, **changes) -> Gemm:
    policy = Policy((("layers/mlp/up", RECIPES["fp8_rowwise"]),))
    [gemm] = find_gemms(text, policy, ["layers/mlp/up"], device=H200)[:1]
    return gemm


def call(target: str, scope: str = "fp8_rowwise.fwd/", name: str = NAME) -> str:
    return (
        f'bf16[64,16]{{1,0}} custom-call(%a, %b, %s), custom_call_target="{target}", '
        f'metadata={{op_name="{name}/{scope}scaled_matmul"}}'
    )


@pytest.mark.parametrize(
    "target",
    [
        "mosaic_gpu_v2",
        "__gpu$xla.gpu.triton",
        "__cublas$gemm",
        "__cublas$lt$matmul$f8",
        "__cudnn$blockScaledDot",
        "__op$block_scaled_dot",
    ],
)
def test_kernels_of_every_kind_are_gemms(target):
    gemm = only(program(call(target)))
    assert (gemm.name, gemm.role, gemm.recipe) == ("layers/mlp/up", "fwd", "fp8_rowwise")
    assert gemm.fp8 and gemm.kernel == target and gemm.shape == (64, 32, 16)
    assert gemm.count == gemm.trips == 12


@pytest.mark.parametrize(
    "instruction",
    [
        call("mosaic_gpu_v2", scope=""),  # a cast of ours, say
        call("__cudnn$fmhaSoftmax"),
        call("__cudnn$convForward"),
        call("Sharding"),
        f'bf16[64,16]{{1,0}} convolution(%a, %b), metadata={{op_name="{NAME}/conv"}}',
        f'bf16[64,16]{{1,0}} add(%a, %b), metadata={{op_name="{NAME}/fp8_rowwise.fwd/add"}}',
    ],
    ids=["pallas", "attention", "convolution", "sharding", "bare convolution", "add"],
)
def test_what_is_no_gemm(instruction):
    policy = POLICIES["bf16"]
    assert find_gemms(program(instruction), policy, device=H200) == []


@pytest.mark.parametrize("kind", ["__triton_gemm", "__triton_nested_gemm_fusion", "__cudnn$fusion"])
def test_a_fusion_around_a_dot_is_the_kernel(kind):
    metadata = f'metadata={{op_name="{NAME}/fp8_rowwise.fwd/dot_general"}}'
    gemm = only(program(f"bf16[64,16]{{1,0}} dot(%a, %b), {CONTRACTS}, {metadata}", kind))
    assert gemm.kernel == kind and gemm.fp8 and gemm.shape == (64, 32, 16)
    bare = only(program(f"bf16[64,16]{{1,0}} dot(%a, %b), {CONTRACTS}, {metadata}"))
    assert bare.kernel == "dot" and not bare.fp8


def test_a_loop_whose_length_is_not_known_counts_once_and_says_so():
    text = program(call("mosaic_gpu_v2"), trips=None)
    gemm = only(text)
    assert gemm.count == 1 and gemm.trips is None
    assert "1 (? turns)" in format_table([gemm])


def test_modules_that_are_not_ours_keep_their_path():
    name = "jit(f)/jvp(MLP)/MLP.body/rematted_computation/Dense_0"
    assert only(program(call("mosaic_gpu_v2", name=name))).module == "Dense_0"
    fused = only(program(call("__cublas$gemm", scope="", name=f"{name}/jit(silu)")))
    assert (fused.module, fused.role, fused.recipe, fused.reason) == ("Dense_0", *[None] * 3)


def test_a_large_program_is_read_in_a_moment():
    """Quadratic work would take minutes for sixteen times the text."""
    text = stored("h200_llama_delayed")
    many = "\n".join(re.sub(r"%([\w.-]+)", rf"%\1.c{i}", text) for i in range(16))
    assert sum(g.count for g in find_gemms(many, POLICIES["bf16"], device=H200)) == 16 * 87


# Programs of this machine -------------------------------------------------------------------------


def step_text(run: loop.Run, rows: int = 16, length: int = 64) -> str:
    ids = jnp.zeros((rows, length), jnp.int32)
    batch = {name: ids for name in ("tokens", "targets", "segments", "positions")}
    with jax.set_mesh(run.mesh):
        (stage,) = run.stages
        batch, numbers = batch | {"weights": ids + 1.0}, abstract_numbers(run, stage)
        return stage.programs.step.lower(stage.state, batch, numbers).compile().as_text()


@pytest.fixture(scope="module")
def scanned(data):
    """(run, text) of a step with the layers in a loop, on one device."""
    run = build(tiny(data, precision="fp8_delayed", backend="xla", unroll=1), jax.devices()[:1])
    return run, step_text(run)


@pytest.mark.optimized_too
def test_a_step_of_this_machine_has_every_module_and_product(scanned):
    run, text = scanned
    gemms = find_gemms(
        text, run.stages[0].policy, run.stages[0].model.config.linears, backend="xla"
    )
    linears = {place: n for place, n in counts(gemms).items() if place[1]}
    assert linears == {(m, p): 1 if m == "lm_head" else 2 for m in MODULES for p in ROLES}
    assert {g.trips for g in gemms if g.name in LAYERS} == {2}
    assert {m for m, product in counts(gemms) if product is None} == {"layers/attention"}
    if hardware.platform() == "cpu":
        reason = "backend: cpu has no FP8 matrix unit, XLA widened the operands"
        assert {g.reason for g in gemms} == {None, reason}
        assert "FP8: 0 of 42 GEMMs" in format_table(gemms)
    assert find_gemms(excerpt(text), run.stages[0].policy, backend="xla") == gemms


def test_rematerialized_forwards_count_twice():
    gemms = find_gemms(stored("cpu_delayed_remat"), POLICIES["fp8_delayed"])
    found = counts(gemms)
    assert found["layers/mlp/up", "fwd"] == 8 and found["layers/mlp/up", "dgrad"] == 4
    assert found["layers/mlp/down", "fwd"] == 4  # its result is not needed again
    assert not any(gemm.kernel == "none" for gemm in gemms)


@pytest.mark.optimized_too
def test_a_bare_module_is_found_by_its_name():
    model = Dense(32, "fp8_current", "emulated", name="projection")
    x = jnp.ones((16, 48), jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    loss = jax.grad(lambda v, x: model.apply(v, x).astype(jnp.float32).sum(), argnums=(0, 1))
    text = jax.jit(loss).lower(params, x).compile().as_text()
    gemms = find_gemms(text, POLICIES["bf16"], backend="emulated", device=H200)
    assert {(g.role, g.recipe, g.reason) for g in gemms} <= {
        (product, "fp8_current", "backend: emulated") for product in ROLES
    }
    assert gemms


# Training -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [(), ((0.5, "fp8_delayed"),)], ids=["first", "later"])
def test_training_stops_before_the_first_step_where_fp8_falls_back(data, tmp_path, schedule):
    if hardware.device().fp8:
        # Nothing falls back there; that FP8 holds on such a device is the test marked gpu, below.
        pytest.skip("this device has FP8 units")
    precision = "bf16" if schedule else "fp8_delayed"
    one_layer = dict(model_overrides__n_layers=1, unroll=1)
    config = tiny(
        data, precision=precision, precision_schedule=schedule, require_fp8_gemms=True, **one_layer
    )
    with pytest.raises(Fp8FallbackError, match="layers/mlp/up dgrad in .*no FP8 matrix unit"):
        train_and_evaluate(config, str(tmp_path))
    assert read_jsonl(tmp_path / "metrics.jsonl") == []
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


@pytest.mark.counts_compilations
def test_the_program_that_runs_is_looked_at_and_compiled_once(data, tmp_path, monkeypatch):
    """Before the first step, which seeds and is a second program, compiled at the same time; the
    next step compiles none."""
    compiled, tables, noted = [], [], []

    def noted_gemms(*args, **kwargs):
        gemms = find_gemms(*args, **kwargs)
        tables.append(format_table(gemms))
        noted.append(("table", list(compiled)))
        return gemms

    def noted_to_devices(*args):  # batches are read ahead
        noted.append(("batch", list(compiled)))
        return to_devices(*args)

    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **of: "backend_compile" in event and compiled.append(of["fun_name"])
    )
    monkeypatch.setattr(run, "find_gemms", noted_gemms)
    monkeypatch.setattr(hooks, "to_devices", noted_to_devices)
    config = one_layer(data, precision="fp8_delayed", num_steps=3, optimizer__warmup_steps=1)
    train_and_evaluate(config, str(tmp_path))
    programs = ["jit(<lambda>)", "jit(of_count)", "jit(step)", "jit(step)"]  # state, numbers, steps
    first, *later = [names for what, names in noted if what == "batch"]
    assert {"jit(<lambda>)"} <= set(first) <= set(programs)  # as far as they are compiled
    assert [sorted(names) for names in later] == [programs, programs]
    ((_, names),) = (note for note in noted if note[0] == "table")  # in a thread, beside the steps
    assert names.count("jit(step)") == 2 and len(tables) == 1 and "layers/mlp/down " in tables[0]
    assert (tmp_path / "precision.txt").read_text().endswith(f"policy fp8_delayed:\n{tables[0]}\n")
    events = {event["kind"]: event for event in read_jsonl(tmp_path / "events.jsonl")}
    stage, counted = events["stage"], events["precision"]
    assert (counted["policy"], counted["fp8_gemms"], counted["cast_gemms"]) == (
        "fp8_delayed",
        0,
        21,
    )
    kinds = {"weights", "optimizer", "histories", "batch", "gradients", "activations", "total"}
    assert stage["memory"].keys() == kinds and stage["memory"]["histories"] > 0


@pytest.mark.optimized_too
@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("fp8_current", "bf16"),
        # The table's rows of the other two are those of the same branches.
        pytest.param("fp4_naive", "fp8_current", marks=pytest.mark.full),
        pytest.param("bf16", "fp8_current", marks=pytest.mark.full),
    ],
)
def test_products_of_layers_that_may_be_promoted(data, low, high):
    """Each product of both recipes once a layer, by its module, whatever XLA merged."""
    one_layer = dict(model_overrides__n_layers=1, unroll=1)
    run = build(
        tiny(data, precision=low, gnmr__alpha=(1.5,), gnmr__precision=high, **one_layer),
        jax.devices()[:1],
    )
    linears = run.stages[0].model.config.linears
    gemms = find_gemms(
        step_text(run), run.stages[0].policy, linears, backend="xla", high=POLICIES[high]
    )
    assert {g.module for g in gemms} <= {*linears, "layers/attention", UNNAMED}
    counts = collections.Counter()
    for gemm in gemms:
        if gemm.role and gemm.operands != ("nothing",):
            counts[gemm.recipe, gemm.role] += gemm.count
    layers = len(linears) - 1
    recipes = [low] if low == "bf16" else [low, high]  # without casts nothing is promoted
    heads = collections.Counter({("bf16", product): 1 for product in ROLES})
    products = {(recipe, product): layers for recipe in recipes for product in ROLES}
    assert counts == collections.Counter(products) + heads
    assert not [g for g in gemms if g.operands == ("nothing",)]


def test_a_promoted_product_that_has_no_gemm_is_missing():
    """Branches of a layer; of q's and o's, which are alike, XLA kept q's and calls it twice."""

    def gemm(module, product, count):
        return Gemm(
            module=module,
            recipe="fp8_block",
            role=product,
            operands=("f8e4m3fn",) * 2,
            result="bf16",
            kernel="__cublas$lt$matmul$f8",
            count=count,
        )

    def missing(sizes):
        lacking = _missing(found, POLICIES["fp8_block"], [q, o, up], sizes)
        return [(g.module, g.role, g.count) for g in lacking]

    q, o, up = "layers/attention/q", "layers/attention/o", "layers/mlp/up"
    sizes = {q: (64, 64), o: (64, 64), up: (64, 128)}
    found = [gemm(module, product, 4) for module in sizes for product in ROLES[1:]]
    found += [gemm(q, "fwd", 8)]
    assert missing(sizes) == [(up, "fwd", 4)]
    assert missing({}) == [(o, "fwd", 4), (up, "fwd", 4)]
    found[-1] = gemm(q, "fwd", 4)  # called once: one of the two has none
    assert missing(sizes) == [(o, "fwd", 4), (up, "fwd", 4)]


def test_requiring_fp8_is_a_change_of_config(data, tmp_path):
    config = tiny(data, num_steps=1, optimizer__warmup_steps=0, valid__batches=1, unroll=1)
    config.model_overrides.n_layers = 1
    train_and_evaluate(config, str(tmp_path))
    config.require_fp8_gemms = True
    with pytest.raises(ValueError, match="require_fp8_gemms: False -> True"):
        train_and_evaluate(config, str(tmp_path))


def native() -> list[str]:
    """Recipes of which every GEMM runs in FP8 here; none on a CPU."""
    if "gpu" not in hardware.platform():
        return []
    in_bf16 = {
        *IN_BF16,
        "fp4_weights",
    }  # the kernels' backend multiplies some of their casts in BF16
    return [
        name
        for name, recipe in RECIPES.items()
        if recipe.casts and name not in in_bf16 and choose_backend(None, recipe).name != "emulated"
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_all_that_should_be_fp8_is_on_this_gpu(data, name, unroll):
    shape = dict(model_overrides__d_model=256, model_overrides__d_ff=512)
    config = tiny(data, precision=name, unroll=unroll, **shape)
    run = build(config, jax.devices()[:1])
    gemms = find_gemms(step_text(run), run.stages[0].policy, run.stages[0].model.config.linears)
    table = format_table(gemms)
    named = {(m, g.role) for g in gemms if g.role for m in g.modules}
    assert named == {(m, p) for m in MODULES for p in ROLES}, table
    assert not any(g.kernel == "none" for g in gemms), table
    if name in ("bf16", *native()):
        require_fp8(gemms)
    else:
        with pytest.raises(Fp8FallbackError, match="emulated|no FP4|exact in bf16"):
            require_fp8(gemms)


def test_a_reason_of_many_gemms_names_the_first():
    """On a CPU it is that of all; each has its line in the table."""
    gemms = [
        Gemm(
            module=f"layer_{i}",
            recipe="fp8_block",
            role="fwd",
            operands=("bf16",) * 2,
            result="bf16",
            kernel="dot",
            count=1,
            reason="why",
        )
        for i in range(9)
    ]
    text = format_table(gemms)
    assert text.count("layer_8") == 1
    assert "layer_5 fwd in bf16 (1), and 3 more lines above: why" in " ".join(text.split())
    with pytest.raises(Fp8FallbackError, match="layer_8"):  # there is no table: it has all
        require_fp8(gemms)
