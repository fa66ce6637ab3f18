"""Sampling the next token: temperature, top-k and top-p (nucleus) sampling.

Each example has its own random key, folded with the position of the sampled token: a sample does
not depend on the rest of the batch, nor on how many tokens one call generates.
"""

import dataclasses
import math
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Key

from transformer.validation import (
    Bounds,
    NonNegativeInt,
    Settings,
    check_settings,
    check_shapes,
)

AnyArray = jax.Array | np.ndarray
"""Array of JAX or of NumPy."""


class SamplingValues(NamedTuple):
    """Settings of each row of a batch: arguments of compiled programs, which serve all values."""

    temperature: Float[AnyArray, "B"]  # 0, or from 1e-30 to 1e30
    top_k: Int[AnyArray, "B"]
    top_p: Float[AnyArray, "B"]


@dataclasses.dataclass(frozen=True)
class SamplingConfig(Settings):
    """Sampling settings, applied in the order temperature, top-k, top-p."""

    temperature: Annotated[float, Bounds(0, math.inf)] = 1.0
    """Divisor of the logits: 1 is the model's distribution, lower is sharper, 0 is greedy."""
    top_k: NonNegativeInt = 0
    """Sample among the k most probable tokens (Fan et al. 2018, section 5.1.2); 0: all."""
    top_p: Annotated[float, Bounds(maximum=1, above=0)] = 1.0
    """Sample among the smallest set of most probable tokens with this total probability (Holtzman
    et al. 2020, section 3.1); 1: all."""

    def __post_init__(self) -> None:
        # By the names of the fields alone, which callers have as arguments.
        check_settings(self, "")

    def values(self, batch_size: int) -> SamplingValues:
        """Return the settings of `batch_size` equal rows, as NumPy arrays."""
        # Clipped so that dividing by it gives finite numbers.
        temperature = self.temperature and min(max(self.temperature, 1e-30), 1e30)
        return SamplingValues(
            temperature=np.full(batch_size, temperature, np.float32),
            top_k=np.full(batch_size, min(self.top_k, np.iinfo(np.int32).max), np.int32),
            top_p=np.full(batch_size, max(self.top_p, 1e-30), np.float32),  # else it becomes 0
        )


MAX_SORTED = 64
"""Largest k for which top-k sampling sorts, which takes a fraction of the time of a search then."""

ANCESTRAL_SAMPLING = SamplingConfig()
"""Sampling from the model's own distribution."""


def sample_tokens(
    logits: Float[Array, "B V"],
    rngs: Key[Array, "B"],  # random keys of the examples
    positions: Int[Array, "B"],  # positions of the sampled tokens
    config: SamplingConfig,
) -> Int[Array, "B"]:
    """Sample a token for each example; never one whose logit is the lowest finite number.

    Raises:
      ValueError: If shapes or dtypes disagree.
    """
    check_shapes(logits=(logits, "B V", float))
    return draw_tokens(logits, rngs, positions, config.values(len(logits)))


def draw_tokens(
    logits: Float[Array, "B V"],
    rngs: Key[Array, "B"],  # random keys of the examples
    positions: Int[Array, "B"],  # positions of the sampled tokens
    values: SamplingValues,
) -> Int[Array, "B"]:
    """Sample a token for each example, like `sample_tokens`, with settings of its own."""
    check_shapes(logits=(logits, "B V", float), rngs=(rngs, "B"), positions=(positions, "B", int))

    # Tokens with the lowest finite number must never be drawn. As -inf they have probability 0 at
    # every temperature; a finite number, divided by a high one, would become a likely logit.
    excluded = logits <= jnp.finfo(logits.dtype).min
    logits = jnp.where(excluded, -jnp.inf, logits.astype(jnp.float32))
    most_likely = argmax_tokens(logits)
    temperature, top_k, top_p = (jnp.asarray(each)[:, None] for each in values)
    samples = temperature > 0

    def unchanged(logits: jax.Array, limit: jax.Array) -> jax.Array:
        return logits

    def sample() -> jax.Array:
        scaled = apply_temperature(logits, jnp.where(samples, temperature, 1))
        scaled = jax.lax.cond(jnp.any(samples & (top_k > 0)), apply_top_k, unchanged, scaled, top_k)
        scaled = jax.lax.cond(jnp.any(samples & (top_p < 1)), apply_top_p, unchanged, scaled, top_p)
        drawn = sample_gumbel(scaled, jax.vmap(jax.random.fold_in)(rngs, positions))
        return jnp.where(samples[:, 0], drawn, most_likely)

    # Branches, as noise and truncation take passes over the vocabulary that most batches need not.
    return jax.lax.cond(jnp.any(samples), sample, lambda: most_likely)


def argmax_tokens(
    logits: Float[Array, "B V"],
) -> Int[Array, "B"]:
    """Return the argmax (of ties, the first), as two reductions.

    XLA's CPU compiler lowers argmax to a scalar loop, ten times slower: 6% of a decoding step over
    a large vocabulary.
    """
    greatest = jnp.max(logits, axis=-1, keepdims=True)
    tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(logits < greatest, logits.shape[-1], tokens), axis=-1)


def apply_temperature(
    logits: Float[Array, "B V"],
    temperature: Float[Array, "B 1"],
) -> Float[Array, "B V"]:
    """Subtract the maximum and divide by a temperature in [1e-30, 1e30]."""
    greatest = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - greatest) / temperature


def apply_top_k(
    logits: Float32[Array, "B V"],
    top_k: Int[Array, "B 1"],  # 0: all
) -> Float[Array, "B V"]:
    """Set all but the k largest logits to -inf; of ties, the first are kept."""
    num_largest = min(MAX_SORTED, logits.shape[-1])

    def sort() -> Bool[Array, "B V"]:
        index = jnp.maximum(top_k - 1, 0)
        last, last_token = (
            jnp.take_along_axis(each, index, axis=-1) for each in jax.lax.top_k(logits, num_largest)
        )
        tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
        return (logits > last) | ((logits == last) & (tokens <= last_token))

    def search() -> Bool[Array, "B V"]:
        return _precede(logits, jnp.ones_like(logits), top_k.astype(jnp.float32))

    kept = jax.lax.cond(jnp.all(top_k <= num_largest), sort, search)
    return jnp.where(kept | (top_k == 0), logits, -jnp.inf)


def apply_top_p(
    logits: Float32[Array, "B V"],
    top_p: Float[Array, "B 1"],  # 1: all
) -> Float[Array, "B V"]:
    """Set logits outside the nucleus to -inf.

    A token is in the nucleus if the tokens before it, in order of probability, have less than
    `top_p` in total, so the most probable one always is.
    """
    in_nucleus = _precede(logits, jax.nn.softmax(logits, axis=-1), top_p)
    return jnp.where(in_nucleus | (top_p >= 1), logits, -jnp.inf)


def sample_gumbel(
    logits: Float[Array, "B V"],
    rngs: Key[Array, "B"],
) -> Int[Array, "B"]:
    """Sample a token: the argmax of logits plus Gumbel noise (Gumbel 1954)."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(rngs)
    return argmax_tokens(logits + noise)


def _precede(
    logits: Float32[Array, "B V"],
    weights: Float32[Array, "B V"],  # not negative
    limit: Float[Array, "B 1"],
) -> Bool[Array, "B V"]:
    """Return True for tokens before which less than `limit` of the weights lies.

    Tokens are in the order of their logits, ties in the order of their indices. No sort is needed,
    which takes 30 times as long on a CPU, only the logit at which the limit is reached. It is found
    bit by bit: the bits of floats that are not negative are in the order of their values.
    """
    distance = jnp.abs(logits - jnp.max(logits, axis=-1, keepdims=True))
    bits = jax.lax.bitcast_convert_type(distance, jnp.int32)

    def weight_of(chosen: jax.Array) -> Float[Array, "B 1"]:
        return jnp.sum(jnp.where(chosen, weights, 0), axis=-1, keepdims=True)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low) // 2
        reached = weight_of(bits <= middle) >= limit
        return jnp.where(reached, low, middle), jnp.where(reached, middle, high)

    # 31 halvings leave one pattern of bits, since that of infinity (0x7F800000) is below 2^31.
    start = jnp.full_like(bits[:, :1], -1)
    _, threshold = jax.lax.fori_loop(0, 31, halve, (start, jnp.full_like(start, 0x7F800000)))
    equal = bits == threshold
    weights_before = jnp.cumsum(jnp.where(equal, weights, 0), axis=-1) - weights
    return (bits < threshold) | (equal & (weight_of(bits < threshold) + weights_before < limit))
