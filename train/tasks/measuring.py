"""Means over an evaluation set."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

from train.dispatch import PROGRAMS_AHEAD
from train.experiment import EvaluationConfig
from train.sharding import row_parts
from train.tasks.task import EvaluationSet

if TYPE_CHECKING:
    from train.engine import Engine


def fitting(batch_size: int, mesh: Mesh) -> int:
    """The batch size, or a few rows more so that it divides among the devices."""
    shards = row_parts(mesh)
    return -(-batch_size // shards) * shards


def limit(settings: EvaluationConfig, whole: bool) -> int | None:
    """The most batches of an evaluation; None: those of the whole split."""
    return None if whole or not settings.batches else settings.batches


def fetched(array: jax.Array) -> np.ndarray:
    """An array whole, though each host may have but its part."""
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def means(engine: Engine, params: Any, batches: EvaluationSet) -> dict[str, float]:
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
        pending.append(engine.evaluate(params, engine.put(batches.host(cursor, host, hosts))))
        if len(pending) > PROGRAMS_AHEAD:
            add(pending.popleft())
    while pending:
        add(pending.popleft())
    return {name: float(total / weight) for name, (total, weight) in totals.items()}
