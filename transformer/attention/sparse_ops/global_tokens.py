"""Global tokens: all tokens attend to them, and they attend to all tokens of their document.

Two ways, both O(n T):

- **A list**: the index in the row of up to n tokens. Gather them, attend, scatter the results.
  Shapes are static while the number of tokens is not: index T fills the slots that are left.
- **By document**, for packed rows, which have up to T global tokens: for each of n listed
  positions, every token finds the global token of its document by its distance in positions,
  since positions of a document count up by one. Sums over a document, also in gradients, are in
  the dtype of the softmax: in bfloat16 a sum of thousands of terms stops growing.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from transformer.attention.backends.blockwise import attend_blockwise
from transformer.attention.backends.partial import PartialAttention
from transformer.attention.masks import Mask, MaskPattern
from transformer.attention.reference import ScoreSpec
from transformer.attention.sparse_ops.mask_tokens import Tokens, query_and_key_tokens
from transformer.attention.sparse_ops.query_blocks import softmax_where
from transformer.layers.basic import dropout, fold_in
from transformer.layers.precise_einsum import accumulation_dtype, precise_einsum


def list_tokens(
    is_listed: Bool[Array, "#B T"],
    size: int,  # n
) -> Int[Array, "#B n"]:
    """Return the index of the first n of those tokens, in the order of the row; T: none."""
    length = is_listed.shape[1]
    return jnp.sort(jnp.where(is_listed, jnp.arange(length)[None, :], length), axis=1)[:, :size]


def gather_tokens(
    x: Shaped[Array, "#B T ..."],
    index: Int[Array, "#B n"],  # T: none, which takes the last
) -> Shaped[Array, "#B n ..."]:
    """Gather the tokens at `index` of each example."""
    batch = x.shape[0] if index.shape[0] == 1 else index.shape[0]
    row = jnp.arange(batch)[:, None]
    # Shapes are static, so absent tokens are gathered too: callers give them segment 0.
    clamped = jnp.broadcast_to(jnp.minimum(index, x.shape[1] - 1), (batch, index.shape[1]))
    return jnp.asarray(x)[row if x.shape[0] != 1 else jnp.zeros_like(row), clamped]


def attend_to_tokens(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    mask: Mask,  # of self-attention over T tokens
    score_spec: ScoreSpec,
    index: Int[Array, "#B n"],  # of the keys; T: none
) -> PartialAttention:
    """Attend from all queries to the listed keys only."""
    queries, keys = query_and_key_tokens(mask, q.shape[1], k.shape[1])
    list_mask = mask_between(mask.pattern, queries, gather_listed(keys, index))
    return attend_blockwise(
        q, gather_tokens(k, index), gather_tokens(v, index), list_mask, score_spec
    )


def attend_from_tokens(
    q: Float[Array, "B n N H"],  # of the listed tokens
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    mask: Mask,  # of self-attention over T tokens
    score_spec: ScoreSpec,
    index: Int[Array, "#B n"],  # of the queries; T: none
) -> Float[Array, "B n N Hv"]:
    """Attend from the listed queries to all visible keys."""
    queries, keys = query_and_key_tokens(mask, k.shape[1], k.shape[1])
    # Queries of segment 0 see nothing: their results are zeros, which `scatter_tokens` drops.
    list_mask = mask_between(mask.pattern, gather_listed(queries, index), keys)
    return attend_blockwise(q, k, v, list_mask, score_spec).y


def gather_listed(
    tokens: Tokens,  # [B or 1, T]
    index: Int[Array, "#B n"],  # T: none
) -> Tokens:  # [B or 1, n]
    """Return the listed tokens, with segment 0 in empty slots."""
    segments = gather_tokens(tokens.segments, index)
    segments = jnp.where(index < tokens.segments.shape[1], segments, 0)
    return Tokens(gather_tokens(tokens.positions, index), segments)


def mask_between(pattern: MaskPattern, queries: Tokens, keys: Tokens) -> Mask:
    """Return the mask of these queries over these keys."""
    mask = Mask(pattern, positions=queries.positions, segments=queries.segments)
    return mask.with_keys(keys.positions, keys.segments)


def mask_duplicates(
    global_positions: Int[Array, "#B n"],  # positions; -1: none
) -> Int[Array, "#B n"]:
    """Replace repeated positions by -1, so that no key is counted twice."""
    is_same = global_positions[:, :, None] == global_positions[:, None, :]
    # Strictly below the diagonal: the first of equal positions stays.
    is_earlier = jnp.tri(global_positions.shape[1], k=-1, dtype=bool)[None]
    return jnp.where((is_same & is_earlier).any(-1), -1, global_positions)


def find_document_globals(
    tokens: Tokens,  # [B or 1, T]
    global_positions: Int[Array, "#B n"],  # distinct positions; -1: none
) -> Int[Array, "n #B T"]:
    """Return the index of the global token at each position of each token's document; T: none."""
    positions, segments = tokens
    length = positions.shape[1]

    def find(position: Int[Array, "#B"]) -> Int[Array, "#B T"]:
        # Positions count up by one within a document, so the offset in positions is also the
        # offset in the row. What is found in another document is rejected.
        index = jnp.arange(length)[None, :] + position[:, None] - positions
        exists = (index >= 0) & (index < length) & (position >= 0)[:, None] & (segments != 0)
        index = jnp.clip(index, 0, length - 1)
        exists &= gather_tokens(segments, index) == segments
        exists &= gather_tokens(positions, index) == position[:, None]
        return jnp.where(exists, index, length)

    return jax.vmap(find, in_axes=1)(global_positions)


def attend_to_document_globals(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    mask: Mask,  # causal or not
    score_spec: ScoreSpec,
    index: Int[Array, "n #B T"],  # of `find_document_globals`
) -> PartialAttention:
    """Attend from all queries to the global keys of their own document."""
    operand_dtype = score_spec.operand_dtype_of(q)
    sum_dtype = accumulation_dtype(operand_dtype, score_spec.softmax_dtype)
    # Widened: a global key gets a term of its gradient from every token of its document.
    grouped_q = _group_heads(q, k).astype(sum_dtype)
    keys, values = k.astype(sum_dtype), v.astype(sum_dtype)

    # `checkpoint` keeps the gathered keys and values [B, T, K, H] of each position out of the
    # residuals of the loops over positions.
    @jax.checkpoint
    def score(index: Int[Array, "#B T"]) -> Float[Array, "B T K G"]:
        global_keys = gather_tokens(keys, index)
        return precise_einsum("BTKGH,BTKH->BTKG", grouped_q, global_keys, operand_dtype, sum_dtype)

    @jax.checkpoint
    def weighted_value(index: jax.Array, weights: jax.Array) -> Float[Array, "B T K G H"]:
        return weights[..., None] * gather_tokens(values, index)[:, :, :, None]

    def add(y: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return y + weighted_value(*inputs), None

    # Scores of all n positions fit in memory, as they have no axis H. Values are added position by
    # position.
    scores = jnp.moveaxis(jax.lax.map(score, index), 0, -1)  # [B, T, K, G, n]
    # Causal: a token sees itself and what is before it. Index T, of no token, is beyond all.
    length = q.shape[1]
    last_visible = jnp.arange(length)[None, None, :] if mask.pattern.causal else length - 1
    visible = jnp.moveaxis(index <= last_visible, 0, -1)
    scores = scores.astype(score_spec.softmax_dtype) * score_spec.scale
    weights, lse = softmax_where(scores, visible[:, :, None, None])
    weights = jnp.moveaxis(weights, -1, 1)  # [B, n, T, K, G]
    weights = dropout(weights, score_spec.dropout_rate, score_spec.dropout_rngs)
    zeros = jnp.zeros((*grouped_q.shape[:-1], v.shape[-1]), sum_dtype)
    y, _ = jax.lax.scan(add, zeros, (index, jnp.moveaxis(weights, 1, 0)))
    shape = (*q.shape[:3], v.shape[-1])
    return PartialAttention(y.reshape(shape).astype(v.dtype), lse.reshape(shape[:3]).swapaxes(1, 2))


def attend_from_document_globals(
    q: Float[Array, "B T N H"],  # those of global tokens are read
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    mask: Mask,  # causal or not
    score_spec: ScoreSpec,
    index: Int[Array, "n #B T"],  # of `find_document_globals`
) -> Float[Array, "B T N Hv"]:
    """Attend from global tokens to their whole document. The rows of other tokens are zeros."""
    batch, length = q.shape[:2]
    operand_dtype = score_spec.operand_dtype_of(q)
    sum_dtype = accumulation_dtype(operand_dtype, score_spec.softmax_dtype)
    queries, keys, values = (x.astype(sum_dtype) for x in (q, k, v))
    example = jnp.arange(batch)[:, None]

    @jax.checkpoint
    def attend_from_position(index: jax.Array, step: jax.Array) -> jax.Array:
        """Return the rows of the global tokens at one position of their documents."""
        first_visible = jnp.arange(length)[None, :] if mask.pattern.causal else 0
        visible = (index < length) & (index >= first_visible)
        # Scatters drop index T.
        index = jnp.broadcast_to(jnp.where(visible, index, length), (batch, length))
        # Each token scores itself as a key of its document's global query. The softmax over a
        # document is then one over all tokens with the same index.
        global_q = _group_heads(gather_tokens(queries, index), k)
        scores = precise_einsum("BTKGH,BTKH->BTKG", global_q, keys, operand_dtype, sum_dtype)
        scores = scores.astype(score_spec.softmax_dtype) * score_spec.scale
        scores = jnp.where(visible[..., None, None], scores, -jnp.inf)
        # The maximum cancels in the weights, so no gradient has to pass through it.
        fixed_scores = jax.lax.stop_gradient(scores)
        maximum = jnp.full_like(scores, -jnp.inf).at[example, index].max(fixed_scores, mode="drop")
        maximum = gather_tokens(maximum, index)
        exp_scores = jnp.exp(scores - jnp.where(jnp.isfinite(maximum), maximum, 0))
        total = jnp.zeros_like(scores).at[example, index].add(exp_scores, mode="drop")
        rngs = fold_in(score_spec.dropout_rngs, step)
        # Dropout acts on the numerator; the sum is over all weights.
        dropped = dropout(exp_scores, score_spec.dropout_rate, rngs)
        terms = dropped[..., None] * values[:, :, :, None]
        rows = jnp.zeros_like(terms).at[example, index].add(terms, mode="drop")
        rows = rows / jnp.where(total > 0, total, 1)[..., None]
        return rows.reshape(*q.shape[:3], v.shape[-1]).astype(v.dtype)

    # One position at a time: n passes over the tokens instead of an array n times their size.
    def add(y: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return y + attend_from_position(*inputs), None

    zeros = jnp.zeros((*q.shape[:3], v.shape[-1]), v.dtype)
    return jax.lax.scan(add, zeros, (index, jnp.arange(len(index))))[0]


def _group_heads(q: Float[Array, "B T N H"], k: jax.Array) -> Float[Array, "B T K G H"]:
    return q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
