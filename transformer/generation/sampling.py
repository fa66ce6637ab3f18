"""Drawing the next word: temperature, top-k and nucleus (top-p) sampling.

Each example has a random key of its own, folded by the position of the token that is drawn: a
draw depends on nothing else in the batch, nor on how many tokens are made in one call.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from transformer.precision import finfo_min

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How a word is chosen: by temperature, then among the top k, then within the nucleus."""

    temperature: float = 1.0
    """Logits are divided by this: 1 is the model's own distribution, lower is sharper; 0 always
    takes the likeliest word."""
    top_k: int = 0
    """Only the k likeliest words can be drawn (Fan et al. 2018, section 5.1.2); 0: all."""
    top_p: float = 1.0
    """Only the likeliest words that together have this probability can be drawn (Holtzman et al.
    2020, section 3.1); 1: all."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"sampling.temperature {self.temperature}: give 0 (the likeliest word) or more"
            )
        if self.top_k < 0:
            raise ValueError(f"sampling.top_k {self.top_k}: give 0 for all words, or 1 or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"sampling.top_p {self.top_p}: give a probability in (0, 1]")


ANCESTRAL_SAMPLING = SamplingConfig()
"""From the model's own distribution, as it is."""


def sample_tokens(
    logits: jax.Array,  # [B, V padded]
    rngs: jax.Array,  # [B] random keys of the examples
    positions: jax.Array,  # [B] of the tokens that are drawn
    config: SamplingConfig,
) -> jax.Array:  # [B] int32
    """A word for each example; never one whose logit is the lowest number, as padding has it."""
    import jax
    import jax.numpy as jnp

    padding = logits <= finfo_min(logits.dtype)
    logits = jnp.where(padding, -jnp.inf, logits.astype(jnp.float32))
    if config.temperature == 0:
        return argmax_tokens(logits)
    logits, words = select_top_k(apply_temperature(logits, config.temperature), config.top_k)
    rngs = jax.vmap(jax.random.fold_in)(rngs, positions)
    drawn = sample_gumbel(apply_top_p(logits, config.top_p), rngs)
    return jnp.take_along_axis(words, drawn[:, None], axis=1)[:, 0]


def argmax_tokens(
    logits: jax.Array,  # [B, V]
) -> jax.Array:  # [B] int32
    """The first of the words with the greatest logit: argmax, in two plain reductions.

    XLA's CPU compiler makes a scalar loop of argmax, ten times slower; over a large vocabulary
    that is 6% of a decoding step.
    """
    import jax.numpy as jnp

    greatest = jnp.max(logits, axis=-1, keepdims=True)
    words = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
    return jnp.min(jnp.where(logits < greatest, logits.shape[-1], words), axis=-1)


def apply_temperature(
    logits: jax.Array,  # [B, V]
    temperature: float,
) -> jax.Array:  # [B, V]
    """Logits less their greatest, divided by a temperature above 0, however small or large."""
    import jax.numpy as jnp

    greatest = jnp.max(logits, axis=-1, keepdims=True)
    return (logits - greatest) / min(max(temperature, 1e-30), 1e30)


def select_top_k(
    logits: jax.Array,  # [B, V]
    k: int,
) -> tuple[jax.Array, jax.Array]:  # [B, k], [B, k]
    """The logits and the numbers of the k likeliest words; of equal ones the first. k = 0: all."""
    import jax
    import jax.numpy as jnp

    if not 0 < k < logits.shape[-1]:
        words = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
        return logits, jnp.broadcast_to(words, logits.shape)
    return jax.lax.top_k(logits, k)


def apply_top_p(
    logits: jax.Array,  # [B, V] float32
    top_p: float,  # p, in (0, 1]
) -> jax.Array:  # [B, V]
    """-inf in place of all but the smallest set of words whose probability reaches `top_p`.

    With the words in order of probability, and equal ones in order of their numbers, a word is in
    the set if what stands before it has less than `top_p`; so the likeliest always is. The order is
    not needed, only the probability of the last word in the set: see `_last_probability`.
    """
    import jax
    import jax.numpy as jnp

    if top_p >= 1:
        return logits
    p = jax.nn.softmax(logits, axis=-1)
    last = _last_probability(p, top_p)
    more, equal = p > last, p == last
    before = jnp.sum(jnp.where(more, p, 0), axis=-1, keepdims=True)
    equal_before = jnp.cumsum(equal, axis=-1) - 1
    inside = more | (equal & (before + equal_before * last < top_p))
    return jnp.where(inside, logits, -jnp.inf)


def sample_gumbel(
    logits: jax.Array,  # [B, V]
    rngs: jax.Array,  # [B]
) -> jax.Array:  # [B] int32
    """A word by its probability: the greatest of logits with Gumbel noise (Gumbel 1954)."""
    import jax

    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[1:]))(rngs)
    return argmax_tokens(logits + noise)


def _last_probability(
    p: jax.Array,  # [B, V] float32
    mass: float,
) -> jax.Array:  # [B, 1]
    """The greatest probability such that the words with at least that reach `mass`.

    Found bit by bit: the bits of floats that are not negative are in the order of their values. A
    sort of a large vocabulary takes 30 times as long on a CPU.
    """
    import jax
    import jax.numpy as jnp

    bits = jax.lax.bitcast_convert_type(p, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        reached = jnp.sum(jnp.where(bits >= middle, p, 0), axis=-1, keepdims=True) >= mass
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle)

    zero, one = jnp.zeros((len(p), 1)), jnp.ones((len(p), 1))
    low, high = (jax.lax.bitcast_convert_type(each, jnp.int32) for each in (zero, one))
    low, _ = jax.lax.fori_loop(0, 30, halve, (low, high + 1))
    return jax.lax.bitcast_convert_type(low, jnp.float32)
