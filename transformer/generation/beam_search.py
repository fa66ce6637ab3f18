"""Beam search: the most probable sequences, keeping several hypotheses at a time.

As in Wu et al. 2016 (section 7, without coverage): a finished hypothesis of n tokens, including its
stop token, has the score log P / ((5 + n) / 6)^alpha. The search of an example ends when no live
hypothesis can beat its finished ones.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from transformer.models.block import BlockCache
from transformer.validation import Bounds, NonNegativeFloat, Settings, check_integer, check_shapes

NO_TOKEN = -1
"""Padding after the end of a hypothesis."""


MIN_LOG_PROB = -1e9
"""Log-probability of empty places for hypotheses."""


DecodeStepFn = Callable[[Any, jax.Array, jax.Array], tuple[Any, jax.Array]]
"""(cache, tokens [R], positions [R]) -> (cache, logits [R, V])."""


@dataclasses.dataclass(frozen=True)
class BeamSearchConfig(Settings):
    """Beam width and length penalty."""

    num_beams: Annotated[int, Bounds(1, 2**16)] = 4
    """K, hypotheses kept for each example."""
    length_penalty: NonNegativeFloat = 0.6
    """alpha: 0 favors short hypotheses; 0.6 in Vaswani et al. 2017, section 6.1."""


class Hypotheses(NamedTuple):
    """Best hypotheses of each example, best first."""

    tokens: Int[Array, "B K T"]  # without the stop token; NO_TOKEN beyond the end
    scores: Float[Array, "B K"]


class BeamSearchState(struct.PyTreeNode):
    """State of a search: K live and K finished hypotheses for each example."""

    step: Int[Array, ""]  # number of tokens generated
    cache: Any  # leaves [B K, ...]
    logits: Float[Array, "B_times_K V"]  # next-token logits of live hypotheses
    tokens: Int[Array, "B K T"]  # live hypotheses
    log_probs: Float[Array, "B K"]  # of live hypotheses
    finished: Hypotheses


def beam_search(
    decode_step_fn: DecodeStepFn,
    cache: Sequence[Any],  # of each layer, with leaves [B, ...]
    logits: Float[Array, "B V"],  # of the first token
    positions: Int[Array, "B"],  # of the first token
    max_lengths: Int[Array, "B"],  # most tokens of each example, including the stop token
    stop_token: Int[Array, ""] | Int[Array, "E"] | int,  # one or, as [E], several
    *,
    config: BeamSearchConfig,
    max_new_tokens: int,  # T: the largest of the limits
) -> Hypotheses:
    """Search continuations of a prompt, or of the start token of a translation. Call under jit.

    A hypothesis that reaches its maximal length counts as finished.

    Raises:
      ValueError: If shapes or dtypes disagree.
    """
    check_shapes(
        logits=(logits, "B V", float),
        positions=(positions, "B", int),
        max_lengths=(max_lengths, "B", int),
    )
    stop_tokens = jnp.atleast_1d(stop_token)
    check_shapes(stop_token=(stop_tokens, "E", int))
    check_integer("max_new_tokens", max_new_tokens, 1)
    batch, beams = len(logits), config.num_beams
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        if (shape := jnp.shape(leaf))[:1] != (batch,):
            raise ValueError(
                f"cache{jax.tree_util.keystr(path)} of shape {shape}: logits have {batch} "
                "examples; give a cache with the batch as first axis"
            )
    repeat = functools.partial(jnp.repeat, repeats=beams, axis=0)
    no_tokens = jnp.full((batch, beams, max_new_tokens), NO_TOKEN, jnp.int32)
    # At first all hypotheses of an example are equal: only the first one counts.
    totals = jnp.full((batch, beams), MIN_LOG_PROB).at[:, 0].set(0.0)
    start = BeamSearchState(
        step=jnp.int32(0),
        cache=jax.tree.map(repeat, cache),
        logits=repeat(logits),
        tokens=no_tokens,
        log_probs=totals,
        finished=Hypotheses(no_tokens, jnp.full((batch, beams), MIN_LOG_PROB)),
    )

    def keep_going(search: BeamSearchState) -> jax.Array:
        return (search.step < max_new_tokens) & jnp.any(_can_improve(search, max_lengths, config))

    def add_token(search: BeamSearchState) -> BeamSearchState:
        search, parents = _extend(search, max_lengths, stop_tokens, config)
        reordered = reorder_cache(search.cache, parents)
        newest_positions = repeat(positions) + search.step - 1
        newest = jax.lax.dynamic_index_in_dim(search.tokens, search.step - 1, 2, keepdims=False)
        newest = jnp.maximum(newest, 0).reshape(-1)
        cache, logits = decode_step_fn(reordered, newest, newest_positions)
        return search.replace(cache=cache, logits=logits)

    return jax.lax.while_loop(keep_going, add_token, start).finished


def length_penalty_divisor(length: jax.Array, alpha: float) -> jax.Array:
    """Return ((5 + n) / 6)^alpha (Wu et al. 2016, equation 14)."""
    return ((5.0 + length) / 6.0) ** alpha


def _can_improve(
    search: BeamSearchState, limits: jax.Array, config: BeamSearchConfig
) -> Bool[Array, "B"]:
    """Return True if a live hypothesis may still beat the worst finished one."""
    best = jnp.max(search.log_probs, axis=1) / length_penalty_divisor(limits, config.length_penalty)
    return (best > jnp.min(search.finished.scores, axis=1)) & (search.step < limits)


def _extend(
    search: BeamSearchState,
    limits: jax.Array,
    stop_tokens: Int[Array, "E"],
    config: BeamSearchConfig,
) -> tuple[BeamSearchState, Int[Array, "B K"]]:  # state, parent of each live hypothesis
    """Extend each hypothesis by one token: the best stay live, those with a stop token finish."""
    batch, beams, length = search.tokens.shape
    log_probs = jax.nn.log_softmax(search.logits.astype(jnp.float32), axis=-1)
    vocab = log_probs.shape[-1]
    candidates = (search.log_probs[:, :, None] + log_probs.reshape(batch, beams, vocab)).reshape(
        batch, -1
    )
    # Each of E stop tokens ends at most K candidates, so of (E + 1) K at least K can stay live.
    num_candidates = min((len(stop_tokens) + 1) * beams, candidates.shape[-1])
    totals, index = jax.lax.top_k(candidates, num_candidates)
    parents, newest = index // vocab, (index % vocab).astype(jnp.int32)
    tokens = jnp.take_along_axis(search.tokens, parents[:, :, None], axis=1)
    ends = jnp.isin(newest, stop_tokens)
    is_newest = jnp.arange(length)[None, None, :] == search.step
    tokens = jnp.where(is_newest & ~ends[:, :, None], newest[:, :, None], tokens)
    is_finished = (search.step + 1 >= limits)[:, None] | ends
    is_hypothesis = totals > MIN_LOG_PROB / 2
    scores = totals / length_penalty_divisor(search.step + 1, config.length_penalty)
    finished = _best(
        jnp.concatenate([search.finished.tokens, tokens], axis=1),
        jnp.concatenate(
            [
                search.finished.scores,
                jnp.where(is_finished & is_hypothesis, scores, MIN_LOG_PROB),
            ],
            axis=1,
        ),
        beams,
    )
    totals, index = jax.lax.top_k(jnp.where(is_finished, MIN_LOG_PROB, totals), beams)
    tokens = jnp.take_along_axis(tokens, index[:, :, None], axis=1)
    search = search.replace(
        step=search.step + 1, tokens=tokens, log_probs=totals, finished=finished
    )
    return search, jnp.take_along_axis(parents, index, axis=1)


def _best(tokens: jax.Array, scores: jax.Array, count: int) -> Hypotheses:
    scores, index = jax.lax.top_k(scores, count)
    return Hypotheses(jnp.take_along_axis(tokens, index[:, :, None], axis=1), scores)


def reorder_cache(
    cache: Any,  # leaves [B K, ...]
    parents: Int[Array, "B K"],
) -> Any:
    """Return the caches of the parents. Caches of cross-attention are equal within an example."""
    batch, beams = parents.shape
    rows = (jnp.arange(batch)[:, None] * beams + parents).reshape(-1)

    def reorder_layer(layer: Any) -> Any:
        if isinstance(layer, BlockCache):
            return layer._replace(mixer=reorder_layer(layer.mixer))
        return jax.tree.map(lambda leaf: leaf[rows], layer)

    return tuple(map(reorder_layer, cache))
