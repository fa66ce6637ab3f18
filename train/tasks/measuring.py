"""Means over an evaluation set."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.dispatch import MAX_PROGRAMS_IN_FLIGHT
from train.experiment import EvaluationConfig
from train.sharding import num_batch_shards
from train.tasks.task import EvaluationBatches

if TYPE_CHECKING:
    from train.engine import Engine


def round_up_batch_size(batch_size: int, mesh: Mesh) -> int:
    """The batch size, or a few rows more so that it divides among the devices."""
    shards = num_batch_shards(mesh)
    return -(-batch_size // shards) * shards


def max_eval_batches(settings: EvaluationConfig, full_split: bool) -> int | None:
    """The most batches of an evaluation; None: those of the whole split."""
    return None if full_split or not settings.num_batches else settings.num_batches


def gather_to_host(array: jax.Array) -> np.ndarray:
    """An array whole, though each host may have but its part."""
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def mean_losses(engine: Engine, params: Any, batches: EvaluationBatches) -> dict[str, float]:
    """Return the means of the task's losses over a set, by name.

    Sums are taken on the host in float64. Results are fetched a few batches late, so that the
    devices never wait for the host, and what is not fetched yet does not grow with the set.
    """
    host, hosts = jax.process_index(), jax.process_count()
    totals: dict[str, np.ndarray] = {}
    pending: collections.deque[dict[str, Any]] = collections.deque()

    def add(sums: dict[str, Any]) -> None:
        for name, each in jax.device_get(sums).items():
            totals[name] = totals.get(name, 0) + np.array(each, np.float64)

    for cursor in range(len(batches)):
        pending.append(
            engine.evaluate(params, engine.put_batch(batches.host_batch(cursor, host, hosts)))
        )
        if len(pending) > MAX_PROGRAMS_IN_FLIGHT:
            add(pending.popleft())
    while pending:
        add(pending.popleft())
    return {name: float(total / weight) for name, (total, weight) in totals.items()}
