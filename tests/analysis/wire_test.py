"""What devices send each other: programs that this machine compiles for eight CPU devices."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import NamedSharding, P, lax

from fp8jax.analysis.wire import (
    Transfer,
    WideGatherError,
    find_transfers,
    format_transfers,
    gathered,
    require_fp8_gathers,
)
from fp8jax.numerics.policy import POLICIES


@functools.cache
def mesh():
    return jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))


def shard_mapped(f, of_x, of_y):
    return jax.shard_map(f, mesh=mesh(), in_specs=of_x, out_specs=of_y, check_vma=False)


def transfers(f, *shapes):
    given = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), spec))
        for shape, dtype, spec in shapes
    ]
    return find_transfers(jax.jit(f).lower(*given).compile().as_text())


ONE = (64, 32), jnp.float32, P("a")
KINDS = {
    "all-gather": (lambda x: lax.all_gather(x, "a", tiled=True), P("a"), P(), (64, 32)),
    "all-reduce": (lambda x: lax.psum(x, "a"), P("a"), P(), (8, 32)),
    "reduce-scatter": (
        lambda x: lax.psum_scatter(x, "a", tiled=True),
        P(None, "a"),
        P("a", None),
        (64, 4),
    ),
    "all-to-all": (
        lambda x: lax.all_to_all(x, "a", split_axis=1, concat_axis=0, tiled=True),
        P("a"),
        P(None, "a"),
        None,
    ),
    "collective-permute": (
        lambda x: lax.ppermute(x, "a", [(i, (i + 1) % 8) for i in range(8)]),
        P("a"),
        P("a"),
        (8, 32),
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found_with_the_bytes_of_its_larger_side(kind):
    f, of_x, of_y, shape = KINDS[kind]
    found = transfers(shard_mapped(f, of_x, of_y), ((64, 32), jnp.float32, of_x))
    assert {each.kind for each in found} == {kind} and {each.dtype for each in found} == {"f32"}
    if shape is not None:
        assert [each.shape for each in found] == [shape]
    moved = (8 * 32 if shape is None else shape[0] * shape[1]) * 4
    assert sum(each.bytes for each in found) == moved


def test_a_loop_counts_each_turn():
    def f(x):
        return lax.fori_loop(0, 5, lambda _, y: lax.psum(y, "a"), x)

    (found,) = transfers(shard_mapped(f, P("a"), P()), ONE)
    assert found == Transfer(kind="all-reduce", dtype="f32", shape=(8, 32), count=5)


def test_a_program_of_one_device_sends_nothing():
    text = jax.jit(lambda x: x @ x.T).lower(jnp.ones((8, 8))).compile().as_text()
    assert find_transfers(text) == [] and gathered([]) == "nothing"


def arrays(*kinds):
    return [
        Transfer(kind=kind, dtype=dtype, shape=shape, count=count)
        for kind, dtype, shape, count in kinds
    ]


FOUND = arrays(
    ("all-gather", "f8e4m3fn", (512, 128), 24),
    ("all-gather", "f32", (512,), 24),
    ("reduce-scatter", "f32", (512, 128), 12),
    ("all-gather", "bf16", (640, 512), 2),
    ("all-reduce", "pred", (3,), 1),
)


def test_the_table_has_a_line_for_each_kind_and_dtype():
    assert format_transfers(FOUND).splitlines() == [
        "collective      dtype     arrays   MiB",
        "reduce-scatter  f32           12  3.00",
        "all-gather      f8e4m3fn      24  1.50",
        "all-gather      bf16           2  1.25",
        "all-gather      f32           24  0.05",
        "all-reduce      pred           1  0.00",
    ]
    assert gathered(FOUND) == "1.5 MiB of f8e4m3fn, 1.2 MiB of bf16, 0.0 MiB of f32"


LINEARS = {"layers/mlp/up": (128, 512), "lm_head": (512, 640)}


@pytest.mark.parametrize(
    ("shape", "dtype", "wide"),
    [
        ((512, 128), "bf16", True),
        ((128, 512), "f32", True),
        ((4, 128, 512), "bf16", True),  # of all layers
        ((128, 256), "bf16", True),  # half of it, on a tensor axis
        ((128, 512), "f8e5m2", False),
        ((128, 128), "bf16", False),
        ((512, 640), "bf16", False),  # the head is not cast
    ],
)
def test_weights_that_are_gathered_wide_are_refused(shape, dtype, wide):
    given = [*FOUND, *arrays(("all-gather", dtype, shape, 3), ("all-reduce", "f32", shape, 3))]
    check = functools.partial(
        require_fp8_gathers, given, POLICIES["fp8_delayed"], LINEARS, n_layers=4, parts=2
    )
    if not wide:
        return check()
    with pytest.raises(WideGatherError, match=r"layers/mlp/up.*: \w+\[\d.*\], 3 times"):
        check()


def test_policies_that_leave_layers_in_bf16_cannot_be_checked():
    with pytest.raises(ValueError, match="leaves layers in bf16"):
        require_fp8_gathers([], POLICIES["nvfp4_mixed"], LINEARS, n_layers=4)
