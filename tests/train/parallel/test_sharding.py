import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.train.support import light_compiler as light_compiler
from tests.train.support import random_rows, tiny
from train.assembly import make_engine
from train.engines.engine import Engine
from train.errors import UsageError
from train.optim.optimizer_registry import OPTIMIZERS
from train.parallel.mesh import MeshConfig, make_mesh
from train.parallel.sharding import (
    checked_sharding,
    host_memory_shardings,
    leaf_shardings,
    logical_to_sharding,
    make_sharding_constraint,
    optimizer_state_shardings,
    replicated_sharding,
)
from transformer import Hardware

VOCAB = 30


@pytest.mark.parametrize(
    ("mesh", "devices", "sizes"),
    [
        (MeshConfig(), 1, (1, 1, 1, 1, 1)),
        (MeshConfig(), 8, (8, 1, 1, 1, 1)),
        (MeshConfig(fsdp=4), 8, (2, 4, 1, 1, 1)),
        (MeshConfig(data=1, fsdp=-1), 8, (1, 8, 1, 1, 1)),
        (MeshConfig(data=1, fsdp=2, tensor=-1), 12, (1, 2, 1, 1, 6)),
        (MeshConfig(data=3, fsdp=5, tensor=7), 105, (3, 5, 1, 1, 7)),
        (MeshConfig(data=1, expert=2, context=-1, tensor=2), 12, (1, 1, 2, 3, 2)),
    ],
)
def test_mesh_sizes(mesh: MeshConfig, devices: int, sizes: tuple[int, ...]) -> None:
    """From the slowest links to the fastest."""
    assert mesh.axis_sizes(devices) == dict(
        zip(("data", "fsdp", "expert", "context", "tensor"), sizes, strict=True)
    )


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(data=3, fsdp=1),
        MeshConfig(data=-1, fsdp=3),
        MeshConfig(data=-1, fsdp=16),
        MeshConfig(data=-1, fsdp=-1),
        MeshConfig(data=0),
        MeshConfig(data=-2, fsdp=-4),
        MeshConfig(context=3),
    ],
    ids=str,
)
def test_invalid_mesh_sizes(mesh: MeshConfig) -> None:
    with pytest.raises(UsageError, match=f"mesh data {mesh.data} x fsdp {mesh.fsdp} x tensor 1"):
        mesh.axis_sizes(8)


def test_multislice_topologies_raise_by_name() -> None:
    devices: Any = [SimpleNamespace(id=n, platform="tpu", slice_index=n // 2) for n in range(4)]
    with pytest.raises(UsageError, match=r"^mesh: the TPUs are of 2 slices joined .* one slice$"):
        make_mesh(MeshConfig(), devices)


def test_shardings_follow_logical_axes() -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert mesh.shape == {"data": 2, "fsdp": 2, "expert": 1, "context": 1, "tensor": 2}

    def spec(*names: str | None) -> P:
        return logical_to_sharding(mesh, names).spec

    assert spec("layers", "embed", "heads", "head") == P(None, ("fsdp",), ("tensor",), None)
    assert spec("layers", "heads", "head", "embed") == P(None, ("tensor",), None, ("fsdp",))
    assert spec("vocab", "embed") == P(("tensor",), ("fsdp",))
    assert spec("embed", "mlp") == P(("fsdp",), ("tensor",))
    assert spec("embed", "kv_heads", "head") == P(("fsdp",), ("tensor",), None)
    assert spec("positions", "embed") == P(None, ("fsdp",))
    assert spec("batch", "length", None) == P(("data", "fsdp"), None, None)
    # Each mesh axis is used at most once.
    assert spec("batch", "embed") == P(("data", "fsdp"), None)
    assert spec("heads", "mlp") == P(("tensor",), None)


def test_mesh_axes_of_size_one_are_omitted() -> None:
    mesh = make_mesh(MeshConfig(data=8))
    assert logical_to_sharding(mesh, ("batch", None)).spec == P(("data",), None)
    assert logical_to_sharding(mesh, ("vocab", "embed")).is_fully_replicated


def test_indivisible_axis() -> None:
    mesh = make_mesh(MeshConfig(data=1, fsdp=8))
    assert checked_sharding(mesh, ("embed",), (24,)).spec == P(("fsdp",))
    with pytest.raises(UsageError, match=r"axis embed of size 12: .*; give mesh.fsdp of 1 .* 6$"):
        checked_sharding(mesh, ("mlp", "embed"), (5, 12))
    both = make_mesh(MeshConfig(data=2, fsdp=4))
    message = r"into 8 parts \(mesh data 2 x fsdp 4\); give mesh.data x mesh.fsdp of 1 or"
    with pytest.raises(UsageError, match=message):
        checked_sharding(both, ("batch",), (12,))


def test_length_and_expert_axes() -> None:
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, expert=2, context=2))
    assert logical_to_sharding(mesh, ("batch", "length", None)).spec == P(
        ("fsdp", "expert"), ("context",), None
    )
    assert logical_to_sharding(mesh, ("layers", "experts", "embed", "mlp")).spec == P(
        None, ("expert",), ("fsdp",), None
    )
    assert logical_to_sharding(mesh, ("embed", "routes")).spec == P(("fsdp",), None)


def test_few_kv_heads_are_replicated() -> None:
    """KV heads are replicated if they are fewer than the shards and divide their number."""
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    names = ("embed", "kv_heads", "head")
    assert checked_sharding(mesh, names, (8, 4, 3)).spec == P(("fsdp",), ("tensor",), None)
    assert checked_sharding(mesh, names, (8, 2, 3)).spec == P(("fsdp",), None, None)
    assert checked_sharding(mesh, names, (8, 1, 3)).spec == P(("fsdp",), None, None)
    with pytest.raises(UsageError, match="axis kv_heads of size 6: does not divide into 4 parts"):
        checked_sharding(mesh, names, (8, 6, 3))
    with pytest.raises(UsageError, match="axis heads of size 2: does not divide into 4 parts"):
        checked_sharding(mesh, ("embed", "heads", "head"), (8, 2, 3))


def test_no_constraint_on_one_device() -> None:
    x = jnp.ones((2, 3))
    one = make_mesh(MeshConfig(), jax.devices()[:1])
    assert make_sharding_constraint(one)(x, ("batch", None)) is x
    many = make_sharding_constraint(make_mesh(MeshConfig(data=2, fsdp=4)))
    assert many == make_sharding_constraint(make_mesh(MeshConfig(data=2, fsdp=4)))
    placed = jax.jit(lambda x: many(x, ("batch", None)))(jnp.ones((8, 3)))
    assert {shard.data.shape for shard in placed.addressable_shards} == {(1, 3)}
    assert many(jnp.ones((1, 3)), ("batch", None)).sharding.is_fully_replicated


def test_batch_is_sharded_over_data_and_fsdp(tmp_path: Path) -> None:
    rows = random_rows(12, VOCAB)
    batch = an_engine(tmp_path, MeshConfig(data=2, fsdp=2, tensor=2)).put_batch(rows)
    for name, array in rows.items():
        np.testing.assert_array_equal(np.asarray(batch[name]), array, strict=True)
        shapes = {shard.data.shape for shard in batch[name].addressable_shards}
        assert shapes == {(3, *array.shape[1:])}, name


def test_zigzag_order(tmp_path: Path) -> None:
    """Each device has an early and a late piece of every array."""
    engine = an_engine(tmp_path, MeshConfig(data=2, context=4))
    rows = {"positions": np.tile(np.arange(16), (4, 1)), "examples": np.arange(4)}
    batch = engine.put_batch(rows)
    pieces = [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    for shard in batch["positions"].addressable_shards:
        part = shard.index[1].indices(16)[0] // 4
        np.testing.assert_array_equal(shard.data, [pieces[part]] * 2)
    assert {shard.data.shape for shard in batch["examples"].addressable_shards} == {(2,)}


def an_engine(folder: Path, mesh: MeshConfig, **changes: Any) -> Engine:
    experiment = tiny(folder, mesh=mesh, **changes)
    model = dataclasses.replace(experiment.model, vocab_size=VOCAB)
    experiment = dataclasses.replace(experiment, model=model)
    return make_engine(experiment, Hardware(count=8))


def test_state_is_initialized_in_its_shards(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, MeshConfig(data=1, fsdp=8))
    state, placed = engine.init(), engine.abstract_state()
    assert leaf_shardings(state) == leaf_shardings(placed)
    query = state.params["layers"]["place_0"]["mixer"]["query"]
    for array in (query, state.optimizer[0].mu["layers"]["place_0"]["mixer"]["query"]):
        assert {shard.data.size * 8 for shard in array.addressable_shards} == {array.size}


def test_state_of_other_shape_is_sharded_where_divisible() -> None:
    """Such as the row means of Adafactor, and the scales of blocks of 8-bit moments."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = {"layers": {"w": jax.ShapeDtypeStruct((3, 16, 8), jnp.float32)}}
    own = {"layers": {"w": NamedSharding(mesh, P(None, ("fsdp",), ("tensor",)))}}
    shapes: Any = {"scales": (3, 16, 2), "rows": (3, 16), "odd": (3, 5, 2), "mean": (3, 16, 8)}
    state = {
        name: {"layers": {"w": jax.ShapeDtypeStruct(shape, jnp.float32)}}
        for name, shape in shapes.items()
    }
    state["count"] = jax.ShapeDtypeStruct((), jnp.int32)  # type: ignore[assignment]
    actual = optimizer_state_shardings(state, params, own, replicated_sharding(mesh))
    assert actual["count"].spec == P()
    assert {name: actual[name]["layers"]["w"].spec for name in shapes} == {
        "scales": P(None, ("fsdp",), ("tensor",)),
        "rows": P(None, ("fsdp",)),
        "odd": P(None, None, ("tensor",)),
        "mean": P(None, ("fsdp",), ("tensor",)),
    }


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_state_is_sharded_like_parameters(tmp_path: Path, kind: Any) -> None:
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    shapes = an_engine(tmp_path, mesh, optimizer=OPTIMIZERS[kind]()).abstract_state()
    params = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.params)
    }
    mirrors = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.optimizer):
        name = jax.tree_util.keystr(path)
        own = next((p for end, p in params.items() if name.endswith(end)), None)
        if own is None:
            assert leaf.sharding.is_fully_replicated, name
            assert leaf.ndim <= 1, name
        else:
            assert (leaf.shape, leaf.sharding.spec) == (own.shape, own.sharding.spec), name
            mirrors += 1
    assert mirrors >= len(params)
    assert not any(leaf.sharding.is_fully_replicated for leaf in params.values() if leaf.ndim > 2)
    for leaf in (shapes.step, shapes.cursor, shapes.key):
        assert leaf.sharding.is_fully_replicated


def test_described_gpus_lack_host_memory() -> None:
    class Described:
        """Sharding of an array on a GPU that this machine does not have."""

        memory_kind = None

        def with_memory_kind(self, kind: str) -> "Described":
            return self

    with pytest.raises(UsageError, match=r"^mesh.optimizer_placement host: .* --compile-best 0"):
        host_memory_shardings({"moment": Described()})
    own = make_mesh(MeshConfig(data=8))
    there = host_memory_shardings({"moment": checked_sharding(own, ("embed",), (8,))})
    assert there["moment"].memory_kind == "pinned_host"
