"""Recurrences in NumPy, one token of one row at a time."""

import numpy as np

from tests.transformer.formulas import Array

Weights = dict[str, Array]


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def elman(x: Array, w: Weights, depth: int) -> Array:  # [T, D] -> [T, H]
    """h = tanh(W x + U h + b), then a tanh for each deeper layer."""
    h, states = np.zeros(w["recurrent"].shape[1]), []
    for token in x:
        h = np.tanh(token @ w["input"] + h @ w["recurrent"] + w["input_bias"])
        for layer in range(1, depth):
            h = np.tanh(h @ w[f"deeper_{layer}"] + w[f"deeper_{layer}_bias"])
        states.append(h)
    return np.array(states)


def lstm_step(
    h: Array,  # [H]
    c: Array,  # [H]
    gates: Array,  # [4, H] input, forget, candidate, output
) -> tuple[Array, Array]:
    c = sigmoid(gates[1]) * c + sigmoid(gates[0]) * np.tanh(gates[2])
    return sigmoid(gates[3]) * np.tanh(c), c


def lstm(
    x: Array,  # [T, D]
    w: Weights,
    h: Array | float = 0.0,  # [H]
    c: Array | float = 0.0,  # [H]
) -> Array:  # [T, H]
    states = []
    h, c = (each + np.zeros(len(w["recurrent"])) for each in (h, c))
    for token in x:
        from_x = np.einsum("D,DGH->GH", token, w["input"])
        from_h = np.einsum("S,SGH->GH", h, w["recurrent"])
        h, c = lstm_step(h, c, from_x + from_h + w["bias"])
        states.append(h)
    return np.array(states)
