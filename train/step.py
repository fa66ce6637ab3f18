"""One training step: a pure function (state, batch) -> (state, metrics)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from train.experiment import LossScaleConfig
from train.optim.base import tree_where
from train.optim.schedules import Schedule
from train.recovery.config import RecoveryConfig
from train.recovery.detector import MONITORED_METRICS, detect_anomaly
from train.state import TrainState
from transformer.losses import Loss

Batch = dict[str, jax.Array]
"""Arrays with the batch in front; `examples` [B] are the examples' numbers in the run, `weights`
those of the targets."""


LossFn = Callable[[Any, Batch, jax.Array | None], dict[str, Loss]]
"""(params, batch, dropout_rngs [B]) -> sums by name. Minimised are `loss` and, where a model has
losses of its own, those whose names begin with `AUXILIARY`: they have the weight of `loss`. Without
random keys nothing is trained."""


AUX_LOSS_PREFIX = "loss/"


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The step as a value that can be called.

    Losses come as sums with weights and are divided once, after all microbatches and devices are
    in: so accumulation, `jit` over any mesh, and `pmap` agree.
    """

    loss_fn: LossFn
    optimizer: optax.GradientTransformationExtraArgs
    """`guarded`: its update is told whether it is to be made."""
    schedule: Schedule
    max_grad_norm: float = 1.0
    grad_accum_steps: int = 1
    """Microbatches that a batch is cut into."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    axis_name: str | None = None
    """The mapped axis over which `pmap` splits the batch."""
    ema_decay: float = 0.0
    recovery: RecoveryConfig = RecoveryConfig()

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        grads, sums = self.accumulate_gradients(state, batch, scale)
        if self.axis_name is not None:
            grads, sums = jax.lax.psum((grads, sums), self.axis_name)
        nominal = batch["weights"].size
        divisor = scale * jnp.maximum(sums["loss"].weight, 1e-9) / nominal
        grads = jax.tree.map(lambda g: g / divisor, grads)
        norm = optax.tree.norm(grads)
        metrics = {name: weighted_mean(each) for name, each in sums.items()}
        metrics.update(grad_norm=norm, param_norm=global_norm(state.params))
        known = None if state.loss_scale is None else state.loss_scale.scale
        seen = jnp.stack([metrics[name] for name in MONITORED_METRICS])
        verdict = detect_anomaly(
            state.anomaly_detector, seen, padded_length(batch), known, self.recovery
        )
        rate = self.schedule(state.step + 1)
        if state.anomaly_detector is not None:
            rate = rate * state.anomaly_detector.lr_factor
        new = self.apply_update(
            state, self.clip_gradients(grads, norm), rate, verdict.accept_update
        )
        if state.loss_scale is not None:
            scaled = state.loss_scale.update(jnp.isfinite(norm), self.loss_scale)
            new = new.replace(loss_scale=scaled)
        skipped = 1 - verdict.accept_update.astype(jnp.float32)
        metrics.update(learning_rate=rate, skipped=skipped, **verdict.metrics)
        return new.replace(anomaly_detector=verdict.detector), metrics

    def accumulate_gradients(
        self, state: TrainState, batch: Batch, loss_scale: jax.Array
    ) -> tuple[Any, dict[str, Loss]]:
        """Gradients and losses summed over the microbatches.

        Gradients are in float32, of the loss times scale / (number of weights): a size that
        float16 can hold.
        """
        if self.grad_accum_steps == 1:
            return self.compute_gradients(state, batch, loss_scale)
        # Microbatch j takes examples j, j + A, ...: a batch spread over devices stays spread.
        count = self.grad_accum_steps
        micro = jax.tree.map(
            lambda x: x.reshape(len(x) // count, count, *x.shape[1:]).swapaxes(0, 1), batch
        )
        shapes = jax.eval_shape(
            self.compute_gradients, state, jax.tree.map(lambda x: x[0], micro), loss_scale
        )
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        def add(total: Any, one: Batch) -> tuple[Any, None]:
            return jax.tree.map(
                jnp.add, total, self.compute_gradients(state, one, loss_scale)
            ), None

        (grads, sums), _ = jax.lax.scan(add, zeros, micro)
        return jax.tree.map(lambda g: g / count, grads), sums

    def compute_gradients(
        self, state: TrainState, batch: Batch, loss_scale: jax.Array
    ) -> tuple[Any, dict[str, Loss]]:
        nominal = batch["weights"].size

        def objective(params: Any) -> tuple[jax.Array, dict[str, Loss]]:
            sums = self.loss_fn(params, batch, example_rngs(state, batch))
            return total_loss(sums) * (loss_scale / nominal), sums

        grads, sums = jax.grad(objective, has_aux=True)(state.params)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), sums

    def clip_gradients(self, grads: Any, grad_norm: jax.Array) -> Any:
        """Scaled down to the largest global norm, if beyond it (Pascanu et al. 2013)."""
        if not self.max_grad_norm:
            return grads
        factor = jnp.minimum(1.0, self.max_grad_norm / jnp.maximum(grad_norm, 1e-9))
        return jax.tree.map(lambda g: g * factor, grads)

    def apply_update(
        self, state: TrainState, grads: Any, learning_rate: jax.Array, accept_update: jax.Array
    ) -> TrainState:
        """The state one update on; if not all is `accept_update`, with what it has learned as before."""
        directions, optimizer = self.optimizer.update(
            grads, state.optimizer, state.params, fine=accept_update
        )
        updates = jax.tree.map(lambda d: -learning_rate * d, directions)
        params = optax.apply_updates(state.params, updates)
        ema = state.ema
        if ema is not None:
            ema = tree_where(
                accept_update, update_ema(ema, params, state.step, self.ema_decay), ema
            )
        return state.replace(
            step=state.step + 1,
            cursor=state.cursor + 1,
            params=tree_where(accept_update, params, state.params),
            optimizer=optimizer,
            ema=ema,
        )


def example_rngs(state: TrainState, batch: Batch) -> jax.Array:  # [B]
    """A random key for each example, from (the run's key, the step, the example's number).

    So dropout does not depend on how a batch is cut.
    """
    step = jax.random.fold_in(state.key, state.step)
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(step, batch["examples"])


def update_ema(ema: Any, params: Any, num_updates: jax.Array, decay: float) -> Any:
    """An exponential moving average, one update on.

    It begins with a decay of 1/10, 2/11, 3/12, ... up to `decay`, as TensorFlow's
    ExponentialMovingAverage does, so that the first weights are soon forgotten.
    """
    n = num_updates.astype(jnp.float32)
    rest = 1 - jnp.minimum(decay, (1 + n) / (10 + n))
    return jax.tree.map(lambda e, p: e + rest * (p.astype(e.dtype) - e), ema, params)


def global_norm(params: Any) -> jax.Array:  # float32
    """Of all numbers taken together, in float32 whatever the parameters are in."""
    return optax.tree.norm(jax.tree.map(lambda p: p.astype(jnp.float32), params))


def total_loss(sums: dict[str, Loss]) -> jax.Array:
    """The task's loss with those of the model itself, as a sum of the weight of `loss`."""
    own = (each.total for name, each in sums.items() if name.startswith(AUX_LOSS_PREFIX))
    return sum(own, start=sums["loss"].total)


def weighted_mean(loss: Loss) -> jax.Array:
    """The sum over its weight; 0 where nothing has weight."""
    return loss.total / jnp.maximum(loss.weight, 1e-9)


def padded_length(batch: Batch) -> int:
    """Return T, the tokens of a row with its padding; 1 for rows that are no sequences.

    Of a translation it is the target's, whose tokens have the loss. Batches of like length are
    compared with each other when spikes are looked for.
    """
    return batch["tokens"].shape[1] if "tokens" in batch else 1
