"""Reformer: attention to tokens with the same hash (Kitaev, Kaiser and Levskaya 2020, section 2).

Letters: R hash rounds in comments of arrays with an axis `rounds`.
"""

import dataclasses
import functools
import math
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer.attention.backends.partial import PartialAttention, merge_partials
from transformer.attention.document_boundaries import token_segments
from transformer.attention.masks import dense_mask
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_mask_patterns,
)
from transformer.attention.projections import (
    QKV,
    SharedQueryKeyConfig,
    combine_heads,
    project_queries,
    project_values,
)
from transformer.attention.rope import RoPE, apply_rope
from transformer.attention.sparse_ops.grouped_window import (
    attend_grouped,
    group_positions,
    split_groups_by_document,
)
from transformer.attention.sparse_ops.visible_key_counts import grouped_visible_keys
from transformer.layers.precise_einsum import accumulation_dtype
from transformer.taps import HEAD_OUTPUTS
from transformer.validation import Bounds, PositiveInt, Seed

SELF_ATTENTION_PENALTY = 1e4
"""Subtracted from the score of a token with itself: used only if no other key is visible.

The paper's 1e5 exceeds the range of float16.
"""

KEY_NORM_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class ReformerConfig(SharedQueryKeyConfig):
    """Attention by locality-sensitive hashing, with shared queries and keys (Kitaev et al. 2020).

    Difference from the paper: it sorts tokens by bucket and cuts the sorted row into chunks, and
    each chunk attends to itself and to the previous one. A later token then moves the chunk
    boundaries and changes which keys earlier queries see, so the choice of keys leaks the future
    under a causal mask. Here a query sees the last `window` members of its bucket, which depend on
    the past only. Packed documents use the same hashes but separate buckets.
    """

    kind: ClassVar[str] = "reformer"

    num_buckets: Annotated[int, Bounds(2, 2**16)] = 32
    """Buckets per hash; an even number."""
    num_hashes: Annotated[int, Bounds(1, 2**10)] = 4
    """Number of hash rounds. A query sees the keys that any round puts into its bucket."""
    window: PositiveInt = 64
    """Members of its bucket that a query sees per round, including itself. Without a causal mask,
    also the window - 1 members after it."""
    seed: Seed = 0
    """Seed of the random rotations, combined with the layer index."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_buckets % 2:
            raise ValueError(
                f"ReformerConfig.num_buckets {self.num_buckets}: buckets come in opposite pairs; "
                "give an even number"
            )


@register_mixer
class Reformer(Mixer):
    """Attention within hash buckets. No cache: decoding would search the buckets of every round."""

    config: ReformerConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: ReformerConfig) -> Abilities:
        return Abilities(cached=False, cross=False, weights=False)

    @staticmethod
    def constants(config: ReformerConfig, layer: int, width: int) -> dict[str, np.ndarray]:
        """Draw the rotations [rounds, N, H, buckets / 2] from the seed and the layer."""
        head_dim = config.resolved_head_dim(width)
        shape = (config.num_hashes, config.num_heads, head_dim, config.num_buckets // 2)
        # NumPy, whose generator gives the same rotations on every backend and version of JAX.
        random = np.random.default_rng([config.seed, layer])
        return {"rotations": random.normal(size=shape).astype(np.float32)}

    @staticmethod
    def score_flops(config: ReformerConfig, width: int, length: int) -> ScoreFlops:
        """Count, per round, the rotation and attention to at most `window` members of a bucket."""
        rotation = config.num_heads * config.resolved_head_dim(width) * config.num_buckets
        members = grouped_visible_keys(config.window, length).flops(config, width)
        return ScoreFlops(
            full=config.num_hashes * (rotation + members.full),
            causal=config.num_hashes * (rotation + members.causal),
        )

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        raise ValueError("mixer reformer: has no cache; decode with mixer full or routing")

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config = self.config
        reject_mask_patterns(config.kind, inputs.mask)
        q, k, v = self.project(x, inputs)
        buckets = self.buckets(q, inputs)
        causal, softmax_dtype = inputs.mask.pattern.causal, self.context.precision.softmax
        y = attend_hashed(q, k, v, buckets, config.window, causal, softmax_dtype)
        return combine_heads(self, y, inputs)

    def project(self, x: jax.Array, inputs: MixerInputs) -> QKV:  # [B, T, N, H] each
        """Declare the projections; keys are normalized queries."""
        config = self.config
        q = project_queries(self, x)
        if isinstance(config.position, RoPE):
            q = apply_rope(q, inputs.positions, config.position)
        return QKV(q, normalize_keys(q), project_values(self, x))

    @nn.nowrap
    def buckets(
        self,
        q: Float[Array, "B T N H"],
        inputs: MixerInputs,
    ) -> Int[Array, "rounds B N T"]:
        """Return the bucket of each token in each round, separate for each document."""
        hashes = hash_buckets(q, jnp.asarray(inputs.constants["rotations"]))
        documents = token_segments(inputs.mask, q.shape[1])
        num_buckets = self.config.num_buckets
        return jax.vmap(lambda x: split_groups_by_document(x, num_buckets, documents))(hashes)

    @nn.nowrap
    def select(
        self,
        heads: QKV,
        inputs: MixerInputs,
    ) -> Bool[Array, "B N T T"]:
        """Return the keys visible in any round, and the token itself where there is no other."""
        window, length = self.config.window, heads.q.shape[1]
        numbers = bucket_positions(self.buckets(heads.q, inputs), window)
        in_bucket = jnp.abs(numbers[..., :, None] - numbers[..., None, :]) < window
        itself = jnp.eye(length, dtype=bool)[None, None]
        visible = dense_mask(inputs.mask, length, length)[:, None]
        # The penalty of the token itself is finite, so that it wins only where nothing else is
        # visible.
        others = in_bucket.any(0) & visible & ~itself
        return others | (itself & ~others.any(-1, keepdims=True))


def normalize_keys(q: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Return queries rescaled to length sqrt(H), which serve as keys.

    Scores times 1 / sqrt(H) are then q_i . q_j / |q_j|, as in the paper's code; the paper's
    equations omit the root.
    """
    wide = q.astype(jnp.float32)
    square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + KEY_NORM_EPSILON)).astype(q.dtype)


def hash_buckets(
    q: Float[Array, "B T N H"],
    rotations: Float[Array, "rounds N H half_buckets"],
) -> Int[Array, "rounds B N T"]:
    """Return argmax([q R; -q R]) (section 2, locality sensitive hashing)."""
    # In float32: a projection rounded to 16 bits could move a token to another bucket. An argmax
    # has no gradient anyway.
    wide = jax.lax.stop_gradient(q).astype(jnp.float32)

    def hash_once(rotation: Float[Array, "N H half_buckets"]) -> Int[Array, "B N T"]:
        rotated = jnp.einsum("BTNH,NHM->BNTM", wide, rotation)
        return jnp.argmax(jnp.concatenate([rotated, -rotated], axis=-1), axis=-1)

    # One round at a time: all of [rounds, B, N, T, buckets] would be the largest array of the
    # mixer.
    return jax.lax.map(hash_once, rotations)


def bucket_positions(
    buckets: Int[Array, "rounds B N T"], window: int
) -> Int[Array, "rounds B N T"]:
    """Return, per round, numbers whose differences encode visibility (`group_positions`)."""
    return jax.vmap(lambda groups: group_positions(groups, window))(buckets)


def attend_hashed(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T N H"],
    v: Float[Array, "B T N H"],
    buckets: Int[Array, "rounds B N T"],
    window: int,
    causal: bool,
    softmax_dtype: str,
) -> Float[Array, "B T N H"]:
    """Attend in all rounds at once, as rounds * N heads, and merge the rounds (equation 5)."""
    rounds, batch, heads, length = buckets.shape
    dtype = v.dtype
    # In the dtype of sums: rounds are merged, and their gradients added up, before rounding. The
    # order of heads is round-major: head r * N + n is head n in round r.
    q, k, v = (
        jnp.tile(x.astype(accumulation_dtype(dtype, softmax_dtype)), (1, 1, rounds, 1))
        for x in (q, k, v)
    )
    # Every round gets the positions of all rounds, to count in how many of them a key is visible.
    positions = jnp.moveaxis(bucket_positions(buckets, window), 0, -1)  # [B, N, T, rounds]
    attended = attend_grouped(
        q,
        k,
        v,
        jnp.moveaxis(buckets, 0, 1).reshape(batch, rounds * heads, length),
        window,
        causal=causal,
        scale=1 / math.sqrt(q.shape[-1]),
        softmax_dtype=softmax_dtype,
        operand_dtype=dtype.name,
        score_bias_fn=functools.partial(duplicate_correction, window),
        bias_inputs=jnp.tile(positions, (1, rounds, 1, 1)),
    )
    # Equation 5: the rounds' results weighted by exp(lse_round - logsumexp over rounds lse).
    y, lse = jnp.split(attended.y, rounds, axis=2), jnp.split(attended.lse, rounds, axis=1)
    partials = [PartialAttention(*partial) for partial in zip(y, lse, strict=True)]
    return merge_partials(partials).y.astype(dtype)


def duplicate_correction(
    window: int,
    q_positions: Int[Array, "B N R rounds"],
    k_positions: Int[Array, "B N C rounds"],
) -> Float[Array, "B N R C"]:
    """Return -log(number of rounds that show the key); -1e4 for the token itself (equation 6)."""
    # One round at a time, so that no array has an axis of rounds beside queries and keys.
    distances = [
        jnp.abs(q_positions[..., :, None, r] - k_positions[..., None, :, r])
        for r in range(q_positions.shape[-1])
    ]
    # A key that c rounds show is counted c times by the merge, so its weight is divided by c.
    count = sum(distance < window for distance in distances)
    is_itself = distances[0] == 0
    return -jnp.where(
        is_itself, SELF_ATTENTION_PENALTY, jnp.log(jnp.maximum(count, 1).astype(jnp.float32))
    )
