"""Linformer: softmax attention to keys and values projected along the length.

Wang et al. 2020 (Linformer: Self-Attention with Linear Complexity). Each document of a row is
projected separately, to `rank` keys and values.
"""

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from transformer.attention.attend import attend
from transformer.attention.document_boundaries import previous_segments, segments_of_keys
from transformer.attention.masks import Mask
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
    MultiHeadConfig,
    combine_heads,
    project_memory,
    project_qkv,
    project_queries,
)
from transformer.attention.reference import ScoreSpec
from transformer.layers.basic import declare_weight, fold_in
from transformer.taps import HEAD_OUTPUTS
from transformer.validation import (
    Bounds,
    Fraction,
    PositiveInt,
)

ProjectionSharing = Literal["none", "heads", "key_value"]


@dataclasses.dataclass(frozen=True)
class LinformerConfig(MultiHeadConfig):
    """softmax(q (E k)^T / sqrt(H)) (F v) with `rank` rows in E and F (Wang et al. 2020, eq. 7).

    For encoders only: each projected key mixes all tokens. Padding is zeroed before projection.
    """

    kind: ClassVar[str] = "linformer"

    max_length: Annotated[int, Bounds(1, 2**24)] = 256
    """Longest input, in tokens. E and F have one column per position; shorter inputs use the first
    columns."""
    rank: PositiveInt = 64
    """Number of projected keys, k in the paper."""
    sharing: ProjectionSharing = "heads"
    """none: an E and an F for each key-value head. heads: one E and one F per layer. key_value: one
    matrix per layer for both (section 4). Sharing between layers is not supported."""
    max_documents: PositiveInt = 2
    """Documents per row. Each is projected separately, from its own first position, at the cost of
    `rank` keys. Rows with more documents return NaN. Segments that only mark padding, as in a
    classifier, also need 2, because the number of documents is unknown at compile time. With 1,
    padding is given by `key_lengths` only."""
    dropout: Fraction = 0.0
    """Dropout rate of the attention weights, in [0, 1)."""


@register_mixer
class Linformer(Mixer):
    """Softmax attention over `rank` projected keys per document."""

    config: LinformerConfig
    values = HEAD_OUTPUTS

    @staticmethod
    def abilities(config: LinformerConfig) -> Abilities:
        packs = config.max_documents > 1
        return Abilities(
            causal=False, cached=False, segments=packs, any_length=False, weights=False
        )

    @staticmethod
    def score_flops(config: LinformerConfig, width: int, length: int) -> ScoreFlops:
        """Count the projection of keys and values and attention to `rank` keys (one document)."""
        heads = config.num_heads + config.resolved_num_kv_heads
        flops = 4 * heads * config.resolved_head_dim(width) * config.rank
        return ScoreFlops(full=flops, causal=flops)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        raise ValueError(
            "mixer linformer: cannot decode, because each of its keys mixes all tokens; use "
            "it in an encoder"
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context, mask = self.config, self.context, inputs.mask
        if inputs.cache is not None:
            self.init_cache(*x.shape[:2])
        if inputs.memory is None:
            q, k, v = project_qkv(self, x, inputs.positions)
        else:
            q = project_queries(self, x)
            k, v, _ = project_memory(self, inputs.memory, None, q.dtype)
        check_mask(config, mask, k.shape[1])

        documents = split_documents(mask, k.shape[1], config.max_documents)
        key_rows, value_rows = self.projection_matrices()
        k = project_length(key_rows, k, documents)
        v = project_length(value_rows, v, documents)
        # Projected keys mix all tokens of a document, so only whole documents can be hidden.
        key_mask = Mask()
        if documents.segments is not None:
            key_segments = jnp.repeat(documents.segments, config.rank, axis=1)
            key_mask = Mask(segments=mask.segments, key_segments=key_segments)
        score_spec = ScoreSpec(
            scale=1 / math.sqrt(q.shape[-1]),
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=fold_in(inputs.dropout_rngs, 0),
        )
        y = attend(
            q, k, v, key_mask, score_spec, hardware=context.hardware, constrain=context.constrain
        ).y
        if documents.too_many is not None:
            # Known only at run time, when nothing can be raised: NaN is noticed, results without
            # some of the documents would not be.
            y = jnp.where(documents.too_many[:, None, None, None], jnp.nan, y)
        return combine_heads(self, y, inputs)

    def projection_matrices(self) -> tuple[jax.Array, jax.Array]:
        """Return E and F, transposed: [length, rank] for all heads, or [K, length, rank].

        They are initialized as matrices that sum over the length. Their axes are declared
        as those of a table, because a token is multiplied by one row only.
        """
        config, context = self.config, self.context
        heads = {"kv_heads": config.resolved_num_kv_heads} if config.sharing == "none" else {}
        axes = {**heads, "positions": config.max_length, "rank": config.rank}
        init = context.initialization.matrix_initializer({"positions": config.max_length})
        dtype = context.precision.parameters
        key_rows = declare_weight(self, "key_rows", outputs=axes, init=init, dtype=dtype)
        value_rows = key_rows
        if config.sharing != "key_value":
            value_rows = declare_weight(self, "value_rows", outputs=axes, init=init, dtype=dtype)
        compute = context.precision.compute
        return key_rows.astype(compute), value_rows.astype(compute)


def check_mask(config: LinformerConfig, mask: Mask, length: int) -> None:
    """Raise ValueError for a mask or a length that the configuration does not support."""
    if mask.pattern.causal:
        raise ValueError(
            "mixer linformer: does not support a causal mask, because each of its keys mixes "
            "all tokens; use it in an encoder"
        )
    if length > config.max_length:
        raise ValueError(
            f"mixer linformer: {length:,} tokens are more than the {config.max_length:,} "
            f"columns of its projections; set max_length to {length:,} or more"
        )
    if config.max_documents == 1 and mask.segments is not None:
        raise ValueError(
            "mixer linformer: max_documents 1 cannot keep the segments of a row apart; give "
            "lengths, or set max_documents to 2 or more"
        )
    pattern = dataclasses.replace(mask.pattern, ordered=True)  # any order will do
    reject_mask_patterns(config.kind, mask.replace(pattern=pattern))


class Documents(NamedTuple):
    """Documents of the keys of a row; without segments one, and the other fields are None."""

    members: Bool[Array, "#B S documents"]  # True where the key is of the document
    positions: Int[Array, "B S"] | None = None  # place of each key in its document
    segments: Int[Array, "B documents"] | None = None  # what the mask calls them
    too_many: Bool[Array, "B"] | None = None  # True in a row of more documents


def split_documents(mask: Mask, length: int, max_documents: int) -> Documents:
    """Number the documents of each row in order of appearance. Padding belongs to none."""
    segments = segments_of_keys(mask, length)
    if segments is None:
        return Documents(jnp.ones((1, length, 1), bool))
    is_token = segments != 0
    if mask.segments is None:
        return Documents(is_token[:, :, None])
    is_start = is_token & (segments != previous_segments(segments))
    index = jnp.arange(length)[None, :]
    # Each document starts with the first row of the projection.
    positions = index - jax.lax.cummax(jnp.where(is_start, index, 0), axis=1)
    # Documents in order of appearance get slots 0, 1, ...: shapes are static, so their largest
    # number is a setting and not read from the data.
    number = jnp.cumsum(is_start, axis=1)
    slots = 1 + jnp.arange(max_documents)[None, None, :]
    members = (number[:, :, None] == slots) & is_token[:, :, None]
    names = jnp.max(jnp.where(members, segments[:, :, None], 0), axis=1)
    return Documents(members, positions, names, number[:, -1] > max_documents)


def project_length(
    projection: Float[Array, "length rank"] | Float[Array, "K length rank"],
    x: Float[Array, "B S K H"],
    documents: Documents,
) -> Float[Array, "B documents_times_rank K H"]:
    """Sum over the length: each key times the projection row of its position, per document."""
    # A copy of the keys for each document, with zeros elsewhere: padding adds nothing to the sums.
    by_document = jnp.where(documents.members[..., None, None], x[:, :, None], 0)
    heads = "K" if projection.ndim == 3 else ""
    if documents.positions is None:
        rows, axes = projection[..., : x.shape[1], :], f"{heads}SR"
    else:
        rows, axes = projection[..., documents.positions, :], f"{heads}BSR"
    # The whole idea: S keys become R for each document, before any score is computed (section 4).
    summed = jnp.einsum(f"{axes},BSCKH->BCRKH", rows, by_document)
    return summed.reshape(x.shape[0], -1, *x.shape[2:])
