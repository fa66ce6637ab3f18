import numpy as np
import pytest

from train.evaluation.metrics import accuracy


def test_by_hand() -> None:
    predicted = np.array([[1, 2, 3], [4, 5, 6]])
    targets = np.array([[1, 0, 3], [4, 0, 0]])
    weights = np.array([[1, 1, 0], [1, 0, 1]], np.float32)
    assert accuracy(predicted, targets, weights) == 2 / 4


def test_weights_need_not_be_one() -> None:
    weights = np.array([0.5, 1.5], np.float32)
    assert accuracy(np.array([1, 2]), np.array([0, 2]), weights) == 0.75


def test_what_cannot_be_told() -> None:
    nothing = np.zeros(3)
    with pytest.raises(ValueError, match="no answer has any weight"):
        accuracy(nothing, nothing, nothing)
    with pytest.raises(ValueError, match=r"shapes \(3,\), \(3,\) and \(2,\) differ"):
        accuracy(nothing, nothing, np.ones(2))
