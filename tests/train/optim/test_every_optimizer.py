import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.train.optim.support import drawn, gradients
from tests.train.support import assert_close, assert_same_bits, random_rows, tiny
from tests.train.support import light_compiler as light_compiler
from train.assembly import make_engine
from train.checkpoint.manager import CheckpointManager
from train.errors import UsageError
from train.optim.optimizer_registry import OPTIMIZERS
from train.optim.schedules import ScheduleConfig
from train.parallel.mesh import MeshConfig, make_mesh
from train.parallel.sharding import (
    optimizer_state_shardings,
    parameter_shardings,
    replicated_sharding,
)
from transformer import Hardware
from transformer.layers.logical_axes import LogicalAxes

KINDS = sorted(OPTIMIZERS)

AXES = {
    "embedding": LogicalAxes(inputs=("vocab",), outputs=("embed",)),
    "up": LogicalAxes(("layers",), ("embed",), ("mlp",)),
    "query": LogicalAxes(("layers",), ("embed",), ("heads", "head")),
    "gain": LogicalAxes(("layers",), (), ("embed",)),
}
RATES = {"sgd": 0.3, "adafactor": 0.3}
LARGE = {"embedding": (32, 512), "up": (3, 16, 1024), "query": (3, 64, 4, 128), "gain": (3, 64)}


@pytest.mark.sampled("[adamw]", "[muon")
@pytest.mark.parametrize("kind", KINDS)
def test_eight_devices_equal_one(kind: str) -> None:
    """And no device holds the whole state."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = drawn(0, LARGE)
    optimizer = OPTIMIZERS[kind]().make(AXES)
    full = replicated_sharding(mesh)
    own = parameter_shardings(mesh, AXES, params)
    layout = optimizer_state_shardings(jax.eval_shape(optimizer.init, params), params, own, full)
    update = jax.jit(optimizer.update)
    spread = jax.jit(optimizer.update, out_shardings=(own, layout))
    alone, placed = params, jax.device_put(params, own)
    state = jax.jit(optimizer.init)(params)
    sharded_state = jax.jit(optimizer.init, out_shardings=layout)(placed)
    for step in (1, 2):
        grads = gradients(params, step)
        directions, state = update(grads, state, alone)
        others, sharded_state = spread(jax.device_put(grads, own), sharded_state, placed)
        assert_close(jax.device_get(others), jax.device_get(directions), 1e-5)
    large = [leaf for leaf in jax.tree.leaves(sharded_state) if leaf.size >= 1024]
    assert large or kind == "adafactor"
    assert not any(leaf.sharding.is_fully_replicated for leaf in large)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["adafactor", "adamw8bit", "sgd"])
def test_train_on_mesh_and_resume(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, also with a state unlike Adam's.

    The 8-bit states are quantized even for the tiny model, whose parameters fill a block.
    """
    monkeypatch.setattr("train.optim.adamw_8bit.MIN_QUANTIZED_SIZE", 256)
    experiment = tiny(
        tmp_path,
        optimizer=OPTIMIZERS[kind](),
        schedule=ScheduleConfig("constant", learning_rate=RATES.get(kind, 1e-2), warmup_steps=0),
        mesh=MeshConfig(data=2, fsdp=2, tensor=2),
    )
    model = dataclasses.replace(experiment.model, vocab_size=30, layer_loop="scan")
    engine = make_engine(dataclasses.replace(experiment, model=model), Hardware(count=8))
    state, rows = engine.init(), engine.put_batch(random_rows(8, 30))
    losses = []
    for _ in range(8):
        state, metrics = engine.step(state, rows)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1
    layouts = [
        jax.tree.map(lambda leaf: leaf.sharding, each) for each in (state, engine.abstract_state())
    ]
    assert layouts[0] == layouts[1]
    codes = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.dtype == jnp.uint8]
    assert bool(codes) == (kind == "adamw8bit")
    with CheckpointManager(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(8, state, {})
        checkpoints.wait()
        restored = checkpoints.restore(8, engine.abstract_state()).state
    assert_same_bits(engine.step(restored, rows), engine.step(state, rows))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("adamw", {"beta1": 1.0}),
        ("adamw8bit", {"beta2": -0.1}),
        ("sgd", {"momentum": 1.0}),
        ("lion", {"weight_decay": -1.0}),
        ("adafactor", {"clip_threshold": float("nan")}),
    ],
)
def test_invalid_optimizer_settings(kind: str, settings: Any) -> None:
    with pytest.raises(UsageError, match=f"optimizer.{next(iter(settings))} .*: (give|is not)"):
        OPTIMIZERS[kind](**settings)
