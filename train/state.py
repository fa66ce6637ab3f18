"""All that a training run is at one step: what a checkpoint holds."""

from typing import Any

import jax
from flax import struct

from train.optim.loss_scale import LossScale
from train.recovery.detector import AnomalyDetector


class TrainState(struct.PyTreeNode):
    """Arrays only: settings come from the experiment, never from a checkpoint."""

    step: jax.Array  # int32, updates made
    cursor: jax.Array  # int32, batches taken from the data: the step, until data are skipped
    params: Any
    optimizer: Any
    key: jax.Array  # typed random key, the same for the whole run
    loss_scale: LossScale | None = None
    ema: Any = None  # moving average of the parameters, in float32
    anomaly_detector: AnomalyDetector | None = None
