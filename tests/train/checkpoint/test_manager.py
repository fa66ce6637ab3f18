import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from tests.train.checkpoint.support import abstract, assert_same, make_state, save
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.retention import RetentionPolicy
from train.errors import UserError


def test_every_dtype_round_trips_bit_for_bit(tmp_path: pathlib.Path) -> None:
    state = make_state()
    others = {
        "int8": jnp.arange(-3, 4, dtype=jnp.int8),
        "bool": jnp.array([True, False]),
        "uint32": jnp.array([2**32 - 1], jnp.uint32),
        "float8": jnp.array([0.5, 448.0], jnp.float8_e4m3fn),
        "keys": jax.random.split(jax.random.key(5, impl="rbg"), 3),
        "nothing": {},
        "a/b.c": (jnp.float16(0.1), [jnp.int32(3)]),
    }
    extra = {"corpus": "ab12", "best": 0.1 + 0.2, "list": [1, None, "ü"]}
    with CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(5, (state, others), extra)
        checkpoints.wait()
        restored = checkpoints.restore(5, abstract((state, others)))
    assert_same(restored.state, (state, others))
    assert restored.metadata == extra


def test_save_is_a_snapshot(tmp_path: pathlib.Path) -> None:
    state = {"w": jnp.full((1000, 1001), 3.0), "b": jnp.zeros(3)}
    like = abstract(state)
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    extra = {"seen": [1]}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state, extra)
        extra["seen"].append(2)
        for _ in range(3):
            state = update(state)
        checkpoints.wait()
        restored = checkpoints.restore(1, like)
    assert (np.asarray(restored.state["w"]) == 3).all()
    assert restored.metadata == {"seen": [1]}


def test_restore_on_another_mesh(tmp_path: pathlib.Path) -> None:
    def placed(names: tuple[str, ...], shape: tuple[int, ...], **specs: PartitionSpec) -> Any:
        mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
        return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    rows, none = PartitionSpec("fsdp"), PartitionSpec()
    one = placed(("fsdp",), (8,), w=rows, keys=rows, step=none)
    other = placed(
        ("data", "fsdp", "tensor"),
        (2, 2, 2),
        w=PartitionSpec("tensor", ("fsdp", "data")),
        keys=PartitionSpec(("fsdp", "tensor")),
        step=none,
    )
    full = {
        "w": jax.random.normal(jax.random.key(1), (16, 24)),
        "keys": jax.random.split(jax.random.key(2), 8),
        "step": jnp.int32(3),
    }
    state = jax.tree.map(jax.device_put, full, one)
    like = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), full, other
    )
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(1, like).state
    assert jax.tree.map(lambda x: x.sharding, restored) == other
    assert_same(restored, full)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"w": (5, 3)}, r"w is float32\[3,5\] there and float32\[5,3\] here"),
        ({"w": jnp.bfloat16}, r"w is float32\[3,5\] there and bfloat16\[3,5\] here"),
        ({"key": jnp.uint32}, r"key is key<fry>\[\] there and uint32\[\] here"),
        ({"new": (2,)}, r"new is not in it"),
        ({"b": None}, r"b is in it and not in this model"),
        (
            {"w": (1,), "b": (1,), "new": (2,), "more": (2,)},
            r"b is float32\[4\] there and float32\[1\] here, w is .*, and 2 more differences",
        ),
    ],
    ids=["shape", "dtype", "random key", "missing", "extra", "many"],
)
def test_checkpoint_of_another_model_raises_by_name(
    changed: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    state = {"w": jnp.ones((3, 5)), "b": jnp.ones(4), "key": jax.random.key(0)}
    like = abstract(state)
    for name, value in changed.items():
        old = like.pop(name, jax.ShapeDtypeStruct((), jnp.float32))
        if isinstance(value, tuple):
            like[name] = jax.ShapeDtypeStruct(value, old.dtype)
        elif value is not None:
            like[name] = jax.ShapeDtypeStruct(old.shape, value)
    save(tmp_path, state)
    with (
        CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(UserError, match=rf"is of another model \({message}\);"),
    ):
        checkpoints.restore(1, like)


def test_parameters_can_be_restored_alone(tmp_path: pathlib.Path) -> None:
    state = make_state()
    save(tmp_path, state)
    with CheckpointManager(tmp_path) as checkpoints:
        assert_same(checkpoints.restore_subtree(1, "params", abstract(state.params)), state.params)
        few = {"embed": abstract(state.params["embed"])}
        assert_same(checkpoints.restore_subtree(1, "params", few), {"embed": state.params["embed"]})
        wider = abstract(make_state(width=13).params)
        with pytest.raises(UserError, match=r"params/embed/table is float32\[11,7\] there and"):
            checkpoints.restore_subtree(1, "params", wider)


def test_newest_and_permanent_checkpoints_are_kept(tmp_path: pathlib.Path) -> None:
    state = {"w": jnp.ones(3)}
    with CheckpointManager(
        tmp_path, RetentionPolicy(save_every=3, keep_last=2, keep_every=6)
    ) as checkpoints:
        assert [step for step in range(1, 11) if checkpoints.is_due(step)] == [3, 6, 9]
        for step in (3, 6, 9, 12, 15, 18, 20):
            checkpoints.save(step, state, {})
        checkpoints.wait()
        assert checkpoints.steps() == [6, 12, 18, 20]
    assert sorted(int(path.name) for path in tmp_path.iterdir()) == [6, 12, 18, 20]
    assert not CheckpointManager(tmp_path).is_due(0)
    with pytest.raises(ValueError, match="the newest is always kept"):
        RetentionPolicy(keep_last=0)


def test_checkpoint_counts_once_it_was_waited_for(tmp_path: pathlib.Path) -> None:
    """Complete on the disk is not enough: each process sees that at another moment."""
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.steps() == []
        checkpoints.save(1, make_state(), {})
        while checkpoints.saved_step is None:
            time.sleep(0.01)
        assert checkpoints.steps() == []
        checkpoints.wait()
        assert checkpoints.steps() == [1]
    with CheckpointManager(
        tmp_path, RetentionPolicy(keep_last=2), asynchronous=False
    ) as checkpoints:
        checkpoints.save(2, make_state(), {})
        assert checkpoints.steps() == [1, 2]


def test_saving_a_step_twice_raises(tmp_path: pathlib.Path) -> None:
    first, second = {"w": jnp.ones(3)}, {"w": jnp.zeros(3)}
    with CheckpointManager(tmp_path) as checkpoints, CheckpointManager(tmp_path) as another:
        another.save(1, first, {})
        another.wait()
        with pytest.raises(UserError, match=r"/1: exists already; let only one process at a time"):
            checkpoints.save(1, second, {})
        checkpoints.save(2, second, {})
        with pytest.raises(UserError, match=r"/2: exists already"):
            checkpoints.save(2, first, {})
        assert_same(checkpoints.restore(2, abstract(first)).state, second)


def test_save_deletes_nothing_but_unfinished_checkpoints(tmp_path: pathlib.Path) -> None:
    save(tmp_path, make_state())
    for name in ("notes", "damaged-4", "7.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
    with CheckpointManager(tmp_path, RetentionPolicy(keep_last=2)) as checkpoints:
        assert checkpoints.steps() == [1]
        checkpoints.save(2, make_state(), {})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2", "notes", "damaged-4"}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_checkpoint_opens_with_plain_orbax(tmp_path: pathlib.Path) -> None:
    """As docs/resume.md says."""
    state = {"params": {"w": jnp.arange(6.0).reshape(2, 3)}, "step": jnp.int32(4)}
    save(tmp_path, state, step=4)
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "4" / "state")
    assert_same(jax.tree.map(jnp.asarray, restored), state)
    with ocp.CheckpointManager(tmp_path) as plain:
        assert plain.all_steps() == [4]
        arrays = ocp.args.Composite(state=ocp.args.PyTreeRestore())
        assert_same(jax.tree.map(jnp.asarray, plain.restore(4, args=arrays).state), state)


def test_reading_does_not_change_the_folder(tmp_path: pathlib.Path) -> None:
    save(tmp_path, make_state())
    unfinished = tmp_path / "2.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (tmp_path / "notes").mkdir()
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.steps() == [1]
        with pytest.raises(UserError, match="/4: does not exist; the folder has steps 1"):
            checkpoints.restore(4, {})
    assert unfinished.exists()
    with CheckpointManager(tmp_path / "nowhere") as checkpoints:
        assert checkpoints.steps() == []
        with pytest.raises(UserError, match=r"/1: does not exist; the folder has no step"):
            checkpoints.restore(1, {})
    assert not (tmp_path / "nowhere").exists()


def test_unsupported_leaves_raise_before_writing(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "checkpoints"
    with CheckpointManager(folder) as checkpoints:
        with pytest.raises(TypeError, match=r"b/0: is a ndarray; a checkpoint holds jax arrays"):
            checkpoints.save(1, {"a": jnp.ones(2), "b": [np.ones(3)]}, {})
        with pytest.raises(ValueError, match=r"a/b: two arrays have this name"):
            checkpoints.save(1, {"a": {"b": jnp.ones(2)}, "a/b": jnp.ones(2)}, {})
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpoints.save(1, {"a": jnp.ones(2)}, {"path": tmp_path})
    assert not folder.exists()
