"""Linformer: softmax attention to keys and values projected along the length.

Wang et al. 2020 (Linformer: Self-Attention with Linear Complexity). Each document of a row is
projected separately, to `rank` keys and values.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.attend import attend
from transformer.attention.document_boundaries import previous_segments, token_segments
from transformer.attention.masks import Mask
from transformer.attention.mixer import (
    Abilities,
    Mixer,
    MixerInputs,
    MixerOutput,
    ScoreFlops,
    register_mixer,
    reject_mask_patterns,
    reject_weights,
)
from transformer.attention.projections import (
    combine_heads,
    project_keys,
    project_qkv,
    project_queries,
    project_values,
)
from transformer.attention.reference import ScoreSpec
from transformer.attention.variants.linear_configs import LinformerConfig
from transformer.layers.basic import declare_weight, fold_in
from transformer.taps import HEAD_OUTPUTS, Outputs


class KeyPlacement(NamedTuple):
    """Document and position of each key of a row; selects its rows of the projection."""

    in_document: jax.Array  # [B, S, documents] True where the key is of the document
    positions: jax.Array | None = None  # [B, S] its place in the document; None: in the row
    segments: jax.Array | None = None  # [B, documents] what the mask calls them; None: there is one
    too_many_documents: jax.Array | None = None  # [B] whether there are more


def place_keys(
    mask: Mask,
    batch_size: int,  # B
    length: int,  # S
    max_documents: int,  # of documents
) -> KeyPlacement:
    """Number the documents of each row in order of appearance. Padding belongs to none."""
    own = mask.segments if mask.key_segments is None else mask.key_segments
    own = None if mask.segments is None else own
    documents = token_segments(mask.replace(segments=own), length)
    if documents is None:
        return KeyPlacement(jnp.ones((batch_size, length, 1), bool))
    segments = jnp.broadcast_to(documents, (batch_size, length))
    if own is None:
        return KeyPlacement((segments != 0)[:, :, None])
    begins = (segments != 0) & (segments != previous_segments(segments))
    index = jnp.arange(length)[None, :]
    # A token's place in its document: each document starts with the first row of the projection.
    places = index - jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
    numbers = jnp.cumsum(begins, axis=1)[:, :, None]
    # Documents in order of appearance get slots 0, 1, ...: shapes are static, so their largest
    # number is a setting and not read from the data.
    members = (numbers == 1 + jnp.arange(max_documents)[None, None, :]) & (segments != 0)[
        :, :, None
    ]
    called = jnp.max(jnp.where(members, segments[:, :, None], 0), axis=1)
    return KeyPlacement(members, places, called, numbers[:, -1, 0] > max_documents)


def project_length(
    projection: jax.Array,  # [length, rank], or [K, length, rank] with one for each head
    x: jax.Array,  # [B, S, K, H]
    placement: KeyPlacement,
) -> jax.Array:  # [B, documents * rank, K, H]
    """Sum over the length: each key times the projection row of its position, per document."""
    # A copy of the keys for each document, with zeros elsewhere: padding adds nothing to the sums.
    by_document = jnp.where(placement.in_document[..., None, None], x[:, :, None], 0)
    heads = "K" if projection.ndim == 3 else ""
    if placement.positions is None:
        rows, axes = projection[..., : x.shape[1], :], f"{heads}SR"
    else:
        rows, axes = projection[..., placement.positions, :], f"{heads}BSR"
    # The whole idea: S keys become R for each document, before any score is computed (section 4).
    summed = jnp.einsum(f"{axes},BSCKH->BCRKH", rows, by_document)
    return summed.reshape(x.shape[0], -1, *x.shape[2:])


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
    def constants(config: LinformerConfig, layer: int, width: int) -> None:
        return None

    @staticmethod
    def score_flops(config: LinformerConfig, width: int, length: int) -> ScoreFlops:
        """Count the projection of keys and values and attention to `rank` keys (one document)."""
        each = (
            2
            * (config.num_heads + config.resolved_num_kv_heads)
            * config.resolved_head_dim(width)
            * config.rank
        )
        return ScoreFlops(full=2 * each, causal=2 * each)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> Any:
        raise ValueError(
            "mixer linformer: cannot decode, because each of its keys mixes all tokens; use "
            "it in an encoder"
        )

    @nn.compact
    def __call__(self, x: jax.Array, inputs: MixerInputs) -> MixerOutput:
        config, context = self.config, self.context
        if inputs.memory is None:
            q, k, v = project_qkv(
                self, x, inputs.positions, config, context, position=config.position
            )
        else:
            q = project_queries(self, x, config, context)
            k, v = (
                heads(self, inputs.memory, config, context)
                for heads in (project_keys, project_values)
            )
        self.check_inputs(inputs.mask, k.shape[1], inputs.outputs)
        if inputs.cache is not None:
            self.init_cache(*x.shape[:2])
        slots = place_keys(inputs.mask, k.shape[0], k.shape[1], config.max_documents)
        rows = self.projection_matrices()
        k, v = project_length(rows[0], k, slots), project_length(rows[1], v, slots)
        scoring = ScoreSpec(
            scale=1 / math.sqrt(q.shape[-1]),
            softmax_dtype=context.precision.softmax,
            dropout_rate=config.dropout,
            dropout_rngs=fold_in(inputs.dropout_rngs, 0),
        )
        # Projected keys mix all tokens of a document, so only whole documents can be hidden.
        key_mask = Mask()
        if slots.segments is not None:
            numbers = jnp.repeat(slots.segments, config.rank, axis=1)
            key_mask = Mask(segments=inputs.mask.segments, key_segments=numbers)
        where: Any = dict(hardware=context.hardware, constrain=context.constrain)
        y = attend(q, k, v, key_mask, scoring, **where).y
        if slots.too_many_documents is not None:
            # Known only at run time, when nothing can be raised: NaN is noticed, results without
            # some of the documents would not be.
            y = jnp.where(slots.too_many_documents[:, None, None, None], jnp.nan, y)
        return combine_heads(self, y, inputs)

    @nn.nowrap
    def check_inputs(self, mask: Mask, length: int, outputs: Outputs) -> None:
        config = self.config
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
        reject_weights(config.kind, outputs)

    def projection_matrices(self) -> tuple[jax.Array, jax.Array]:
        """Return E and F: [length, rank] for all heads, or [K, length, rank].

        They are initialized as matrices that sum over the length. Their axes are declared
        as those of a table, because a token is multiplied by one row only.
        """
        config, context = self.config, self.context
        heads = {"kv_heads": config.resolved_num_kv_heads} if config.sharing == "none" else {}
        axes = {**heads, "positions": config.max_length, "rank": config.rank}
        init = context.initialization.matrix_initializer({"positions": config.max_length})
        declared = [
            declare_weight(self, name, outputs=axes, init=init, dtype=context.precision.parameters)
            for name in ("key_rows", "value_rows")[: 1 if config.sharing == "key_value" else 2]
        ]
        dtype = context.precision.compute
        return declared[0].astype(dtype), declared[-1].astype(dtype)
