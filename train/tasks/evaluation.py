"""Evaluation of a split: its batches, and the means of the losses over them."""

import collections
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from train.data.token_file import HostBatch
from train.parallel.sharding import gather_to_host
from train.runtime.stages import track
from train.step import Batch
from transformer.losses import Loss
from transformer.models.model import Model

MAX_BATCHES_IN_FLIGHT = 8
"""Batches whose results are not fetched yet."""


class EvaluationBatches(Protocol):
    """Batches of a held-out split."""

    def __len__(self) -> int: ...

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """Return the rows of batch `cursor` that belong to one host."""
        ...


@dataclasses.dataclass(frozen=True)
class EvaluationOptions:
    """Size and number of the batches of an evaluation."""

    batch_size: int
    """Rows of a batch, a multiple of `row_multiple`."""
    row_multiple: int = 1
    """Number of devices that the rows of a batch are divided among."""
    max_batches: int | None = None
    """Number of batches; None: the whole split."""
    stride: int = 0
    """Running text: tokens between the starts of two windows; 0: the length of a window."""
    compression_baselines: bool = False
    """Running text: a final evaluation reports the bits per byte of compressors too."""
    is_final: bool = True
    """False for an evaluation during training, which leaves out what takes long."""


@dataclasses.dataclass(frozen=True, eq=False)
class EvaluatedModel:
    """A model with weights on its devices, and the functions of its engine that evaluate them.

    An engine computes the losses; answers need none, and ask a `TrainedModel` alone.
    """

    model: Model
    params: Any
    put_batch: Callable[[HostBatch], Batch]
    """Place the rows of this host on the devices."""
    compute_losses: Callable[[Batch], dict[str, Loss]]
    """Compute the loss sums of a batch, by name, without dropout."""
    base_params: Any = None
    """Weights before LoRA, for a task that compares with them (`Task.needs_base_weights`)."""


def perplexity(loss: float) -> float:
    """Return exp(loss), limited to a finite float for a model that has diverged."""
    return math.exp(min(loss, 700.0))


def mean_losses(
    model: EvaluatedModel,
    batches: EvaluationBatches,
    compute_losses: Callable[[Batch], dict[str, Loss]] | None = None,
) -> dict[str, float]:
    """Return the means of the losses over a split, by name.

    `compute_losses` takes the place of the model's own loss function.
    """
    compute_losses = compute_losses or model.compute_losses
    host, num_hosts = jax.process_index(), jax.process_count()
    totals: dict[str, np.ndarray] = {}
    pending: collections.deque[dict[str, Any]] = collections.deque()

    def add_to_totals(sums: dict[str, Any]) -> None:
        # float64 on the host: float32 sums over a long split would lose the small terms.
        for name, each in jax.device_get(sums).items():
            totals[name] = totals.get(name, 0) + np.array(each, np.float64)

    for cursor in track(range(len(batches)), "evaluating"):
        batch = model.put_batch(batches.host_batch(cursor, host, num_hosts))
        pending.append(compute_losses(batch))
        # Fetch a few batches late: the devices never wait for the host, and the number of
        # results on the devices does not grow with the set.
        if len(pending) > MAX_BATCHES_IN_FLIGHT:
            add_to_totals(pending.popleft())
    while pending:
        add_to_totals(pending.popleft())
    return {name: float(total / weight) for name, (total, weight) in totals.items()}


def predict_rows(
    model: EvaluatedModel,
    batches: EvaluationBatches,
    predict: Callable[[Batch], jax.Array],
) -> dict[int, np.ndarray]:
    """Return what `predict` gives for each row of a split, by the row's index.

    It gets a batch on the devices, and returns an array whose first axis is the rows.
    """
    predictions: dict[int, np.ndarray] = {}
    for cursor in track(range(len(batches)), "predicting"):
        rows = batches.host_batch(cursor, 0, 1)
        host_rows = batches.host_batch(cursor, jax.process_index(), jax.process_count())
        best = gather_to_host(predict(model.put_batch(host_rows)))
        real = rows["weights"].any(axis=1)
        predictions.update(zip(rows["examples"][real].tolist(), best[real], strict=True))
    return predictions
