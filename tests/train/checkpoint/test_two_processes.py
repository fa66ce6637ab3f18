"""Two processes save together and restore the same checkpoint."""

from pathlib import Path

import pytest
from etils import epath

from tests.train.processes import run_two_processes
from train.checkpoint.manifest import find_manifest_problem

PROGRAM = """
import sys, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.retention import RetentionPolicy

address, index, folder, damaged = sys.argv[1:]
jax.distributed.initialize(address, 2, int(index))
mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
cut = NamedSharding(mesh, PartitionSpec("data"))
state = {"w": jax.jit(lambda: jnp.arange(6.0).reshape(2, 3), out_shardings=cut)()}
like = {"w": jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=cut)}
with CheckpointManager(folder, RetentionPolicy(keep_last=2)) as checkpoints:
    for step in (1, 2):
        checkpoints.save(step, state, {})
    checkpoints.wait()
    if int(index) == 0:
        (checkpoints.directory / "2" / damaged).unlink()
    found = checkpoints.find_newest_valid()
    checkpoints.set_aside(2, "damaged")
    restored = checkpoints.restore(found.step, like).state["w"]
    same = bool((restored.addressable_data(0) == state["w"].addressable_data(0)).all())
    print(found.step, [each.step for each in found.skipped], checkpoints.steps(), same)
"""


@pytest.mark.full
def test_two_processes_save_together_and_skip_the_same_steps(tmp_path: Path) -> None:
    last = run_two_processes(PROGRAM, tmp_path, "extra/metadata")
    assert last == ["1 [2] [1] True"] * 2
    assert {path.name for path in tmp_path.iterdir()} == {"1", "damaged-2"}
    assert find_manifest_problem(epath.Path(tmp_path / "1"), "full") is None
