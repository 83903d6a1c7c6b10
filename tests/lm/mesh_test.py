"""The mesh and the one table from logical axes to mesh axes, on eight virtual devices."""

import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp8jax.lm import mesh as lm_mesh
from fp8jax.lm.mesh import (
    AXES,
    MESHES,
    RULES,
    MeshAxes,
    _over_nodes,
    batch_axes,
    check_batch,
    constrain,
    local_shape,
    make_mesh,
    mesh_axes,
    spec,
    tree_shardings,
    weight_specs,
)
from fp8jax.lm.model.config import ModelConfig
from fp8jax.lm.model.transformer import Transformer, abstract_variables

CONFIG = ModelConfig(
    vocab_size=64, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=48, head_dim=8
)
# What every parameter is, and along which mesh axes it lies: written out, not derived.
SHAPES = {
    "embedding": ((64, 32), P("tensor", "fsdp")),
    "final_norm/scale": ((32,), P(None)),
    "layers/attention/k/kernel": ((3, 32, 16), P(None, "fsdp", "tensor")),
    "layers/attention/o/kernel": ((3, 32, 32), P(None, "tensor", "fsdp")),
    "layers/attention/q/kernel": ((3, 32, 32), P(None, "fsdp", "tensor")),
    "layers/attention/v/kernel": ((3, 32, 16), P(None, "fsdp", "tensor")),
    "layers/attention_norm/scale": ((3, 32), P(None, None)),
    "layers/mlp/down/kernel": ((3, 48, 32), P(None, "tensor", "fsdp")),
    "layers/mlp/gate/kernel": ((3, 32, 48), P(None, "fsdp", "tensor")),
    "layers/mlp/up/kernel": ((3, 32, 48), P(None, "fsdp", "tensor")),
    "layers/mlp_norm/scale": ((3, 32), P(None, None)),
    "lm_head/kernel": ((32, 64), P("fsdp", "tensor")),
}


@functools.cache
def mesh(data=1, fsdp=1, tensor=1):
    return make_mesh(MeshAxes(data=data, fsdp=fsdp, tensor=tensor))


def paths(tree) -> dict:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}


# The mesh -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((-1, 1, 1), (8, 1, 1)),
        ((1, -1, 1), (1, 8, 1)),
        ((1, 1, -1), (1, 1, 8)),
        ((2, -1, 2), (2, 2, 2)),
        ((2, 4, -1), (2, 4, 1)),
        ((2, 2, 2), (2, 2, 2)),
        ((8, 1, 1), (8, 1, 1)),
    ],
)
def test_minus_one_takes_what_the_others_leave(sizes, expected):
    got = mesh(*sizes)
    assert tuple(got.shape.items()) == tuple(zip(AXES, expected, strict=True))
    assert sorted(d.id for d in got.devices.flat) == list(range(8))
    assert got.axis_types == (AxisType.Auto,) * 3


def test_a_mesh_of_given_devices():
    got = make_mesh(MeshAxes(fsdp=-1), jax.devices()[2:5])
    assert got.shape["fsdp"] == 3 and {d.id for d in got.devices.flat} == {2, 3, 4}


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (MeshAxes(data=3), "data=3 x fsdp=1 x tensor=1 does not fit 8 devices"),
        (MeshAxes(data=2, fsdp=2, tensor=4), "data=2 x fsdp=2 x tensor=4 .* 8 devices"),
        (MeshAxes(data=-1, tensor=3), "data=the rest x fsdp=1 x tensor=3 .* 8 devices"),
        (MeshAxes(data=-1, fsdp=16), "data=the rest x fsdp=16 x tensor=1 .* 8 devices"),
        (MeshAxes(), "data=1 x fsdp=1 x tensor=1 .* 8 devices"),
        (MeshAxes(data=-1, fsdp=-1), "at most one may be -1: .*data=-1, fsdp=-1, tensor=1"),
        (MeshAxes(data=0, fsdp=-1), "must be positive.*data=0, fsdp=-1"),
        (MeshAxes(data=-2, fsdp=-4), "must be positive.*data=-2, fsdp=-4"),
    ],
)
def test_a_mesh_that_does_not_fit_raises_with_the_numbers(axes, message):
    with pytest.raises(ValueError, match=message):
        make_mesh(axes)


@pytest.mark.parametrize(
    ("axes", "nearest"),
    [
        (MeshAxes(data=3), (8, 1, 1)),
        (MeshAxes(data=2, fsdp=2, tensor=4), (1, 2, 4)),  # tensor depends on the model
        (MeshAxes(data=-1, tensor=3), (2, 1, 4)),
        (MeshAxes(data=-1, fsdp=16), (1, 8, 1)),
        (MeshAxes(data=8, fsdp=8), (1, 8, 1)),
        (MeshAxes(fsdp=64, tensor=4), (1, 2, 4)),
        (MeshAxes(), (8, 1, 1)),
    ],
)
def test_a_mesh_that_does_not_fit_is_answered_with_the_nearest(axes, nearest):
    sizes = " x ".join(f"{axis}={size}" for axis, size in zip(AXES, nearest, strict=True))
    with pytest.raises(ValueError, match=f"the nearest that fits is {sizes}$"):
        make_mesh(axes)
    assert tuple(mesh(*nearest).shape.values()) == nearest


def gpus(nodes, each):
    """Stand-ins for the GPUs of several nodes, not in the order of the nodes."""
    return [
        types.SimpleNamespace(
            id=i, slice_index=i % nodes, process_index=i, platform="gpu", device_kind="H200"
        )
        for i in range(nodes * each)
    ]


@pytest.mark.parametrize(
    ("sizes", "nodes", "across"),
    [
        ((2, 4, 1), 2, "data"),
        ((4, 2, 1), 2, "data"),  # half of data within a node
        ((1, 8, 1), 2, "fsdp"),
        ((1, 4, 2), 4, "fsdp"),
        ((2, 2, 2), 4, "data fsdp"),
        ((1, 1, 8), 2, "tensor"),
    ],
)
def test_nodes_are_crossed_by_the_axes_that_exchange_least(sizes, nodes, across):
    """Along the other axes, neighbors are of one node; along these, each node has one part."""
    devices = _over_nodes(sizes, nodes, gpus(nodes, 8 // nodes))
    node = np.vectorize(lambda device: device.slice_index)(devices)
    assert devices.shape == sizes and len({device.id for device in devices.flat}) == 8
    for axis, name in enumerate(AXES):
        lines = np.moveaxis(node, axis, 0).reshape(sizes[axis], -1).T
        several = {len(set(line)) for line in lines.tolist()}
        assert (several != {1}) == (name in across.split())
        for line in lines.tolist():  # the devices of a node are neighbors
            assert line == sorted(line)


def test_nodes_must_have_equally_many_devices(monkeypatch):
    with pytest.raises(ValueError, match=r"different numbers of devices: \{0: 4, 1: 3\}"):
        _over_nodes((1, 7, 1), 2, gpus(2, 4)[:-1])


def test_a_mesh_over_nodes_is_one_of_auto_axes(monkeypatch):
    expected, asked = mesh(2, 4, 1), []
    monkeypatch.setattr(lm_mesh, "_node", lambda device: device.id // 4)

    def reshaped(sizes, nodes, devices):
        asked.append((tuple(sizes), nodes))
        return np.array(devices).reshape(sizes)

    monkeypatch.setattr(lm_mesh, "_over_nodes", reshaped)
    got = make_mesh(MeshAxes(data=2, fsdp=-1))
    assert asked == [((2, 4, 1), 2)]
    assert got == expected
    make_mesh(MeshAxes(fsdp=-1), jax.devices()[:4])  # of one node
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("name", "overrides", "expected"),
    [
        ("data", {}, MeshAxes(data=-1)),
        ("fsdp", {}, MeshAxes(fsdp=-1)),
        ("tensor", {}, MeshAxes(tensor=-1)),
        ("fsdp", {"tensor": 2, "data": None}, MeshAxes(fsdp=-1, tensor=2)),
        ("fsdp", {"data": 2, "fsdp": 2, "tensor": 2}, MeshAxes(data=2, fsdp=2, tensor=2)),
        ("data", {"data": 1, "fsdp": -1, "tensor": None}, MeshAxes(fsdp=-1)),
    ],
)
def test_overrides_replace_the_axes_that_are_given(name, overrides, expected):
    assert mesh_axes(name, overrides) == expected
    assert set(MESHES) == {"data", "fsdp", "tensor"}


def test_unknown_meshes_and_axes_name_the_near_ones():
    with pytest.raises(ValueError, match="unknown mesh 'fspd'.*'fsdp'"):
        mesh_axes("fspd", {})
    with pytest.raises(ValueError, match="unknown mesh axis 'tensors'.*'tensor'"):
        mesh_axes("fsdp", {"tensors": None})


# Specs and constraints ----------------------------------------------------------------------------


def test_the_rules_use_the_axes_of_the_mesh_and_no_others():
    used = {a for axes in RULES.values() if axes for a in ((axes,) if type(axes) is str else axes)}
    assert used == set(AXES)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), P()),
        (("batch", "length"), P(("data", "fsdp"), None)),
        (("embed", "mlp"), P("fsdp", "tensor")),
        (("layers", "heads", "embed"), P(None, "tensor", "fsdp")),
        (("batch", "length", "residual"), P(("data", "fsdp"), None, None)),
        ((None, "vocab"), P(None, "tensor")),
        (("kv_heads", "norm"), P("tensor", None)),
    ],
)
def test_spec(names, expected):
    assert spec(*names) == expected


def test_a_weight_is_read_whole_along_the_axes_that_shard_the_batch():
    assert weight_specs("embed", "mlp") == (P("fsdp", "tensor"), P(None, "tensor"))
    assert weight_specs("heads", "embed") == (P("tensor", "fsdp"), P("tensor", None))


def test_an_unknown_logical_axis_raises():
    with pytest.raises(ValueError, match="unknown logical axis 'embeds'.*'embed'"):
        spec("batch", "embeds")
    with jax.set_mesh(mesh(8)), pytest.raises(ValueError, match="unknown logical axis 'bacth'"):
        jax.jit(lambda x: constrain(x, "bacth", "length"))(jnp.ones((8, 8)))


def sharding_of(shape, names, sizes) -> tuple[int, ...]:
    """The shape of one device's part of constrain(zeros(shape), *names)."""
    with jax.set_mesh(mesh(*sizes)):
        x = jax.jit(lambda: constrain(jnp.zeros(shape), *names))()
    return x.sharding.shard_shape(shape)


@pytest.mark.parametrize(
    ("shape", "names", "sizes", "part"),
    [
        ((16, 6), ("batch", "length"), (2, 4, 1), (2, 6)),
        ((16, 6, 8), ("batch", "length", "mlp"), (2, 2, 2), (4, 6, 4)),
        ((16, 6, 8), ("batch", "length", "residual"), (2, 2, 2), (4, 6, 8)),
        # Axes that the mesh does not divide stay whole, the others do not mind.
        ((3, 6, 8), ("batch", "length", "mlp"), (2, 2, 2), (3, 6, 4)),
        ((16, 6, 7), ("batch", "length", "mlp"), (2, 2, 2), (4, 6, 7)),
    ],
)
def test_constrain_cuts_what_the_mesh_divides(shape, names, sizes, part):
    assert sharding_of(shape, names, sizes) == part
    with jax.set_mesh(mesh(*sizes)):
        assert local_shape(shape, *names) == part
    assert local_shape(shape, *names) == shape


def test_constrain_without_a_mesh_is_the_identity():
    x = jnp.ones((4, 4))
    assert constrain(x, "batch", "length") is x


def test_constrain_changes_neither_values_nor_gradients():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32)

    @jax.jit
    def run(x):
        y, vjp = jax.vjp(lambda x: constrain(x, "batch", "mlp"), x)
        return y, *vjp(2 * y)

    with jax.set_mesh(mesh(2, 2, 2)):
        y, dx = run(x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(dx, 2 * x)


# Trees --------------------------------------------------------------------------------------------


@functools.cache
def abstract(policy="fp8_delayed"):
    return abstract_variables(Transformer(CONFIG, policy))


def test_the_parameters_of_the_model_are_those_listed_here():
    params = paths(nn.meta.unbox(abstract()["params"]))
    assert {name: leaf.shape for name, leaf in params.items()} == {
        name: shape for name, (shape, _) in SHAPES.items()
    }


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2), (8, 1, 1), (1, 4, 2)])
def test_every_parameter_lies_where_documented(sizes):
    shardings = paths(tree_shardings(abstract()["params"], mesh(*sizes)))
    assert {name: s.spec for name, s in shardings.items()} == {
        name: expected for name, (_, expected) in SHAPES.items()
    }
    assert all(s.mesh == mesh(*sizes) for s in shardings.values())


def test_the_part_of_one_device_is_what_the_mesh_says():
    """By hand, under data=2 x fsdp=2 x tensor=2 and under fsdp=8."""

    def parts(*sizes):
        shardings = paths(tree_shardings(abstract()["params"], mesh(*sizes)))
        return {name: s.shard_shape(SHAPES[name][0]) for name, s in shardings.items()}

    mixed, fsdp = parts(2, 2, 2), parts(1, 8, 1)
    assert mixed["embedding"] == (32, 16) and fsdp["embedding"] == (64, 4)
    assert mixed["layers/attention/k/kernel"] == (3, 16, 8)
    assert mixed["layers/attention/o/kernel"] == (3, 16, 16)
    assert mixed["layers/mlp/gate/kernel"] == (3, 16, 24)
    assert mixed["layers/mlp/down/kernel"] == (3, 24, 16)
    assert mixed["layers/mlp_norm/scale"] == fsdp["layers/mlp_norm/scale"] == (3, 32)
    assert fsdp["layers/mlp/gate/kernel"] == (3, 4, 48)
    assert fsdp["layers/mlp/down/kernel"] == (3, 48, 4)
    assert fsdp["lm_head/kernel"] == (4, 64)


def test_what_has_no_axes_of_its_names_is_replicated():
    """Adafactor keeps sums over axes of large parameters in their boxes, and [1] for others."""
    params = {"kernel": nn.Partitioned(jnp.zeros((128, 256)), ("embed", "mlp"))}
    params["scale"] = nn.Partitioned(jnp.zeros(128), ("embed",))
    state = jax.eval_shape(optax.scale_by_factored_rms().init, params)
    shardings = tree_shardings(state, mesh(2, 2, 2))
    assert state.v_row["kernel"].value.shape == (128,)
    found = [shardings.v_row["kernel"], shardings.v_col["kernel"], shardings.v_row["scale"]]
    assert [each.spec for each in found] == [P(), P(), P()]
    assert shardings.v["scale"].spec == P("fsdp")


def test_what_has_no_box_is_replicated():
    histories = abstract()["_overwrite_with_gradient"]
    tree = {"histories": histories, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    shardings = jax.tree.leaves(tree_shardings(tree, mesh(2, 2, 2)))
    assert len(shardings) == 7 * 3 + 1  # linears times operands, and the step
    assert all(s == NamedSharding(mesh(2, 2, 2), P()) for s in shardings)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((3, 30, 8), ("layers", "embed", "mlp"), "'embed' has size 30, .* axis fsdp, 4 "),
        ((3, 8, 7), ("layers", "embed", "mlp"), "'mlp' has size 7, .* axis tensor, 2 "),
        ((6, 8), ("batch", "embed"), r"'batch' has size 6, .*\('data', 'fsdp'\), 4 "),
    ],
)
def test_a_dimension_that_does_not_divide_names_the_leaf_and_the_numbers(shape, names, message):
    leaf = nn.Partitioned(jax.ShapeDtypeStruct(shape, jnp.float32), names)
    with pytest.raises(ValueError, match=f"layers/up/kernel: axis {message}devices"):
        tree_shardings({"layers": {"up": {"kernel": leaf}}}, mesh(1, 4, 2))


def test_a_leaf_with_an_unknown_logical_axis_raises():
    leaf = nn.Partitioned(jax.ShapeDtypeStruct((8, 8), jnp.float32), ("embed", "expert"))
    with pytest.raises(ValueError, match="unknown logical axis 'expert'"):
        tree_shardings({"w": leaf}, mesh(8))


def test_the_batch_divides_into_microbatches_over_data_and_fsdp():
    for batch_size, grad_accum, sizes, rows in [
        (8, 1, (2, 4, 1), 1),
        (8, 2, (2, 2, 2), 1),
        (5, 5, (1, 1, 8), 1),
        (24, 2, (2, 2, 2), 3),
    ]:
        assert check_batch(batch_size, grad_accum, mesh(*sizes)) == rows
    for batch_size, grad_accum, sizes, devices in [
        (12, 1, (2, 4, 1), 8),
        (8, 2, (8, 1, 1), 8),
        (8, 3, (1, 1, 8), 1),
        (8, 0, (1, 1, 8), 1),
        (6, 1, (2, 2, 2), 4),
    ]:
        message = rf"batch_size={batch_size} .*grad_accum={grad_accum} .* {devices} devices"
        with pytest.raises(ValueError, match=message):
            check_batch(batch_size, grad_accum, mesh(*sizes))


def test_a_batch_is_sharded_where_its_devices_divide_it():
    assert batch_axes(8) == ()  # no mesh
    with jax.set_mesh(mesh(2, 4, 1)):
        assert batch_axes(16) == ("data", "fsdp")
        assert batch_axes(12) == ()
    with jax.set_mesh(mesh(1, 1, 8)):
        assert batch_axes(16) == ()
