"""Training steps on the device: low precision, rematerialization, donation, two devices."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests_device.support import Meter, batch, engine_on, float32_tolerance, kernel_experiment
from train.engines.engine import Engine
from train.experiment import Experiment
from train.optim.elementwise import Sgd
from train.optim.schedules import ScheduleConfig
from train.parallel.mesh import MeshConfig
from train.state import LossScaleConfig
from transformer import Hardware

STEPS = 20
FALL = 0.3
"""Required decrease, in nats, of the loss on a repeated batch."""


def test_bfloat16_training(folder: Path, one_device: Hardware, meter: Meter) -> None:
    """The loss on a repeated batch falls."""
    # "DotThunk::Execute: BF16 x BF16 = F32": some products of a whole training step.
    if one_device.platform == "cpu" and jax.__version_info__ < (0, 10):
        pytest.skip("this jaxlib cannot train in bfloat16 on a CPU")
    engine = engine_on(kernel_experiment(folder, precision="bfloat16"), one_device)
    state, rows = engine.init(), engine.put_batch(batch())
    losses = []
    for _ in range(STEPS):
        state, metrics = engine.step(state, rows)
        losses.append(float(metrics["loss"]))
    meter.note = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0] - FALL


def test_float16_training(folder: Path, one_device: Hardware, meter: Meter) -> None:
    """The loss falls, after the initial loss scale was halved until gradients are finite."""
    # 2**24 times the gradients of this model is beyond float16, whose largest number is 65504.
    experiment = kernel_experiment(
        folder, precision="float16", loss_scale=LossScaleConfig(2.0**24, growth_interval=1000)
    )
    engine = engine_on(experiment, one_device)
    state, rows = engine.init(), engine.put_batch(batch())
    losses, overflows = [], 0
    for _ in range(STEPS + 12):
        state, metrics = engine.step(state, rows)
        losses.append(float(metrics["loss"]))
        overflows += not np.isfinite(float(metrics["grad_norm"]))
    assert state.loss_scale is not None
    scale = float(state.loss_scale.scale)
    fall = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}"
    meter.note = f"{fall}, {overflows} overflows, scale 2^{np.log2(scale):.0f}"
    assert np.isfinite(losses).all()
    assert overflows > 0
    assert scale == 2.0 ** (24 - overflows)
    assert losses[-1] < losses[0] - FALL


def sgd_experiment(folder: Path, **changes: Any) -> Experiment:
    """Return an experiment whose first update is the gradient itself.

    Adam divides a gradient by its own size: of one that is zero but for rounding (that of the
    biases of keys) it makes a full step in a random direction.
    """
    schedule = ScheduleConfig("constant", learning_rate=1.0, warmup_steps=0)
    experiment = kernel_experiment(folder, schedule=schedule, **changes)
    return dataclasses.replace(experiment, optimizer=Sgd(momentum=0.9, max_grad_norm=0.0))


@pytest.fixture
def highest_precision() -> Iterator[None]:
    """Compute float32 matmuls in float32: GPUs and TPUs round the operands by default."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def float32(folder: Path, one_device: Hardware) -> Engine:
    """Engine in float32, on one device, that keeps all activations."""
    return engine_on(sgd_experiment(folder), one_device)


@pytest.mark.usefixtures("highest_precision")
def test_donation(float32: Engine) -> None:
    """A step reuses the memory of its input state (donation)."""
    state = float32.init()
    after, _ = jax.block_until_ready(float32.step(state, float32.put_batch(batch())))
    kept = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if not leaf.is_deleted()
    ]
    assert not kept, f"not donated: {', '.join(kept)}"
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after))


def one_step(engine: Engine) -> tuple[float, list[np.ndarray]]:
    """Return the loss of the first step and the change of each parameter: minus its gradient."""
    state = engine.init()
    before = jax.device_get(jax.tree.leaves(state.params))
    state, metrics = engine.step(state, engine.put_batch(batch()))
    after = jax.device_get(jax.tree.leaves(state.params))
    return float(metrics["loss"]), [new - old for new, old in zip(after, before, strict=True)]


@pytest.mark.parametrize("remat", ["dots", "full", "offload"])
@pytest.mark.usefixtures("highest_precision")
def test_rematerialization(
    remat: Any, folder: Path, float32: Engine, one_device: Hardware, meter: Meter
) -> None:
    """Recomputed or offloaded activations give the same loss and gradients."""
    if remat == "offload" and one_device.platform == "cpu":
        pytest.skip("a CPU computes in the host's memory already")
    experiment = sgd_experiment(folder)
    model = dataclasses.replace(experiment.model, remat=remat)
    other = engine_on(dataclasses.replace(experiment, model=model), one_device)
    (expected_loss, expected), (loss, updates) = one_step(float32), one_step(other)
    tolerance = float32_tolerance(one_device)
    meter.check("loss", abs(loss - expected_loss) / abs(expected_loss), tolerance)
    # Relative to the largest gradient: some are zero except for rounding.
    largest = max(np.abs(each).max() for each in expected)
    assert largest > 0
    for one, two in zip(updates, expected, strict=True):
        meter.check("gradients", float(np.abs(one - two).max() / largest), tolerance)
    meter.finish()


MESHES = [MeshConfig(data=2), MeshConfig(data=1, fsdp=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=["data=2", "fsdp=2"])
@pytest.mark.usefixtures("highest_precision")
def test_two_devices(
    mesh: MeshConfig, folder: Path, float32: Engine, hardware: Hardware, meter: Meter
) -> None:
    """A mesh of two devices has the losses of one."""
    if jax.local_device_count() < 2:
        pytest.skip("there is one device")
    other = engine_on(sgd_experiment(folder, mesh=mesh), hardware, count=2)
    curves = []
    for engine in (float32, other):
        state, losses = engine.init(), []
        for cursor in range(4):
            state, metrics = engine.step(state, engine.put_batch(batch(cursor)))
            losses.append(float(metrics["loss"]))
        curves.append(losses)
    for step, (one, two) in enumerate(zip(*curves, strict=True), start=1):
        meter.check(f"loss of step {step}", abs(one - two), 1e-4)
    meter.finish()
