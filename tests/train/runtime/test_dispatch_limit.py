"""Programs in flight, counted on a device whose programs end only when waited for."""

import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.support import tiny
from train.assembly import make_engine
from train.engines.engine import MAX_PROGRAMS_IN_FLIGHT, Engine
from train.evaluation.eval_weights import eval_params
from train.state import TrainState
from train.tasks.evaluation import mean_losses
from transformer import Hardware
from transformer.losses import Loss

MANY = 100
"""Programs dispatched, more than the 32 that XLA's CPU client has room for."""

CPUS = Hardware(count=8)
ONE_CPU = Hardware()
GPUS = Hardware("gpu", "NVIDIA H200", 8, "9.0")


class Device:
    """Counter of programs in flight. Waiting for one ends it and all before it."""

    def __init__(self) -> None:
        self.dispatched, self.ended, self.most = 0, 0, 0

    @property
    def in_flight(self) -> int:
        return self.dispatched - self.ended

    def dispatch(self, *_: Any) -> "Output":
        self.dispatched += 1
        self.most = max(self.most, self.in_flight)
        return Output(self, self.dispatched)


class Output:
    """Stand-in for an array of value 1.0 in `jax.block_until_ready` and `jax.device_get`."""

    def __init__(self, device: Device, number: int):
        self._device, self._number = device, number

    def block_until_ready(self) -> "Output":
        self._device.ended = max(self._device.ended, self._number)
        return self

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        self.block_until_ready()
        return np.array(1.0)


def engine_on(device: Device, folder: Path, hardware: Hardware, how: str) -> Engine:
    """Return an engine whose compiled functions are dispatched to a counting device."""
    experiment = tiny(folder, compile=how)
    model = dataclasses.replace(experiment.model, vocab_size=30)
    engine = make_engine(dataclasses.replace(experiment, model=model), hardware)
    vars(engine)["_step"] = lambda state, batch, frozen: (state, {"loss": device.dispatch()})
    vars(engine)["_evaluate"] = device.dispatch
    return engine


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize(
    ("hardware", "how", "ahead"),
    [
        (CPUS, "jit", 0),
        (CPUS, "pmap", 0),
        (ONE_CPU, "jit", MAX_PROGRAMS_IN_FLIGHT),
        (GPUS, "jit", MAX_PROGRAMS_IN_FLIGHT),
    ],
    ids=["cpus", "cpus pmap", "one cpu", "gpus"],
)
def test_number_of_programs_in_flight(
    tmp_path: Path, hardware: Hardware, how: str, ahead: int, call: str
) -> None:
    """One at a time on several CPU devices; elsewhere a dispatch waits for an earlier program."""
    device = Device()
    engine = engine_on(device, tmp_path, hardware, how)
    state: Any = {}
    for number in range(1, MANY + 1):
        engine.step(state, {}) if call == "step" else engine.evaluate(state, {})
        assert device.in_flight == min(number, ahead)
    assert device.most == ahead + 1


def test_steps_and_evaluations_share_one_limit(tmp_path: Path) -> None:
    device = Device()
    engine = engine_on(device, tmp_path, GPUS, "jit")
    for _ in range(MANY):
        engine.step({}, {})  # type: ignore[arg-type]
        engine.evaluate({}, {})
    assert device.most == MAX_PROGRAMS_IN_FLIGHT + 1
    assert device.dispatched == 2 * MANY


class CountingEngine:
    """Engine without its own limit, on a counting device."""

    def __init__(self) -> None:
        self.device = Device()

    def put_batch(self, rows: Any) -> Any:
        return rows

    def evaluate(self, params: Any, batch: Any) -> dict[str, Loss]:
        sums: Any = self.device.dispatch()
        return {"loss": Loss(sums, np.float32(batch))}  # type: ignore[arg-type]


class Batches:
    """Batches of an evaluation set, each with a weight."""

    def __len__(self) -> int:
        return MANY

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> Any:
        return cursor + 1


def test_pending_evaluations_are_bounded() -> None:
    engine: Any = CountingEngine()
    model: Any = SimpleNamespace(
        put_batch=engine.put_batch, compute_losses=partial(engine.evaluate, {})
    )
    actual = mean_losses(model, Batches())
    assert actual == {"loss": MANY / sum(range(1, MANY + 1))}
    assert engine.device.dispatched == MANY
    assert engine.device.most == MAX_PROGRAMS_IN_FLIGHT + 1
    assert engine.device.in_flight == 0


def test_ema_is_cast_by_one_program() -> None:
    """One program per leaf would put as many programs in flight as the model has weights."""
    leaves = {str(number): jnp.ones(2, jnp.bfloat16) for number in range(MANY)}
    wide = {name: leaf.astype(jnp.float32) for name, leaf in leaves.items()}
    state = TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        params=leaves,
        optimizer=(),
        key=jax.random.key(0),
        loss_scale=None,
        ema=wide,
    )
    assert len(jax.make_jaxpr(eval_params)(state).eqns) == 1
    assert {leaf.dtype for leaf in jax.tree.leaves(eval_params(state))} == {jnp.bfloat16.dtype}
    same = state.replace(params=wide)
    assert eval_params(same) is same.ema
