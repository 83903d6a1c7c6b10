"""The look-up's gradient: sums of what read a row, in one order, on every mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from fp8jax.device import hardware
from fp8jax.lm.mesh import MeshAxes, make_mesh, spec
from fp8jax.lm.model.embedding import look_up, sum_by_id

V, D = 11, 5


@pytest.fixture(params=["cpu", "gpu"], autouse=True)
def path(request, monkeypatch):
    """Both ways to sum, wherever the test runs."""
    monkeypatch.setattr(hardware, "platform", lambda: request.param)


def ids_and_cotangents(batch=8, length=12, seed=0):
    """Small integers: their float32 sums are exact in any order. Some rows are read often, some
    never; the last one is."""
    rng = np.random.default_rng(seed)
    ids = rng.choice([0, 0, 0, 3, 4, V - 1], size=(batch, length)).astype(np.int32)
    return jnp.asarray(ids), jnp.asarray(rng.integers(-8, 9, (batch, length, D)), jnp.float32)


def jitted(ids, g, rows=V):
    """`sum_by_id` in a program of its own, since jit would reuse that of the other platform."""
    return jax.jit(lambda ids, g: sum_by_id(ids, g, rows))(ids, g)


def by_hand(ids, g) -> np.ndarray:
    table = np.zeros((V, D), np.float64)
    np.add.at(table, np.asarray(ids).reshape(-1), np.asarray(g).reshape(-1, D))
    return table


@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 2), (3, 5), (8, 12), (2, 64), (1, 129), (3, 300), (16, 96)]
)
def test_sums_are_exact(shape):
    ids, g = ids_and_cotangents(*shape)
    assert np.array_equal(jitted(ids, g), by_hand(ids, g))


@pytest.mark.parametrize("seed", range(8))
def test_sums_of_runs_that_begin_and_end_anywhere_in_blocks(seed):
    """Six ids, each read up to 400 times: runs within a block of 128, and over several."""
    rng = np.random.default_rng(seed)
    counts = rng.choice([0, 1, 5, 127, 128, 129, 256, 400], size=6)
    ids = rng.permutation(np.repeat(np.arange(6, dtype=np.int32), counts))[None]
    g = jnp.asarray(rng.integers(-8, 9, (1, ids.size, D)), jnp.bfloat16)
    if ids.size:
        assert np.array_equal(jitted(jnp.asarray(ids), g), by_hand(ids, g))


def test_one_id_everywhere_and_every_id_once():
    g = ids_and_cotangents(1, V)[1]
    same = np.full((1, V), 7, np.int32)
    assert np.array_equal(jitted(same, g), by_hand(same, g))
    each = jnp.asarray(np.random.default_rng(1).permutation(V)[None], jnp.int32)
    assert np.array_equal(jitted(each, g), by_hand(each, g))


def test_sums_of_bfloat16_are_float32():
    """1 + 4095 * 2^-8 is exact in float32; a sum in bfloat16 would stop at 2."""
    ids = np.zeros((1, 4096), np.int32)
    g = np.full((1, 4096, 1), 2.0**-8, jnp.bfloat16)
    g[0, 0] = 1
    (total,) = np.asarray(jitted(ids, g, rows=1))[:, 0]
    assert total == 1 + 4095 * 2.0**-8


@pytest.mark.parametrize("axes", [dict(data=8), dict(data=2, fsdp=2, tensor=2), dict(tensor=8)])
def test_every_mesh_gives_the_same_sums(axes):
    ids, g = ids_and_cotangents()
    mesh = make_mesh(MeshAxes(**axes))
    with jax.set_mesh(mesh):
        rows = NamedSharding(mesh, spec("batch", "length"))
        sums = jitted(jax.device_put(ids, rows), jax.device_put(g, rows))
    assert np.array_equal(sums, by_hand(ids, g))


def test_a_batch_that_does_not_divide_stays_whole():
    ids, g = ids_and_cotangents(batch=3)
    with jax.set_mesh(make_mesh(MeshAxes(data=8))):
        sums = jitted(ids, g)
    assert np.array_equal(sums, by_hand(ids, g))


def test_look_up_is_take_with_a_float32_gradient():
    ids, g = ids_and_cotangents()
    table = jnp.asarray(np.random.default_rng(2).normal(size=(V, D)), jnp.float32)

    @jax.jit
    def both(table, g):
        found, pull = jax.vjp(lambda t: look_up(t, ids, "vocab", jnp.bfloat16), table)
        return found, pull(g)[0]

    ours, gradient = both(table, np.asarray(g).astype(jnp.bfloat16))
    assert ours.dtype == jnp.bfloat16
    assert np.array_equal(ours, np.asarray(table).astype(jnp.bfloat16)[np.asarray(ids)])
    assert gradient.dtype == jnp.float32 and np.array_equal(gradient, by_hand(ids, g))


def moved(table: tuple[int, int]) -> dict[str, list[tuple[str, str]]]:
    """Collective -> shape and operand of each, of a look-up of 12 positions on 8 devices each."""
    ids = jax.ShapeDtypeStruct((8, 12), jnp.int32)
    with jax.set_mesh(mesh := make_mesh(MeshAxes(fsdp=8))):
        shards = NamedSharding(mesh, spec("vocab", "embed"))
        given = jax.ShapeDtypeStruct(table, jnp.float32, sharding=shards)
        lowered = jax.jit(lambda t, i: look_up(t, i, "vocab", jnp.bfloat16)).lower(given, ids)
        text = lowered.compile().as_text()
    kinds = ("all-gather", "all-to-all")
    return {kind: re.findall(rf"\[([\d,]+)\]\S* {kind}\(%(\w+)", text) for kind in kinds}


@pytest.mark.parametrize("path", ["cpu"], indirect=True)
def test_fsdp_casts_the_table_before_it_is_gathered():
    """A partitioned program moves the table once, rounded (CPUs then widen what they send)."""
    collectives = moved(table=(96, 32))
    ((shape, operand),) = collectives["all-gather"]
    assert shape == "96,32" and "convert" in operand and not collectives["all-to-all"]


@pytest.mark.parametrize("path", ["cpu"], indirect=True)
def test_fsdp_leaves_a_table_of_more_rows_than_positions_where_it_is():
    collectives = moved(table=(97, 32))
    assert [shape for shape, _ in collectives["all-gather"]] == ["8,12"]  # ids
    assert collectives["all-to-all"]


@pytest.mark.parametrize("axes", [dict(fsdp=8), dict(data=2, fsdp=4), dict(fsdp=4, tensor=2)])
@pytest.mark.parametrize("positions", [5, 300])
def test_every_mesh_looks_up_the_same(axes, positions):
    """With fewer and with more positions than rows; sums of integers are exact."""
    rng = np.random.default_rng(4)
    rows, columns = 64, 8
    ids = jnp.asarray(rng.choice([0, 0, 3, rows - 1], size=(8, positions)), jnp.int32)
    g = jnp.asarray(rng.integers(-8, 9, (8, positions, columns)), jnp.bfloat16)
    table = jnp.asarray(rng.normal(size=(rows, columns)), jnp.float32)

    def both(table, ids, g):
        found, pull = jax.vjp(lambda t: look_up(t, ids, "vocab", jnp.bfloat16), table)
        return found, pull(g)[0]

    mesh = make_mesh(MeshAxes(**axes))
    place = lambda x, *names: jax.device_put(x, NamedSharding(mesh, spec(*names)))  # noqa: E731
    with jax.set_mesh(mesh):
        shards = place(table, "vocab", "embed"), place(ids, "batch"), place(g, "batch")
        found, gradient = jax.jit(both)(*shards)
    sums = np.zeros((rows, columns))
    np.add.at(sums, np.asarray(ids).reshape(-1), np.asarray(g, np.float64).reshape(-1, columns))
    assert np.array_equal(found, np.asarray(table)[np.asarray(ids)].astype(jnp.bfloat16))
    assert gradient.dtype == jnp.float32 and np.array_equal(gradient, sums)


@pytest.mark.gpu
@pytest.mark.parametrize("path", ["gpu"], indirect=True)
def test_a_gpu_gives_the_same_bits_every_time():
    rng = np.random.default_rng(3)
    ids = rng.choice(64, size=(16, 1024)).astype(np.int32)
    g = jnp.asarray(rng.normal(size=(16, 1024, 256)), jnp.bfloat16)
    run = jax.jit(lambda g: sum_by_id(jnp.asarray(ids), g, 64))
    first = np.asarray(run(g))
    assert first.any()
    for _ in range(20):
        assert np.array_equal(run(g), first)
