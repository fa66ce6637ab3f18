"""The training state: everything that a checkpoint holds of a run."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from train.experiment import Experiment
from train.optim.loss_scale import LossScale
from train.recovery.detector import AnomalyDetector
from transformer.models.base import Model


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


def init_state(
    experiment: Experiment, model: Model, optimizer: optax.GradientTransformation
) -> TrainState:
    """Return the state at step 0. It depends on the settings and the seed alone."""
    params_key, dropout_key = jax.random.split(jax.random.key(experiment.seed))
    params = model.init_params(params_key)
    # Moments and EMA are float32 even if the parameters are stored in 16 bits.
    params_float32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    needs_loss_scale = experiment.model.precision.needs_loss_scale
    return TrainState(
        step=jnp.int32(0),
        cursor=jnp.int32(0),
        params=params,
        optimizer=optimizer.init(params_float32),
        key=dropout_key,
        loss_scale=LossScale.create(experiment.loss_scale) if needs_loss_scale else None,
        ema=params_float32 if experiment.ema.decay else None,
        anomaly_detector=AnomalyDetector.create(experiment.recovery),
    )
