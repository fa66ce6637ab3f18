"""The parser of compiled programs that the tests of meshes stand on."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.train.parallel.hlo import find_collectives
from tests.train.support import light_compiler as light_compiler


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("[4,2]<=[8]", ("tensor",)),
        ("[4,2]<=[4,2]T(1,0)", ("fsdp",)),
        ("[2,4]<=[4,2]T(1,0)", ("data", "fsdp")),
        ("{}", ("data", "fsdp", "tensor")),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp'}", ("fsdp",)),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", ("fsdp",)),
        ("mesh['a'=8] {'a':(2)2}", ("fsdp",)),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", None),
    ],
)
def test_replica_groups(mesh: Mesh, groups: str, axes: tuple[str, ...] | None) -> None:
    text = (
        "ENTRY %main (a: f32[4]) -> f32[4] {\n  %a = f32[4,6]{1,0} parameter(0)\n"
        f"  %b = f32[4,6]{{1,0}} all-reduce(%a), replica_groups={groups}, to_apply=%add\n}}\n"
    )
    assert [each.axes for each in find_collectives(text, mesh)] == ([axes] if axes else [])


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
    found = [
        (each.kind, each.axes, each.count, each.bytes)
        for each in find_collectives(run.as_text() or "", mesh)
    ]
    gather = ("all-gather", ("fsdp",), layers, width * hidden // 2 * 4)
    assert sorted(found) == [
        gather,
        gather,
        ("all-reduce", ("tensor",), layers, 8 // 4 * width * 4),
    ]
