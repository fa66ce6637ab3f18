"""Engines on one device, on meshes and by pmap: one curve, and programs compiled once."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.support import assert_close, assert_same_bits, random_rows, tiny
from tests.train.support import light_compiler as light_compiler
from train.assembly import make_engine
from train.checkpoint.manager import CheckpointManager
from train.config.resolve import backend_field, resolve_auto
from train.engines.engine import Engine
from train.errors import UsageError
from train.experiment import Experiment
from train.optim.optimizer_registry import OPTIMIZERS
from train.parallel.context_parallel import check_batch_divides
from train.parallel.mesh import MeshConfig
from train.rollback import Rollback, RollbackManager, RollbackRecord
from train.run_folder.folder import RunFolder
from train.state import LossScale, LossScaleConfig, TrainState
from transformer import Hardware, Precision
from transformer.attention.backends.choose import choose_backend

VOCAB, STEPS = 30, 12


class Curve(NamedTuple):
    """Losses and parameters after training with an engine on the same batches."""

    metrics: list[dict[str, float]]
    params: Any
    evaluation: tuple[float, float]


def make_experiment(folder: Path, **changes: Any) -> Experiment:
    experiment = tiny(folder, **changes)
    model = dataclasses.replace(experiment.model, vocab_size=VOCAB)
    return dataclasses.replace(experiment, model=model)


@jax.jit
def copied(state: TrainState) -> TrainState:
    return jax.tree.map(jnp.copy, state)


def trained(engine: Engine, state: TrainState) -> Curve:
    """Train from a state on any device, without consuming it."""
    layout = jax.tree.map(lambda leaf: leaf.sharding, engine.abstract_state())
    state = jax.device_put(copied(state), layout)
    metrics = []
    for cursor in range(STEPS):
        state, result = engine.step(state, engine.put_batch(random_rows(8, VOCAB, cursor=cursor)))
        metrics.append({name: float(value) for name, value in result.items()})
    assert int(state.step) == int(state.cursor) == STEPS
    held_out = engine.evaluate(state.params, engine.put_batch(random_rows(8, VOCAB, cursor=99)))[
        "loss"
    ]
    params = jax.tree.map(np.asarray, state.params)
    return Curve(metrics, params, (float(held_out.total), float(held_out.weight)))


def on_one_device(experiment: Experiment) -> Engine:
    return make_engine(experiment, Hardware())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def start(folder: Path) -> TrainState:
    return on_one_device(make_experiment(folder)).init()


def test_the_program_compiled_ahead_is_the_one_that_runs(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = on_one_device(make_experiment(folder, steps=STEPS + 1))
    batch = engine.put_batch(random_rows(8, VOCAB))
    jax.config.update("jax_log_compiles", True)  # of all threads
    try:
        engine.compile_step_ahead(batch)
        _, metrics = engine.step(engine.init(), batch)
    finally:
        jax.config.update("jax_log_compiles", False)
    assert np.isfinite(metrics["loss"])
    compiled = [text for text in caplog.messages if "Finished XLA compilation" in text]
    assert sum("train_step" in text for text in compiled) == 1


@pytest.fixture(scope="module")
def expected(folder: Path, start: TrainState) -> Curve:
    """Return the curve of one device with the whole batch at once."""
    return trained(on_one_device(make_experiment(folder)), start)


def assert_same_curve(found: Curve, expected: Curve) -> None:
    for one, other in zip(found.metrics, expected.metrics, strict=True):
        assert one["learning_rate"] == other["learning_rate"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert found.evaluation == pytest.approx(expected.evaluation, rel=1e-5)
    assert_close(found.params, expected.params, 1e-4)


@pytest.mark.full
@pytest.mark.parametrize("grad_accum_steps", [2, 8])
def test_accumulation_equals_full_batch(
    folder: Path, start: TrainState, expected: Curve, grad_accum_steps: int
) -> None:
    """With dropout, and microbatches without target weights."""
    experiment = make_experiment(folder, grad_accum_steps=grad_accum_steps)
    assert_same_curve(trained(on_one_device(experiment), start), expected)


@pytest.fixture(scope="module")
def on_eight_devices(folder: Path) -> Engine:
    mesh = MeshConfig(data=2, fsdp=2, tensor=2)
    return make_engine(make_experiment(folder, mesh=mesh, grad_accum_steps=2), Hardware(count=8))


@pytest.mark.full
def test_three_axes_and_microbatches_equal_one_device(
    on_eight_devices: Engine, start: TrainState, expected: Curve
) -> None:
    assert_same_curve(trained(on_eight_devices, start), expected)


@pytest.mark.full
@pytest.mark.parametrize(
    "mesh",
    [MeshConfig(data=8), MeshConfig(data=1, fsdp=8), MeshConfig(data=2, tensor=4)],
    ids=str,
)
def test_mesh_equals_one_device(
    folder: Path, start: TrainState, expected: Curve, mesh: MeshConfig
) -> None:
    engine = make_engine(make_experiment(folder, mesh=mesh), Hardware(count=8))
    assert_same_curve(trained(engine, start), expected)


@pytest.mark.full
def test_pmap_equals_one_device(folder: Path, start: TrainState, expected: Curve) -> None:
    engine = make_engine(make_experiment(folder, compile="pmap"), Hardware(count=8))
    assert_same_curve(trained(engine, start), expected)


@pytest.mark.full
def test_pmap_with_gradient_accumulation(folder: Path) -> None:
    """Each of eight devices takes two microbatches of one."""
    experiment = make_experiment(folder, batch_size=16)
    mapped = dataclasses.replace(experiment, compile="pmap", grad_accum_steps=2)
    result = []
    for engine in (on_one_device(experiment), make_engine(mapped, Hardware(count=8))):
        state, metrics = engine.step(engine.init(), engine.put_batch(random_rows(16, VOCAB)))
        result.append((float(metrics["loss"]), jax.tree.map(np.asarray, state.params)))
    assert result[0][0] == pytest.approx(result[1][0], abs=1e-5)
    assert_close(result[0][1], result[1][1], 1e-5)


@pytest.mark.full
def test_state_is_donated_and_keeps_its_sharding(
    on_eight_devices: Engine, start: TrainState
) -> None:
    """The initial state is the same on any mesh, bit for bit."""
    engine = on_eight_devices
    state = engine.init()
    assert_same_bits(state, start)
    assert jax.tree.map(_kind, state) == jax.tree.map(_kind, engine.abstract_state())
    after, _ = engine.step(state, engine.put_batch(random_rows(8, VOCAB)))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert jax.tree.map(_kind, after) == jax.tree.map(_kind, engine.abstract_state())


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{leaf.shape} {leaf.sharding}"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.full)])
def test_step_and_evaluation_compile_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    """Also for a restored state with the cursor and the learning rate of a rollback.

    Not by `chex.assert_max_traces`: another sharding compiles again without a new trace.
    """
    experiment = make_experiment(folder, num_layers=1, dropout=0.0)
    engine = make_engine(experiment, Hardware(count=count))
    rows = engine.put_batch(random_rows(8, VOCAB))

    def train_and_evaluate(state: TrainState) -> tuple[TrainState, list[str]]:
        """Return the state after a step, and the messages about what was compiled for it."""
        caplog.clear()
        with jax.log_compiles():
            state, _ = engine.step(state, rows)
            engine.evaluate(state.params, rows)
        actual = [message for message in caplog.messages if "XLA compilation" in message]
        return state, actual

    state, compiled = train_and_evaluate(engine.init())
    assert sum("train_step" in message for message in compiled) == 1
    assert sum("evaluat" in message for message in compiled) == 1
    state, compiled = train_and_evaluate(state)
    assert compiled == []
    with CheckpointManager(tmp_path / "checkpoints", asynchronous=False) as checkpoints:
        checkpoints.save(2, state, {})
        restored = checkpoints.restore(2, engine.abstract_state())
    run_folder = RunFolder(tmp_path)
    rollback = Rollback(first=1, step=2, checkpoint=2, cursor=9, rate=0.5, attempts=1)
    RollbackRecord((rollback,)).write(run_folder.rollback_record)
    rollbacks = RollbackManager(experiment, run_folder, resuming=True)
    state, compiled = train_and_evaluate(rollbacks.apply(restored.state, restored.metadata))
    assert compiled == []
    assert int(state.cursor) == 10
    assert state.anomaly_detector is not None
    assert float(state.anomaly_detector.lr_factor) == 0.5


@pytest.mark.parametrize("count", [1, 2])
def test_step_makes_only_recorded_choices(folder: Path, count: int) -> None:
    experiment = make_experiment(folder, num_layers=1)
    engine = make_engine(experiment, Hardware(count=count))
    choose_backend.cache_clear()
    assert "reference" in resolve_auto(experiment, engine.model.hardware)[backend_field(0)]
    recorded = choose_backend.cache_info()
    jax.eval_shape(engine.train_step, engine.abstract_state(), random_rows(8, VOCAB))
    asked = choose_backend.cache_info()
    assert asked.hits > recorded.hits
    assert asked.misses == recorded.misses == 1


@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
def test_moments_are_float32_with_16_bit_parameters(folder: Path, optimizer: Any) -> None:
    experiment = make_experiment(folder, num_layers=1, dropout=0.0)
    experiment = dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, precision=Precision.parse("pure_bfloat16")),
        optimizer=OPTIMIZERS[optimizer](),
    )
    engine = on_one_device(experiment)
    before = engine.abstract_state()
    after, metrics = jax.eval_shape(engine.train_step, before, random_rows(8, VOCAB))
    for state in (before, after):
        assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
        floats = [
            leaf
            for leaf in jax.tree.leaves(state.optimizer)
            if jnp.issubdtype(leaf.dtype, jnp.floating)
        ]
        assert {leaf.dtype for leaf in floats} == {jnp.dtype("float32")}
        assert state.loss_scale is None
    assert {leaf.dtype for leaf in metrics.values()} == {jnp.dtype("float32")}


@pytest.mark.full
def test_float16_trains_with_loss_scale(folder: Path) -> None:
    """The first scale is too large for float16: it is halved until the gradients are finite."""
    loss_scale = LossScaleConfig(2.0**24, growth_interval=3)
    experiment = make_experiment(folder, num_layers=1, dropout=0.0, loss_scale=loss_scale)
    model = dataclasses.replace(experiment.model, precision=Precision.parse("float16"))
    engine = on_one_device(dataclasses.replace(experiment, model=model))
    state, rows = engine.init(), engine.put_batch(random_rows(8, VOCAB))
    curve = []
    for _ in range(40):
        state, metrics = engine.step(state, rows)
        curve.append((float(metrics["loss"]), bool(np.isfinite(metrics["grad_norm"]))))
    assert not curve[0][1]
    assert 20 <= sum(finite for _, finite in curve) < 40
    assert curve[-1][0] < curve[0][0] - 0.5
    chex.assert_tree_all_finite(state.params)
    assert isinstance(state.loss_scale, LossScale)
    assert 1 < float(state.loss_scale.scale) < 2.0**24


def check_rows(experiment: Experiment) -> None:
    field, rows = experiment.row_multiple
    mesh = make_engine(experiment, Hardware(count=8)).mesh
    check_batch_divides(mesh, field, rows, experiment.grad_accum_steps)


def test_indivisible_batches_and_meshes_are_errors(folder: Path) -> None:
    changes: dict[str, Any]
    for changes, message in (
        ({"batch_size": 12}, "batch_size 12: does not divide among 8"),
        ({"grad_accum_steps": 2}, "batch_size 8: does not divide among 16"),
        ({"mesh": MeshConfig(data=3)}, "mesh data 3 x fsdp 1 x tensor 1: does not divide 8"),
    ):
        experiment = make_experiment(folder, **changes)
        with pytest.raises(UsageError, match=message):
            check_rows(experiment)
    with pytest.raises(UsageError, match="compile pmap: replicates the whole model"):
        make_experiment(folder, compile="pmap", mesh=MeshConfig(data=4, fsdp=2))


@pytest.mark.full
def test_seed_changes_initial_state(folder: Path, start: TrainState) -> None:
    other = on_one_device(make_experiment(folder, seed=1)).init()
    assert not np.array_equal(start.params["embedding"], other.params["embedding"])
    assert not np.array_equal(jax.random.key_data(start.key), jax.random.key_data(other.key))
