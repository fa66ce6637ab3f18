"""Sampling the next token: temperature, top-k and top-p (nucleus) sampling.

Each example has its own random key, folded with the position of the sampled token: a sample does
not depend on the rest of the batch, nor on how many tokens one call generates.
"""

import dataclasses
import math
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Key

from transformer.validation import (
    Bounds,
    NonNegativeInt,
    Settings,
    check_settings,
    check_shapes,
)


class SamplingValues(NamedTuple):
    """Scalars of a `SamplingConfig`: arguments of compiled programs, which serve all values.

    None selects another program: the most likely token, or no truncation.
    """

    temperature: Any  # number, clipped to [1e-30, 1e30]; None: greedy
    top_p: Any  # number in (0, 1); None: all tokens


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
        check_settings(
            self, ""
        )  # by the names of the fields alone, which callers have as arguments

    def values(self) -> SamplingValues:
        """Return the settings whose value a compiled program does not depend on."""
        if self.temperature == 0:
            return SamplingValues(None, None)
        # Clipped so that dividing by it gives finite numbers.
        temperature = float(min(max(self.temperature, 1e-30), 1e30))
        return SamplingValues(temperature, float(self.top_p) if self.top_p < 1 else None)

    def static_top_k(self, vocab_size: int) -> int:
        """Return the setting that decides shapes: `top_k`, or 0 if it has no effect."""
        return self.top_k if self.temperature and self.top_k < vocab_size else 0


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
    return draw_tokens(
        logits, rngs, positions, config.values(), config.static_top_k(logits.shape[-1])
    )


def draw_tokens(
    logits: Float[Array, "B V"],
    rngs: Key[Array, "B"],  # random keys of the examples
    positions: Int[Array, "B"],  # positions of the sampled tokens
    values: SamplingValues,
    top_k: int,  # 0: all
) -> Int[Array, "B"]:
    """Sample a token for each example, like `sample_tokens`, with settings that may be traced."""
    check_shapes(logits=(logits, "B V", float), rngs=(rngs, "B"), positions=(positions, "B", int))

    # Tokens with the lowest finite number must never be drawn. As -inf they have probability 0 at
    # every temperature; a finite number, divided by a high one, would become a likely logit.
    excluded = logits <= jnp.finfo(logits.dtype).min
    logits = jnp.where(excluded, -jnp.inf, logits.astype(jnp.float32))
    if values.temperature is None:
        return argmax_tokens(logits)
    logits, tokens = select_top_k(apply_temperature(logits, values.temperature), top_k)
    rngs = jax.vmap(jax.random.fold_in)(rngs, positions)
    if values.top_p is not None:
        logits = apply_top_p(logits, values.top_p)
    sampled = sample_gumbel(logits, rngs)
    return jnp.take_along_axis(tokens, sampled[:, None], axis=1)[:, 0]


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
    temperature: jax.Array | float,
) -> Float[Array, "B V"]:
    """Subtract the maximum and divide by a temperature in [1e-30, 1e30]."""
    greatest = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - greatest) / temperature


def select_top_k(
    logits: Float[Array, "B V"],
    k: int,
) -> tuple[Float[Array, "B k"], Int[Array, "B k"]]:
    """Return the k largest logits and their tokens; of ties, the first. k = 0: all."""
    if not 0 < k < logits.shape[-1]:
        tokens = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
        return logits, jnp.broadcast_to(tokens, logits.shape)
    largest, tokens = jax.lax.top_k(logits, k)
    return largest, tokens


def apply_top_p(
    logits: Float32[Array, "B V"],
    top_p: jax.Array | float,  # p, in (0, 1)
) -> Float[Array, "B V"]:
    """Set logits outside the nucleus to -inf.

    Tokens in order of probability, ties in order of index: a token is in the nucleus if the tokens
    before it have less than `top_p` in total, so the most probable one always is. No sort is
    needed, only the probability of the least probable one: see `_nucleus_threshold`.
    """
    p = jax.nn.softmax(logits, axis=-1)
    threshold = _nucleus_threshold(p, top_p)
    above, equal = p > threshold, p == threshold
    mass_above = jnp.sum(jnp.where(above, p, 0), axis=-1, keepdims=True)
    num_equal_before = jnp.cumsum(equal, axis=-1) - 1
    in_nucleus = above | (equal & (mass_above + num_equal_before * threshold < top_p))
    return jnp.where(in_nucleus, logits, -jnp.inf)


def sample_gumbel(
    logits: Float[Array, "B V"],
    rngs: Key[Array, "B"],
) -> Int[Array, "B"]:
    """Sample a token: the argmax of logits plus Gumbel noise (Gumbel 1954)."""
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(rngs)
    return argmax_tokens(logits + noise)


def _nucleus_threshold(
    p: Float32[Array, "B V"],
    mass: jax.Array | float,
) -> Float[Array, "B 1"]:
    """The greatest probability such that the tokens with at least that reach `mass`.

    Found bit by bit: the bits of floats that are not negative are in the order of their values. A
    sort of a large vocabulary takes 30 times as long on a CPU.
    """
    bits = jax.lax.bitcast_convert_type(p, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        reached = jnp.sum(jnp.where(bits >= middle, p, 0), axis=-1, keepdims=True) >= mass
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    # 30 halvings leave one pattern of bits, since that of 1.0 (0x3F800000) is below 2^30.
    low = jax.lax.bitcast_convert_type(jnp.zeros((len(p), 1)), jnp.int32)
    high = jax.lax.bitcast_convert_type(jnp.ones((len(p), 1)), jnp.int32)
    low, _ = jax.lax.fori_loop(0, 30, halve, (low, high + 1))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
