from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.train.support import light_compiler as light_compiler
from train.estimate.hlo import Collective, find_collectives, total_collectives


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)


def program(*lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"ENTRY %main (a: f32[4]) -> f32[4] {{\n  %a = f32[4,6]{{1,0}} parameter(0)\n{body}\n}}\n"
    )


def only(mesh: Mesh, line: str) -> Collective:
    (one,) = find_collectives(program(line), mesh)
    return one


@pytest.mark.parametrize(
    ("groups", "axes", "parts"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",), 2),
        ("{{0,2},{4,6},{1,3},{5,7}}", ("fsdp",), 2),  # a TPU's own order
        ("[4,2]<=[8]", ("tensor",), 2),
        ("[4,2]<=[4,2]T(1,0)", ("fsdp",), 2),
        ("[4,2]<=[2,4]T(1,0)", ("data",), 2),
        ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp"), 4),
        ("{}", ("data", "fsdp", "tensor"), 8),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}", ("fsdp",), 2),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ("data", "fsdp"), 4),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", ("fsdp",), 2),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", ("data",), 2),
        ("mesh['a'=8] {'a':(2)2}", ("fsdp",), 2),
    ],
)
def test_replica_groups(mesh: Mesh, groups: str, axes: tuple[str, ...], parts: int) -> None:
    one = only(mesh, f"%b = f32[4,6]{{1,0}} all-reduce(%a), replica_groups={groups}, to_apply=%add")
    assert (one.axes, one.group_size) == (axes, parts)


@pytest.mark.parametrize(
    ("kind", "size", "sent"),
    [
        ("all-gather", 4 * 96, 3 * 96),
        ("all-reduce", 96, 2 * 72),
        ("reduce-scatter", 96, 72),
        ("all-to-all", 96, 72),
    ],
)
@pytest.mark.parametrize("start", ["", "-start"])
def test_bytes_sent(mesh: Mesh, kind: str, size: int, sent: int, start: str) -> None:
    """Groups of four devices, and an array [4, 6] of four-byte elements on every device."""
    one = only(
        mesh, f"%b = (f32[9]{{0}}) {kind}{start}(%a), channel_id=1, replica_groups=[2,4]<=[8]"
    )
    assert (one.kind, one.bytes, one.bytes_sent, one.shapes) == (kind, size, sent, ((4, 6),))
    assert one.axes == ("fsdp", "tensor")


def test_collective_permute(mesh: Mesh) -> None:
    pairs = "{{0,4},{4,0},{1,5},{5,1}}"
    one = only(mesh, f"%b = f32[4,6]{{1,0}} collective-permute(%a), source_target_pairs={pairs}")
    assert (one.kind, one.axes, one.bytes, one.bytes_sent) == (
        "collective-permute",
        ("data",),
        96,
        96,
    )


def test_collectives_within_one_device_are_excluded(mesh: Mesh) -> None:
    line = "%b = f32[4,6]{1,0} all-reduce(%a), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    assert find_collectives(program(line), mesh) == ()


FUSED = """%all-reduce-scatter.1 (p: f32[4,6]) -> f32[2,6] {
  %p = f32[4,6]{1,0} parameter(0)
  %c = f32[4,6]{1,0} all-reduce(%p), channel_id=3, replica_groups=[4,2]<=[8], to_apply=%add
}

%first (p: f32[4,6]) -> f32[8,6] {
  %p = f32[4,6]{1,0} parameter(0)
  ROOT %c = f32[8,6]{1,0} all-gather(%p), channel_id=4, replica_groups=[4,2]<=[8], dimensions={0}
}

%second (p: f32[4,6]) -> f32[8,6] {
  %p = f32[4,6]{1,0} parameter(0)
  ROOT %c = f32[8,6]{1,0} all-gather(%p), channel_id=4, replica_groups=[4,2]<=[8], dimensions={0}
}

"""


def test_tpu_fusions(mesh: Mesh) -> None:
    """An all-reduce with a kept slice; a gather whose start and end are in two fusions."""
    calls = [
        f"%x.{number} = f32[8,6]{{1,0}} fusion(%a), kind=kCustom, calls=%{name}"
        for number, name in enumerate(("all-reduce-scatter.1", "first", "second"))
    ]
    actual = find_collectives(FUSED + program(*calls), mesh)
    assert total_collectives(actual) == {
        ("reduce-scatter", ("tensor",)): (1, 96),
        ("all-gather", ("tensor",)): (1, 192),
    }


def test_locally_compiled_program(mesh: Mesh) -> None:
    """Layers in a loop; weights sharded over fsdp, hidden units over tensor, rows over data
    x fsdp.
    """
    layers, width, hidden = 3, 8, 16
    lay = lambda *spec: NamedSharding(mesh, P(*spec))  # noqa: E731
    rows = lay(("data", "fsdp"), None)

    def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        x = x + jnp.tanh(x @ weights[0]) @ weights[1]
        return jax.lax.with_sharding_constraint(x, rows), None

    up = jax.ShapeDtypeStruct(
        (layers, width, hidden), jnp.float32, sharding=lay(None, "fsdp", "tensor")
    )
    down = jax.ShapeDtypeStruct(
        (layers, hidden, width), jnp.float32, sharding=lay(None, "tensor", "fsdp")
    )
    x = jax.ShapeDtypeStruct((8, width), jnp.float32, sharding=rows)
    run = jax.jit(lambda x, w: jax.lax.scan(layer, x, w)[0]).lower(x, (up, down)).compile()
    actual = find_collectives(run.as_text() or "", mesh)
    assert total_collectives(actual) == {
        ("all-gather", ("fsdp",)): (2 * layers, 2 * layers * width * hidden // 2 * 4),
        ("all-reduce", ("tensor",)): (layers, layers * 8 // 4 * width * 4),
    }
    assert all("while/body" in one.op_name for one in actual)


def test_compiled_permutation(mesh: Mesh) -> None:
    ring = [(0, 1), (1, 0)]
    shift = partial(jax.lax.ppermute, axis_name="fsdp", perm=ring)
    spec = P("data", "fsdp")
    moved = jax.jit(jax.shard_map(shift, mesh=mesh, in_specs=spec, out_specs=spec))
    text = moved.lower(jnp.ones((4, 6))).compile().as_text() or ""
    (one,) = find_collectives(text, mesh)
    assert (one.kind, one.axes, one.bytes) == ("collective-permute", ("fsdp",), 2 * 3 * 4)
