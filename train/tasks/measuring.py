"""Means over an evaluation set."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh

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
    """The means of the task's losses over a set, by name.

    Sums are taken on the host in float64; fetching a batch late lets the next one start.
    """
    host, hosts = jax.process_index(), jax.process_count()
    pending = [
        engine.evaluate(params, engine.put(batches.host(cursor, host, hosts)))
        for cursor in range(len(batches))
    ]
    found = jax.device_get(pending)
    totals = {
        name: np.array([each[name] for each in found], np.float64).sum(axis=0) for name in found[0]
    }
    return {name: float(total / weight) for name, (total, weight) in totals.items()}
