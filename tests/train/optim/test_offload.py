"""Optimizer state in host memory: the same results, one layer at a time."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tests.train.optim.support import AXES, SHAPES, Tree, assert_like, drawn, gradients
from tests.train.support import assert_close, random_rows, tiny
from tests.train.support import light_compiler as light_compiler
from train.assembly import make_engine
from train.optim.elementwise import AdamW
from train.optim.optimizer_registry import OPTIMIZERS, make_step_optimizer
from train.parallel.mesh import MeshConfig
from transformer import Hardware
from transformer.layers.logical_axes import LogicalAxes

KINDS = sorted(OPTIMIZERS)
DEEP = {**AXES, "other": LogicalAxes(stack=("layers",), inputs=("embed",), outputs=("mlp",))}
LARGE = {**SHAPES, "other": (3, 5, 8)}
# jaxlib 0.7.2 cannot compile a program for CPUs whose results lie in `pinned_host` memory ("No
# registered implementation for untyped custom call to annotate_device_placement").
needs_pinned_host = pytest.mark.skipif(
    jax.__version_info__ < (0, 10), reason="this jaxlib cannot compile for pinned_host on a CPU"
)
MEMORIES: Any = {"host": "pinned_host", "device": "device"}


def after(kind: str, memory: Any, fine: tuple[bool, ...]) -> tuple[Tree, Any]:
    """Return parameters and optimizer state after `len(fine)` updates."""
    rule = make_step_optimizer(OPTIMIZERS[kind](), DEEP, memory)
    there = SingleDeviceSharding(jax.devices()[0], memory_kind=MEMORIES[memory])
    params = drawn(0, LARGE)
    state = jax.device_put(jax.jit(rule.init)(params), there)
    update = jax.jit(rule.update)
    for step, yes in enumerate(fine, start=1):
        directions, state = update(
            gradients(params, step), state, params, accept_update=np.bool_(yes)
        )
        params = {name: params[name] - 0.1 * np.asarray(directions[name]) for name in params}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state)} == {MEMORIES[memory]}
    return jax.device_get((params, state))


@needs_pinned_host
@pytest.mark.sampled("[adamw]", "[sgd]")
@pytest.mark.parametrize("kind", ["adamw", *(kind for kind in KINDS if kind != "adamw")])
def test_offloaded_update_equals_plain_update(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One update in between is rejected."""
    monkeypatch.setattr("train.optim.adamw_8bit.MIN_QUANTIZED_SIZE", 16)
    actual, state = after(kind, "host", (True, False, True))
    expected, expected_state = after(kind, "device", (True, False, True))
    assert_like(actual, expected, 1e-6)
    assert_close(state, expected_state, 1e-6)


@needs_pinned_host
@pytest.mark.full
def test_train_with_host_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a mesh, moments are in host memory before and after each step."""
    monkeypatch.setattr(
        "train.engines.engine.check_optimizer_placement", lambda *_: None
    )  # a CPU has it, without effect
    experiment = tiny(tmp_path, optimizer=AdamW(), mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    model = dataclasses.replace(experiment.model, vocab_size=30, layer_loop="scan")
    losses: dict[str, list[float]] = {}
    for memory in MEMORIES:
        mesh = dataclasses.replace(experiment.mesh, optimizer_placement=memory)
        own = dataclasses.replace(experiment, model=model, mesh=mesh)
        engine = make_engine(own, Hardware(count=8))
        state, rows = engine.init(), engine.put_batch(random_rows(8, 30))
        losses[memory] = []
        for _ in range(4):
            state, metrics = engine.step(state, rows)
            losses[memory].append(float(metrics["loss"]))
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.optimizer)}
        assert kinds == {MEMORIES[memory]}
    assert losses["host"] == pytest.approx(losses["device"], rel=1e-6)
