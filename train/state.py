"""The training state: everything that a checkpoint holds of a run."""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from train.detector import AnomalyDetector, RecoveryConfig
from train.errors import UsageError
from train.settings import Settings
from transformer.lora import LoRALayout
from transformer.models.model import Model
from transformer.validation import Bounds, Fraction, Mark, PositiveInt


@dataclasses.dataclass(frozen=True)
class LossScaleConfig(Settings, part="loss_scale"):
    """Dynamic loss scaling. Active only if the precision policy computes in float16."""

    init_scale: Annotated[float, Bounds(1)] = 2.0**15
    """Factor of the loss in the first step."""
    growth_interval: Annotated[PositiveInt, Mark.RESUMABLE] = 2000
    """Consecutive steps without overflow after which the scale doubles."""
    max_scale: Annotated[float, Mark.RESUMABLE] = 2.0**24
    """Upper limit of the scale."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.init_scale > self.max_scale:
            raise UsageError(
                f"loss_scale.init_scale {self.init_scale}: give at most loss_scale.max_scale "
                f"{self.max_scale}"
            )


@dataclasses.dataclass(frozen=True)
class EmaConfig(Settings, part="ema"):
    """Exponential moving average (EMA) of the weights, used for evaluation."""

    decay: Annotated[Fraction, Mark.RESUMABLE, Mark.SWITCHES_STATE] = 0.0
    """Factor of the old average in each update, close to 1. 0: keep no average."""


class LossScale(struct.PyTreeNode):
    """Dynamic loss scale of float16 (Micikevicius et al. 2018, section 3.2).

    Gradients below 6e-8 are 0 in float16. Multiplying the loss by a large factor keeps them
    representable; the step divides the gradients by it again, in float32.
    """

    scale: jax.Array  # float32
    good_steps: jax.Array  # int32, consecutive steps with finite gradients

    @staticmethod
    def create(config: LossScaleConfig) -> "LossScale":
        """Return the scale before the first step."""
        return LossScale(jnp.float32(config.init_scale), jnp.int32(0))

    def update(self, finite: jax.Array, config: LossScaleConfig) -> "LossScale":
        """Return the scale after a step.

        It halves, to at least 1, if a gradient was not finite. It doubles after `growth_interval`
        consecutive steps with finite gradients.
        """
        good = jnp.where(finite, self.good_steps + 1, 0)
        grow = good >= config.growth_interval
        grown = jnp.where(grow, jnp.minimum(self.scale * 2, config.max_scale), self.scale)
        scale = jnp.where(finite, grown, jnp.maximum(self.scale / 2, 1.0))
        return LossScale(scale, jnp.where(grow, 0, good))


class TrainState(struct.PyTreeNode):
    """State of a run after some step. Arrays only: settings come from the experiment.

    Field names are part of the checkpoint format.
    """

    step: jax.Array  # int32, updates made, rejected ones included
    cursor: jax.Array  # int32, next batch; equals `step` until a rollback skips batches
    params: Any
    optimizer: Any  # state of the optax transformation
    key: jax.Array  # typed random key of dropout, constant over the run
    loss_scale: LossScale | None = None  # with float16 only
    ema: Any = None  # moving average of the parameters, float32
    anomaly_detector: AnomalyDetector | None = None


def update_ema(
    ema: Any,
    params: Any,
    num_updates: jax.Array,
    decay: float,
    accept_update: jax.Array,
) -> Any:
    """Return the exponential moving average of the parameters after one more update.

    It stays as it is if the update was not accepted. The decay rises through 1/10, 2/11, 3/12, ...
    to `decay`, as in TensorFlow's ExponentialMovingAverage, so that the random initial weights soon
    lose their share.
    """
    # EMA and new share are float32: with a decay of 0.9999, the share of one update is below the
    # resolution of bfloat16, and the average would stand still.
    n = num_updates.astype(jnp.float32)
    new_share = 1 - jnp.minimum(decay, (1 + n) / (10 + n))

    def average(e: jax.Array, p: jax.Array) -> jax.Array:
        return e + jnp.where(accept_update, new_share * (p.astype(e.dtype) - e), -0.0)

    return jax.tree.map(average, ema, params)


def initial_keys(seed: int) -> tuple[jax.Array, jax.Array]:
    """Return the random keys of the initial parameters and of dropout."""
    params_key, dropout_key = jax.random.split(jax.random.key(seed))
    return params_key, dropout_key


def init_state(
    seed: int,
    model: Model,
    optimizer: optax.GradientTransformation,
    params: Any = None,
    *,
    loss_scale: LossScaleConfig,
    ema: EmaConfig,
    recovery: RecoveryConfig,
    lora: LoRALayout | None = None,
) -> TrainState:
    """Return the state at step 0. It depends only on the arguments.

    With LoRA the parameters are the trainable tree. Under `jit` the others are never computed.

    Args:
      seed: Seed of the initial weights and of dropout.
      model: The model.
      optimizer: The optimizer.
      params: Parameters of the model to begin with. None: random ones.
      loss_scale: Settings of loss scaling, if the model computes in float16.
      ema: Settings of the moving average of the weights.
      recovery: Settings of the anomaly detector.
      lora: Layout of the trainable weights of a LoRA run.
    """
    params_key, dropout_key = initial_keys(seed)
    if params is None:
        params = model.init_params(params_key)
    if lora is not None:
        params = lora.init(jax.random.fold_in(params_key, 1), params)
    # Moments and EMA are float32 even if the parameters are stored in 16 bits.
    params_float32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    needs_loss_scale = model.config.precision.needs_loss_scale
    return TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        params=params,
        optimizer=optimizer.init(params_float32),
        key=dropout_key,
        loss_scale=LossScale.create(loss_scale) if needs_loss_scale else None,
        ema=params_float32 if ema.decay else None,
        anomaly_detector=AnomalyDetector.create(recovery),
    )
