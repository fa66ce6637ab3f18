import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train.support import assert_close, assert_same_bits, state_of
from tests.train.support import light_compiler as light_compiler
from train.detector import AnomalyDetector, RecoveryConfig
from train.optim.elementwise import Adam, AdamW, Lion
from train.optim.optimizer import Optimizer, apply_if_accepted
from train.optim.optimizer_registry import make_step_optimizer
from train.state import LossScale, LossScaleConfig, TrainState
from train.step import Batch, TrainStep, example_rngs, weighted_mean
from transformer.layers.basic import dropout
from transformer.layers.logical_axes import LogicalAxes
from transformer.losses import Loss

WIDTH, LENGTH, BATCH = 5, 3, 12


def squares(params: Any, batch: Batch, keys: jax.Array | None) -> dict[str, Loss]:
    """Return weighted squared errors of a linear model of `inputs` [B, T, D] with dropout."""
    x = dropout(batch["inputs"], 0.3, keys)
    error = (x @ params["w"]) - batch["targets"]
    weights = batch["weights"]
    entries = Loss(jnp.sum(jnp.abs(error)), jnp.float32(error.size))
    return {"loss": Loss(jnp.sum(weights * error**2), jnp.sum(weights)), "error": entries}


def without_dropout(params: Any, batch: Batch, keys: jax.Array | None) -> dict[str, Loss]:
    return squares(params, batch, None)


def make_batch(seed: int = 0) -> Batch:
    """Return a batch with uneven weights: some examples have nearly none, some none at all."""
    drawn = np.random.RandomState(seed)
    weights = drawn.rand(BATCH, LENGTH) * np.arange(BATCH)[:, None] % 5
    return {
        "inputs": jnp.asarray(drawn.randn(BATCH, LENGTH, WIDTH), jnp.float32),
        "targets": jnp.asarray(drawn.randn(BATCH, LENGTH), jnp.float32),
        "weights": jnp.asarray(weights, jnp.float32),
        "examples": jnp.arange(BATCH, dtype=jnp.uint32) + 1000,
    }


STEP = TrainStep(
    loss_fn=squares,
    optimizer=apply_if_accepted(optax.identity()),
    schedule=lambda n: 0.1 / n.astype(jnp.float32),
    max_grad_norm=0.0,
)


def make_state(optimizer: Any = STEP.optimizer, scale: LossScale | None = None) -> TrainState:
    params = {"w": jnp.asarray(np.random.RandomState(1).randn(WIDTH), jnp.float32)}
    return state_of(params, optimizer, scale=scale)


def test_one_step_matches_hand_computation() -> None:
    state, batch = make_state(), make_batch()
    after, metrics = jax.jit(dataclasses.replace(STEP, loss_fn=without_dropout))(state, batch)
    x, y, weights = (np.asarray(batch[n], np.float64) for n in ("inputs", "targets", "weights"))
    w = np.asarray(state.params["w"], np.float64)
    error = x @ w - y
    grad = 2 * np.einsum("btd,bt->d", x, weights * error) / weights.sum()
    loss = (weights * error**2).sum() / weights.sum()
    np.testing.assert_allclose(after.params["w"], w - 0.1 * grad, rtol=1e-5)
    assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-6)
    assert float(metrics["error"]) == pytest.approx(np.abs(error).mean(), rel=1e-6)
    assert float(metrics["grad_norm"]) == pytest.approx(np.linalg.norm(grad), rel=1e-6)
    assert float(metrics["learning_rate"]) == pytest.approx(0.1)
    assert float(metrics["param_norm"]) == pytest.approx(np.linalg.norm(w), rel=1e-6)
    names = {"loss", "error", "grad_norm", "param_norm", "learning_rate", "skipped"}
    assert set(metrics) == names
    assert float(metrics["skipped"]) == 0
    assert (int(after.step), int(after.cursor)) == (1, 1)
    assert_same_bits(after.key, state.key)


def with_a_penalty(params: Any, batch: Batch, keys: jax.Array | None) -> dict[str, Loss]:
    """Add the model's own loss: half the square of its weights."""
    sums = without_dropout(params, batch, keys)
    weight = sums["loss"].weight
    return {**sums, "loss/penalty": Loss(0.5 * jnp.sum(params["w"] ** 2) * weight, weight)}


@pytest.mark.parametrize("grad_accum_steps", [1, 3])
def test_auxiliary_losses_are_added(grad_accum_steps: int) -> None:
    """Whatever the target weights, the gradient includes the penalty's gradient, w."""
    state, batch = make_state(), make_batch()
    plain = dataclasses.replace(STEP, loss_fn=without_dropout, grad_accum_steps=grad_accum_steps)
    penalised = dataclasses.replace(plain, loss_fn=with_a_penalty)
    without, expected = jax.jit(plain)(state, batch)
    result, metrics = jax.jit(penalised)(state, batch)
    w = np.asarray(state.params["w"])
    np.testing.assert_allclose(result.params["w"], without.params["w"] - 0.1 * w, rtol=1e-5)
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]))
    assert float(metrics["loss/penalty"]) == pytest.approx(0.5 * np.sum(w**2))


def test_first_update_has_number_one() -> None:
    step, state = jax.jit(STEP), make_state()
    for n in (1, 2, 3):
        state, metrics = step(state, make_batch(n))
        assert float(metrics["learning_rate"]) == pytest.approx(0.1 / n)
    assert int(state.step) == 3


@pytest.mark.parametrize("grad_accum_steps", [3, 12])
def test_accumulation_equals_full_batch(grad_accum_steps: int) -> None:
    """With dropout, and with a different sum of weights in each microbatch."""
    optimizer = make_step_optimizer(AdamW(), {"w": LogicalAxes(inputs=("embed",), outputs=())})
    full = dataclasses.replace(STEP, optimizer=optimizer, max_grad_norm=0.5)
    cut = dataclasses.replace(full, grad_accum_steps=grad_accum_steps)
    expected = result = make_state(optimizer)
    steps = jax.jit(full), jax.jit(cut)
    for n in range(4):
        expected, expected_metrics = steps[0](expected, make_batch(n))
        result, metrics = steps[1](result, make_batch(n))
        assert_close(metrics, expected_metrics, 1e-6)
        assert_close(result.params, expected.params, 1e-6)


def test_dropout_depends_on_run_step_and_example() -> None:
    """Dropout does not depend on how a batch is split, and differs at every step."""
    state = make_state()
    numbers = jnp.arange(6, dtype=jnp.uint32)
    keys = example_rngs(state, {"examples": numbers})
    part = example_rngs(state, {"examples": numbers[2:4]})
    assert_same_bits(part, keys[2:4])
    later = example_rngs(state.replace(step=jnp.int32(1)), {"examples": numbers})
    data = np.concatenate([jax.random.key_data(each) for each in (keys, later)])
    assert len(np.unique(data, axis=0)) == 12
    again = example_rngs(state.replace(cursor=jnp.int32(9)), {"examples": numbers})
    assert_same_bits(again, keys)


def test_gradient_clipping() -> None:
    state, batch = make_state(), make_batch()
    step = dataclasses.replace(STEP, schedule=lambda n: jnp.float32(1))
    free, metrics = jax.jit(step)(state, batch)
    norm = float(metrics["grad_norm"])
    moved = {}
    for clip in (norm / 4, norm * 2):
        after, metrics = jax.jit(dataclasses.replace(step, max_grad_norm=clip))(state, batch)
        assert float(metrics["grad_norm"]) == pytest.approx(norm)  # before clipping
        moved[clip] = np.asarray(after.params["w"] - state.params["w"])
    full = np.asarray(free.params["w"] - state.params["w"])
    np.testing.assert_allclose(moved[norm / 4], full / 4, rtol=1e-5)
    np.testing.assert_array_equal(moved[norm * 2], full)


def test_batch_without_weight_changes_nothing() -> None:
    state, batch = make_state(), make_batch()
    batch["weights"] = jnp.zeros_like(batch["weights"])
    after, metrics = jax.jit(dataclasses.replace(STEP, max_grad_norm=1.0))(state, batch)
    assert_same_bits(after.params, state.params)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0


def test_weighted_mean() -> None:
    assert float(weighted_mean(Loss(jnp.float32(6), jnp.float32(4)))) == 1.5
    assert float(weighted_mean(Loss(jnp.float32(0), jnp.float32(0)))) == 0


def halved(params: Any, batch: Batch, keys: jax.Array | None) -> dict[str, Loss]:
    """Return a loss whose gradient passes through float16, which ends at 65,504."""
    y = (params["w"].astype(jnp.float16) * jnp.float16(1)).astype(jnp.float32)
    return {"loss": Loss(jnp.sum(200 * y[:1]), jnp.float32(1))}


def test_ema_follows_the_weights() -> None:
    """The decay is 1/10, 2/11, 3/12, ... until it exceeds the configured one."""
    step = jax.jit(dataclasses.replace(STEP, ema_decay=0.2))
    state = make_state()
    state = state.replace(ema=jax.tree.map(jnp.copy, state.params))
    expected = np.asarray(state.params["w"], np.float64)
    for n, decay in enumerate([0.1, 2 / 11, 0.2, 0.2]):
        state, _ = step(state, make_batch(n))
        assert state.ema is not None
        expected = decay * expected + (1 - decay) * np.asarray(state.params["w"], np.float64)
        np.testing.assert_allclose(state.ema["w"], expected, rtol=1e-6)


def test_overflow_skips_update_and_halves_scale() -> None:
    """The gradient is 200 times the scale: it is too large until the scale is 2^8."""
    scale = LossScaleConfig(init_scale=2.0**10, growth_interval=2)
    optimizer = apply_if_accepted(optax.scale_by_adam())
    step = jax.jit(
        dataclasses.replace(
            STEP, loss_fn=halved, optimizer=optimizer, loss_scale=scale, max_grad_norm=1.0
        )
    )
    batch = {"weights": jnp.zeros((1, 1)), "examples": jnp.zeros(1, jnp.uint32)}
    state = make_state(optimizer, LossScale.create(scale))
    start = jax.tree.map(jnp.copy, (state.params, state.optimizer))
    for n, expected in enumerate([2.0**9, 2.0**8], start=1):
        state, metrics = step(state, batch)
        assert not np.isfinite(metrics["grad_norm"])
        assert_same_bits((state.params, state.optimizer), start)
        assert (int(state.step), int(state.cursor)) == (n, n)
        assert state.loss_scale is not None
        assert float(state.loss_scale.scale) == expected
    state, metrics = step(state, batch)
    assert float(metrics["grad_norm"]) == 200  # the same as without a loss scale
    assert float(state.params["w"][0]) < float(start[0]["w"][0])
    assert state.loss_scale is not None
    assert (float(state.loss_scale.scale), int(state.loss_scale.good_steps)) == (2.0**8, 1)
    state, _ = step(state, batch)
    assert state.loss_scale is not None
    assert (float(state.loss_scale.scale), int(state.loss_scale.good_steps)) == (2.0**9, 0)


@pytest.mark.parametrize("num_updates", [0, 1])
@pytest.mark.parametrize("optimizer", [Adam(l2=0.1), AdamW(), Lion()], ids=lambda each: each.kind)
def test_non_finite_update_is_skipped(optimizer: Optimizer, num_updates: int) -> None:
    """In float32 too: weights, moments and EMA are unchanged; step and cursor advance."""
    rule = make_step_optimizer(optimizer, {"w": LogicalAxes(inputs=("embed",), outputs=())})
    step = jax.jit(dataclasses.replace(STEP, optimizer=rule, ema_decay=0.5, max_grad_norm=1.0))
    # Every number plus 0 is itself, but for -0.
    state = make_state(rule).replace(params={"w": -jnp.zeros(WIDTH)}, ema={"w": -jnp.zeros(WIDTH)})
    for n in range(num_updates):
        state, _ = step(state, make_batch(n))
    bad = make_batch(1)
    bad["targets"] = bad["targets"].at[0, 0].set(jnp.nan)
    bad["weights"] = bad["weights"].at[0, 0].set(1.0)
    after, metrics = step(state, bad)
    assert float(metrics["skipped"]) == 1
    assert_same_bits(
        (after.params, after.optimizer, after.ema), (state.params, state.optimizer, state.ema)
    )
    assert int(after.step) == int(after.cursor) == num_updates + 1
    assert np.isfinite(step(after, make_batch(2))[1]["loss"])


def test_adamw_updates_its_moments_in_place() -> None:
    """No temporary is a copy of the moments, the weights or the EMA."""
    params = {"w": jnp.zeros((32, 2048))}
    rule = make_step_optimizer(AdamW(), {"w": LogicalAxes(inputs=("embed",), outputs=("mlp",))})
    state = state_of(params, rule).replace(
        ema=params, anomaly_detector=AnomalyDetector.create(RECOVERY)
    )

    def loss_fn(params: Any, batch: Batch, keys: jax.Array | None) -> dict[str, Loss]:
        return {"loss": Loss(jnp.sum(jnp.tanh(batch["x"] @ params["w"])), jnp.float32(1))}

    step = TrainStep(loss_fn, rule, STEP.schedule, ema_decay=0.5, recovery=RECOVERY)
    batch = make_batch() | {"x": jnp.ones((BATCH, 32))}
    compiled = jax.jit(lambda *args: step(*args), donate_argnums=0).lower(state, batch).compile()
    analysis: Any = compiled.memory_analysis()
    # The gradient, and what else differs by version; copies of both moments would be two more.
    assert analysis.temp_size_in_bytes < 2.5 * params["w"].nbytes


RECOVERY = RecoveryConfig(window=8, warmup=4)

recovering = jax.jit(dataclasses.replace(STEP, recovery=RECOVERY))


def test_anomalous_update_is_skipped() -> None:
    state = make_state().replace(anomaly_detector=AnomalyDetector.create(RECOVERY))
    for n in range(6):
        state, metrics = recovering(state, make_batch(n))
        assert float(metrics["skipped"]) == 0
    bad = make_batch(6)
    bad["targets"] *= 1000
    after, metrics = recovering(state, bad)
    assert float(metrics["consecutive_anomalies"]) == float(metrics["skipped"]) == 1
    assert float(metrics["loss"]) > float(metrics["loss_limit"])
    assert float(metrics["grad_norm"]) > float(metrics["grad_norm_limit"])
    assert_same_bits(after.params, state.params)
    after, metrics = recovering(after, make_batch(7))
    assert float(metrics["skipped"]) == int(after.anomaly_detector.consecutive_anomalies) == 0


def test_rollback_factor_lowers_learning_rate() -> None:
    start = make_state().replace(anomaly_detector=AnomalyDetector.create(RECOVERY))
    full, metrics = recovering(start, make_batch())
    assert start.anomaly_detector is not None
    lowered = start.replace(
        anomaly_detector=start.anomaly_detector.replace(lr_factor=jnp.float32(0.5))
    )
    half, halved_metrics = recovering(lowered, make_batch())
    assert float(halved_metrics["learning_rate"]) == float(metrics["learning_rate"]) / 2
    moved = (np.asarray(each.params["w"] - start.params["w"]) for each in (half, full))
    np.testing.assert_allclose(next(moved), next(moved) / 2, rtol=1e-4)


def test_loss_scale_does_not_change_results() -> None:
    scale = LossScale.create(LossScaleConfig(init_scale=2.0**12))
    plain, _ = jax.jit(STEP)(make_state(), make_batch())
    scaled, _ = jax.jit(STEP)(make_state(scale=scale), make_batch())
    assert_close(scaled.params, plain.params, 1e-6)
