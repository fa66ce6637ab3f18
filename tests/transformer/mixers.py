"""Build one mixer with random weights, call it compiled, and compare it with dense attention."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from tests.transformer.formulas import (
    Array,
    assert_close,
    assert_trees_close,
    random_params_like,
)
from transformer import Hardware, Initialization, Mask, Mixer, MixerConfig, Precision
from transformer.attention.mixer import MIXERS, MixerInputs, mixer_class
from transformer.layers.logical_axes import abstract_weights
from transformer.model_context import ModelContext
from transformer.taps import NO_OUTPUTS, Outputs
from transformer.testing.mixer_under_test import Trial, projections

BUILTIN_MIXERS = tuple(
    kind for kind, mixer in MIXERS.items() if mixer.__module__.startswith("transformer.")
)
"""Kinds of the mixers of this package: other tests register their own."""


def make_context(width: int) -> ModelContext:
    """Return the context of a three-layer model of width D."""
    return ModelContext(width, 3, Precision(), Initialization(), Hardware())


def make_mixer(config: MixerConfig, width: int, **kwargs: Any) -> tuple[Mixer, Any]:
    """Return the mixer and random weights; `kwargs` are the inputs that it requires."""
    mixer = mixer_class(config)(config, make_context(width), parent=None)
    shapes = jax.eval_shape(
        lambda key: mixer.init(key, *_first(width), inputs(1, **kwargs)), _key()
    )
    return mixer, random_params_like(shapes["params"])


def axes(config: MixerConfig, width: int, **kwargs: Any) -> dict[str, tuple[str, ...]]:
    """Return the names of the axes of each weight, by its path."""
    mixer = mixer_class(config)(config, make_context(width), parent=None)
    init = lambda key: mixer.init(key, *_first(width), inputs(1, **kwargs))  # noqa: E731
    _, tree = abstract_weights(init, _key())
    return {"/".join(path): leaf.names for path, leaf in flatten_dict(tree).items()}


def apply_mixer(
    mixer: Mixer,
    params: Any,
    x: Array,  # [B, T, D]
    outputs: Outputs = NO_OUTPUTS,
    **kwargs: Any,
) -> Any:
    """Return the mixer's output; by default positions are 0 to T - 1 and nothing is masked."""
    run = jax.jit(lambda params, x, inputs: mixer.apply({"params": params}, x, inputs))
    return run(params, x, inputs(x.shape[1], outputs=outputs, **kwargs))


def project_and_select(mixer: Any, params: Any, x: Array, inputs: MixerInputs) -> Any:
    """Return the mixer's projected heads, and the pairs that it selects [B or 1, N or 1, T, T]."""

    def run(params: Any, x: Array) -> Any:
        heads = projections(mixer, params, x, inputs)
        return heads, mixer.select(heads, inputs)

    heads, selected = jax.jit(run)(params, x)
    return heads, np.asarray(selected)


def inputs(length: int, **fields: Any) -> MixerInputs:
    """Return mixer inputs; by default positions are 0 to T - 1 and nothing is masked."""
    defaults: dict[str, Any] = dict(positions=np.arange(length)[None], mask=Mask())
    return MixerInputs(**(defaults | fields))


def _first(width: int) -> tuple[Array]:
    return (np.zeros((1, 1, width), np.float32),)


def _key() -> jax.Array:
    return jax.random.key(0)


def assert_chunks_match_full_pass(trial: Trial, sizes: tuple[int, ...]) -> None:
    """Read the tokens of a trial into a cache, in chunks of these sizes."""
    assert sum(sizes) == trial.length
    x, start = trial.inputs(0), 0
    full, cache = trial(x).y, trial.init_cache(trial.length + 5)
    for size in sizes:
        here = slice(start, start + size)
        y, cache, _ = trial(x[:, here], cache=cache, positions=np.arange(trial.length)[None, here])
        assert_close(y, full[:, here])
        start += size


def dense_attention(
    q: Any,  # [B, T, N, H]
    k: Any,  # [B, S, K, H]
    v: Any,  # [B, S, K, H of values]
    visible: Any,  # [B or 1, N or 1, T, S] booleans
) -> jax.Array:  # [B, T, N, H of values]
    """Compute softmax attention over the visible pairs by its formula, to be differentiated."""
    k, v = (jnp.repeat(each, q.shape[2] // k.shape[2], axis=2) for each in (k, v))
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1])
    exp_scores = jnp.where(visible, jnp.exp(scores), 0)
    total = exp_scores.sum(-1, keepdims=True)
    return jnp.einsum("BNTS,BSNH->BTNH", exp_scores / jnp.where(total > 0, total, 1), v)


def visible_in_groups(groups: Array, window: int, causal: bool) -> Array:  # [..., T] to [..., T, T]
    """Return pairs of a group: the last `window` members up to the query, and as many after it.

    Causal: none after it. Group -1: none at all.
    """
    visible = np.zeros((*groups.shape, groups.shape[-1]), bool)
    for *row, t in np.ndindex(groups.shape):
        members = np.flatnonzero(groups[(*row,)] == groups[(*row, t)])
        before, after = members[members <= t], members[members > t]
        if groups[(*row, t)] >= 0:
            visible[(*row, t, before[-window:])] = True
            visible[(*row, t, after[: window - 1])] = not causal
    return visible


def value_and_gradients(run: Any, *arrays: Any) -> Any:
    """Return the compiled value of a function, and gradients for a cotangent that depends on it."""

    def both(*arrays: Any) -> Any:
        y, vjp_fn = jax.vjp(run, *arrays)
        return y, vjp_fn(jnp.cos(3 * y))

    return jax.jit(both)(*arrays)


def assert_matches_dense(
    mixer: Any, params: Any, x: Array, inputs: MixerInputs, visible: Array
) -> None:
    """Compare a mixer, in value and gradients, with dense attention of its own projections."""

    def run_mixer(params: Any, x: Any) -> Any:
        return mixer.apply({"params": params}, x, inputs).y

    def run_dense(params: Any, x: Any) -> Any:
        q, k, v = projections(mixer, params, x, inputs)[:3]
        y = dense_attention(q, k, v, visible)
        return jnp.einsum("BTNH,NHD->BTD", y, params["output"]) + params["output_bias"][None, None]

    assert_trees_close(
        value_and_gradients(run_mixer, params, x), value_and_gradients(run_dense, params, x)
    )
