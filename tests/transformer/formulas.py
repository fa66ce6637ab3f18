"""Formulas in NumPy, one loop or line each, as references for the library."""

import functools
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import numpy as np

Array = np.ndarray[Any, Any]


MINUS_INFINITY = float(np.finfo(np.float32).min) / 2
"""Smaller values stand for minus infinity, as in the logits of vocabulary padding."""


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Assert max |difference| <= tolerance * max(1, max |expected|), and equal shapes.

    Values that stand for minus infinity must do so in both arrays, and are excluded: relative to
    them,
    any difference would be small.
    """
    message = difference(actual, expected, tolerance)
    assert not message, message


def assert_trees_close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Apply `assert_close` to each array of two trees of the same structure; errors name the
    path.
    """
    compare = functools.partial(difference, tolerance=tolerance)
    chex.assert_trees_all_equal_comparator(
        lambda *each: not compare(*each), compare, actual, expected
    )


def difference(actual: Any, expected: Any, tolerance: float) -> str:
    """Describe a difference beyond the tolerance of `assert_close`; empty if there is none."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        return f"{actual.shape} is not {expected.shape}"
    is_number = ~(expected < MINUS_INFINITY)
    if not np.array_equal(actual[~is_number], expected[~is_number]):
        return "different entries stand for minus infinity"
    actual, expected = actual[is_number], expected[is_number]
    largest = np.max(np.abs(actual - expected), initial=0)
    limit = tolerance * max(1.0, np.max(np.abs(expected), initial=0))
    # Not `>`, which is False for NaN.
    return "" if largest <= limit else f"differs by {largest:.3g}, more than {limit:.3g}"


def random_params_like(tree: Any, seed: int = 0) -> Any:
    """Return random weights in the shape of abstract parameters: biases are not zero, nothing is
    compiled.
    """
    random = np.random.default_rng(seed)
    draw = lambda leaf: random.normal(0.1, 0.3, leaf.shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, tree)


def array(values: Any) -> Any:
    """Return a NumPy array, typed as Any because the library's hints say jax.Array."""
    return np.array(values)


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def layer_norm(x: Array, gain: Array, bias: Array | float, epsilon: float) -> Array:
    """(x - mean) / sqrt(var + epsilon) gain + bias over the last axis."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * gain + bias


def rms_norm(x: Array, gain: Array, epsilon: float) -> Array:
    """x / sqrt(mean(x^2) + epsilon) gain over the last axis."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gain


erf = np.vectorize(math.erf)
ACTIVATIONS = {
    "relu": lambda x: np.where(x > 0, x, 0),
    "gelu": lambda x: x * (1 + erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "squared_relu": lambda x: np.where(x > 0, x * x, 0),
}


def swish(x: Array, beta: Array | float) -> Array:
    """x sigmoid(beta x)."""
    return np.asarray(x / (1 + np.exp(-beta * x)))


def rotate_pair(pair: Array, angle: float) -> Array:
    """Rotate (a, b) by an angle: (a cos - b sin, a sin + b cos)."""
    cos, sin = math.cos(angle), math.sin(angle)
    return np.array([[cos, -sin], [sin, cos]]) @ pair


def softmax(scores: Array) -> Array:
    exp_scores = np.exp(scores - scores.max())
    return exp_scores / exp_scores.sum()


def attention(
    x: Array,  # [B, T, D]
    source: Array,  # [B, S, D]
    w: dict[str, Array],  # the parameters of the mixer
    visible: Array,  # [B, T, S] booleans
    scores: Callable[..., Array] = lambda q, k, b, n, t: k @ q / math.sqrt(len(q)),  # [S]
    value_terms: Callable[..., Array | float] = lambda b, t: 0.0,  # [S, value width], added to v
) -> tuple[Array, Array]:  # [B, T, D], weights [B, N, T, S]
    """Compute multi-head attention head by head and query by query; query head n reads key-value
    head n div G.
    """
    heads = w["query"].shape[1]
    group = heads // w["key"].shape[1]
    bias = lambda name, n: w[f"{name}_bias"][n] if f"{name}_bias" in w else 0  # noqa: E731
    y = np.zeros((*x.shape[:2], w["output"].shape[-1])) + w.get("output_bias", 0)
    weights = np.zeros((len(x), heads, x.shape[1], source.shape[1]))
    for b, n, t in np.ndindex(len(x), heads, x.shape[1]):
        q = x[b, t] @ w["query"][:, n] + bias("query", n)
        k = source[b] @ w["key"][:, n // group] + bias("key", n // group)
        v = source[b] @ w["value"][:, n // group] + bias("value", n // group)
        keys = np.flatnonzero(visible[b, t])
        if len(keys):
            weights[b, n, t, keys] = softmax(scores(q, k, b, n, t)[keys])
        y[b, t] += weights[b, n, t] @ (v + value_terms(b, t)) @ w["output"][n]
    return y, weights


def feed_forward(x: Array, w: dict[str, Array], activation: str, beta: float = 1.0) -> Array:
    """Compute activation(x up) down, or (activation(x gate) * x up) down if there is a gate."""
    bias = lambda name: w.get(f"{name}_bias", np.zeros(()))  # noqa: E731
    act = ACTIVATIONS.get(activation, lambda x: swish(x, w.get("beta", beta)))
    hidden = x @ w["up"] + bias("up")
    hidden = act(x @ w["gate"] + bias("gate")) * hidden if "gate" in w else act(hidden)
    return np.asarray(hidden @ w["down"] + bias("down"))
