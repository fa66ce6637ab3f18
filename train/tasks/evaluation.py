"""Means of a task's losses over an evaluation set."""

import collections
import math
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.experiment import EvaluationConfig
from train.parallel.sharding import num_shards
from train.runtime.dispatch_limit import MAX_PROGRAMS_IN_FLIGHT
from train.tasks.base import EvaluationBatches

if TYPE_CHECKING:
    from train.engine import Engine


def round_up_batch_size(batch_size: int, mesh: Mesh) -> int:
    """Return the batch size, rounded up to a multiple of the mesh's batch shards."""
    shards = num_shards(mesh, "batch")
    return -(-batch_size // shards) * shards


def max_eval_batches(config: EvaluationConfig, full_split: bool) -> int | None:
    """Return the maximum number of batches of an evaluation; None: the whole split."""
    return None if full_split or not config.num_batches else config.num_batches


def perplexity(loss: float) -> float:
    """Return exp(loss), limited to a finite float for a model that has diverged."""
    return math.exp(min(loss, 700.0))


def gather_to_host(array: jax.Array) -> np.ndarray:
    """Return the whole array, even if this process addresses only some of its shards."""
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def mean_losses(engine: "Engine", params: Any, batches: EvaluationBatches) -> dict[str, float]:
    """Return the means of the task's losses over a set, by name."""
    host, num_hosts = jax.process_index(), jax.process_count()
    totals: dict[str, np.ndarray] = {}
    pending: collections.deque[dict[str, Any]] = collections.deque()

    def add_to_totals(sums: dict[str, Any]) -> None:
        # float64 on the host: float32 sums over a long split would lose the small terms.
        for name, each in jax.device_get(sums).items():
            totals[name] = totals.get(name, 0) + np.array(each, np.float64)

    for cursor in range(len(batches)):
        batch = engine.put_batch(batches.host_batch(cursor, host, num_hosts))
        pending.append(engine.evaluate(params, batch))
        # Fetch a few batches late: the devices never wait for the host, and the number of
        # results on the devices does not grow with the set.
        if len(pending) > MAX_PROGRAMS_IN_FLIGHT:
            add_to_totals(pending.popleft())
    while pending:
        add_to_totals(pending.popleft())
    return {name: float(total / weight) for name, (total, weight) in totals.items()}
