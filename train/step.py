"""One training step: a pure function (state, batch) -> (state, metrics).

The step in order, `TrainStep.__call__`:

1. gradients of the scaled loss, summed over microbatches and, under `pmap`, over devices;
2. one division by the total weight of the targets, so that every way to split a batch agrees;
3. the anomaly detector's verdict on the loss and the global norms;
4. gradient clipping, optimizer, learning rate, EMA: applied only if the verdict accepts the update;
5. the loss scale (float16) and the counters.

Shapes: B examples of a batch, T tokens of a row, A microbatches.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.detector import MONITORED_METRICS, RecoveryConfig, detect_anomaly
from train.state import LossScaleConfig, TrainState, update_ema
from transformer.losses import AUX_LOSS_PREFIX, Loss

Batch = dict[str, jax.Array]
"""Arrays with leading axis B. `examples` [B] holds the number of each example in the run, `weights`
the loss weights of the targets."""

Metrics = dict[str, jax.Array]
"""Scalars of one step, on the devices."""

LossFn = Callable[[Any, Batch, jax.Array | None], dict[str, Loss]]
"""(params, batch, dropout_rngs [B]) -> sums with weights, by name. The step minimizes `loss` plus
the model's own losses, whose names begin with `AUX_LOSS_PREFIX`. `dropout_rngs` is None in
evaluation."""

MIN_WEIGHT = 1e-9
"""Lower limit of divisors, for batches in which no target has weight."""


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The training step with its static settings.

    Losses are sums with weights. They are divided once, after all microbatches and devices are
    summed: gradient accumulation, `jit` over any mesh, and `pmap` give the same result.
    """

    loss_fn: LossFn
    optimizer: optax.GradientTransformationExtraArgs
    """From `make_step_optimizer`: its update takes `accept_update`."""
    schedule: optax.Schedule
    """Number of the update, from 1 -> learning rate."""
    max_grad_norm: float = 1.0
    """Largest global norm of the gradients. 0: no clipping."""
    grad_accum_steps: int = 1
    """Microbatches of each batch."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    axis_name: str | None = None
    """Mapped axis over which `pmap` splits the batch. None under `jit`."""
    ema_decay: float = 0.0
    """Decay of the moving average, if the state has one."""
    recovery: RecoveryConfig = RecoveryConfig()

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """Return the state after one update, and the metrics of the step."""
        loss_scale = None if state.loss_scale is None else state.loss_scale.scale
        scale = jnp.float32(1) if loss_scale is None else loss_scale
        grads, losses = self.sum_gradients(state, batch, scale)
        # `compute_gradients` multiplied the loss by scale / size. Undo it here and divide by the
        # weight of the whole batch, which no microbatch and no device knows on its own.
        size = batch["weights"].size
        divisor = scale * jnp.maximum(losses["loss"].weight, MIN_WEIGHT) / size
        grads = jax.tree.map(lambda g: g / divisor, grads)
        grad_norm = optax.tree.norm(grads)
        metrics = {name: weighted_mean(loss) for name, loss in losses.items()}
        metrics.update(grad_norm=grad_norm, param_norm=global_norm(state.params))

        # The verdict is part of the compiled program: every step is checked, on all devices alike,
        # and the host does not have to wait for it. Loss and parameter norm are of the state
        # that the updates so far have led to, the gradient norm is of the update to come.
        monitored = jnp.stack([metrics[name] for name in MONITORED_METRICS])
        verdict = detect_anomaly(
            state.anomaly_detector, monitored, padded_length(batch), loss_scale, self.recovery
        )
        # The schedule counts rejected updates too: a run with spikes ends at the same step.
        learning_rate = scheduled_rate(self.schedule, state.step + 1)
        if state.anomaly_detector is not None:
            learning_rate = learning_rate * state.anomaly_detector.lr_factor
        # Clipped after the verdict: a clipped norm would hide what the detector looks for.
        grads = self.clip_gradients(grads, grad_norm)
        new_state = self.apply_update(state, grads, learning_rate, verdict.accept_update)
        if state.loss_scale is not None:
            # The verdict does not decide here: a finite spike is not a reason for a smaller scale.
            new_scale = state.loss_scale.update(jnp.isfinite(grad_norm), self.loss_scale)
            new_state = new_state.replace(loss_scale=new_scale)
        skipped = 1 - verdict.accept_update.astype(jnp.float32)
        metrics.update(learning_rate=learning_rate, skipped=skipped, **verdict.metrics)
        # Metrics stay on the devices. The loop reads them a step late, when they are known.
        return new_state.replace(anomaly_detector=verdict.detector), metrics

    def sum_gradients(
        self, state: TrainState, batch: Batch, loss_scale: jax.Array
    ) -> tuple[Any, dict[str, Loss]]:
        """Return gradients and losses of the whole batch, as `compute_gradients` does."""
        if self.grad_accum_steps == 1:
            sums = self.compute_gradients(state, batch, loss_scale)
        else:
            compute = functools.partial(self.compute_gradients, loss_scale=loss_scale)
            sums = accumulate_gradients(compute, state, batch, self.grad_accum_steps)
        # Under `jit` the batch is one logical array, and XLA adds the sums over devices itself.
        return sums if self.axis_name is None else jax.lax.psum(sums, self.axis_name)

    def compute_gradients(
        self, state: TrainState, batch: Batch, loss_scale: jax.Array
    ) -> tuple[Any, dict[str, Loss]]:
        """Return gradients and loss sums of one microbatch.

        Gradients are float32, of the loss times `loss_scale` / (number of target weights).
        """
        size = batch["weights"].size

        def objective(params: Any) -> tuple[jax.Array, dict[str, Loss]]:
            losses = self.loss_fn(params, batch, example_rngs(state, batch))
            # The loss is a sum: its cotangents grow with the batch and would overflow float16
            # (65,504). Divided by a size that is static, they are those of a mean.
            return total_loss(losses) * (loss_scale / size), losses

        grads, losses = jax.grad(objective, has_aux=True)(state.params)
        # Float32 before microbatches are added: 16-bit sums lose the small terms.
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), losses

    def clip_gradients(self, grads: Any, grad_norm: jax.Array) -> Any:
        """Scale gradients down to the largest global norm (Pascanu et al. 2013)."""
        if not self.max_grad_norm:
            return grads
        # An infinite or NaN norm gives NaN gradients here; that update is rejected anyway.
        factor = jnp.minimum(1.0, self.max_grad_norm / jnp.maximum(grad_norm, 1e-9))
        return jax.tree.map(lambda g: g * factor, grads)

    def apply_update(
        self, state: TrainState, grads: Any, learning_rate: jax.Array, accept_update: jax.Array
    ) -> TrainState:
        """Return the state after the update.

        A rejected update leaves parameters, optimizer state and EMA as they are. Step and cursor
        advance all the same: the batch is used up, and no later step sees it again.
        """
        directions, optimizer = self.optimizer.update(
            grads, state.optimizer, state.params, accept_update=accept_update
        )
        # The update is selected, not the sum: XLA would keep copies of the parameters and the EMA.
        # Every number plus -0.0 is that number, bit for bit.
        updates = jax.tree.map(
            lambda d: jnp.where(accept_update, -learning_rate * d, -0.0), directions
        )
        # Adds in float32 and rounds to the dtype of the parameters.
        params, ema = optax.apply_updates(state.params, updates), state.ema
        if ema is not None:
            ema = update_ema(ema, params, state.step, self.ema_decay, accept_update)
        step, cursor = state.step + 1, state.cursor + 1
        return state.replace(step=step, cursor=cursor, params=params, optimizer=optimizer, ema=ema)


def accumulate_gradients(
    compute_gradients: Callable[[TrainState, Batch], tuple[Any, dict[str, Loss]]],
    state: TrainState,
    batch: Batch,
    num_microbatches: int,  # A
) -> tuple[Any, dict[str, Loss]]:
    """Return the mean of the gradients of A microbatches, and the sums of their losses.

    Only one microbatch is in memory with its activations at a time.
    """
    # Microbatch j takes examples j, j + A, j + 2A, ...: with consecutive examples instead, a
    # microbatch would lie on few of the devices that share the batch.
    count = num_microbatches
    microbatches = jax.tree.map(
        lambda x: x.reshape(len(x) // count, count, *x.shape[1:]).swapaxes(0, 1), batch
    )  # [A, B / A, ...]
    # A scan needs the sum's shapes before its first iteration. `eval_shape` traces one
    # microbatch without computing it.
    first = jax.tree.map(lambda x: x[0], microbatches)
    shapes = jax.eval_shape(compute_gradients, state, first)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def add(total: Any, microbatch: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, compute_gradients(state, microbatch)), None

    (grads, losses), _ = jax.lax.scan(add, zeros, microbatches)
    # Each microbatch divided by its own size, which is 1 / A of the batch's.
    return jax.tree.map(lambda g: g / count, grads), losses


def example_rngs(state: TrainState, batch: Batch) -> jax.Array:  # [B]
    """Return a dropout key for each example, folded from (run key, step, example number).

    A key depends on the example, not on its place in the batch: dropout is the same however the
    batch is split over microbatches, devices and hosts.
    """
    step_key = jax.random.fold_in(state.key, state.step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step_key, batch["examples"])


def scheduled_rate(schedule: optax.Schedule, update: jax.Array) -> jax.Array:  # float32
    """Return the learning rate of an update. Rounding may take a decay to zero below zero."""
    return jnp.maximum(jnp.asarray(schedule(update), jnp.float32), 0.0)


def global_norm(params: Any) -> jax.Array:  # float32
    """Return the L2 norm of all parameters, computed in float32."""
    # In 16 bits a sum of squares stops growing once a term is below half a unit of its last place.
    return optax.tree.norm(jax.tree.map(lambda p: p.astype(jnp.float32), params))


def total_loss(losses: dict[str, Loss]) -> jax.Array:
    """Return the sum of the task's loss and the auxiliary losses (all have the same weight)."""
    auxiliary = (loss.total for name, loss in losses.items() if name.startswith(AUX_LOSS_PREFIX))
    return sum(auxiliary, start=losses["loss"].total)


def weighted_mean(loss: Loss) -> jax.Array:
    """Return the sum divided by its weight. 0 if nothing has weight."""
    return loss.total / jnp.maximum(loss.weight, MIN_WEIGHT)


def padded_length(batch: Batch) -> int:
    """Return T, the padded length of a row (in translation, of the target); 1 without tokens."""
    return batch["tokens"].shape[1] if "tokens" in batch else 1
