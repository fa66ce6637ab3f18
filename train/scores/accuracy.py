"""The share of right answers."""

from __future__ import annotations

import numpy as np


def accuracy(
    predicted: np.ndarray,  # [...]
    targets: np.ndarray,  # [...]
    weights: np.ndarray,  # [...], 0 where there is nothing to tell
) -> float:
    """The weighted share of answers that are right, in [0, 1].

    Raises:
      ValueError: The shapes differ, or nothing has any weight.
    """
    if not predicted.shape == targets.shape == weights.shape:
        raise ValueError(
            f"accuracy: shapes {predicted.shape}, {targets.shape} and {weights.shape} differ"
        )
    total = weights.sum(dtype=np.float64)
    if total == 0:
        raise ValueError("accuracy: no answer has any weight")
    return float(weights[predicted == targets].sum(dtype=np.float64) / total)
