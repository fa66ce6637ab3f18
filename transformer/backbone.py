"""What models of one stack share: tokens embedded, then passed through the layers."""

from typing import Any, NamedTuple

import jax
from flax import linen as nn

from transformer.config import TransformerConfig
from transformer.embedding import declare_embedding, embed_tokens
from transformer.masks import Mask, MaskPattern
from transformer.mixers import Outputs
from transformer.model import apply_layers, check_tokens, positions_or_arange
from transformer.shared import ModelContext
from transformer.stack import StackOutput


class BackboneOutput(NamedTuple):
    """Tokens as the layers have read them."""

    stack_output: StackOutput  # x [B, T, D] after the final norm
    embedding_table: jax.Array  # [V padded, D] the embedding table


def apply_backbone(
    module: nn.Module,
    tokens: jax.Array,  # [B, T]
    *,
    config: TransformerConfig,
    context: ModelContext,
    positions: jax.Array | None,  # [B, T]; None: 0 to T - 1
    segments: jax.Array | None,  # [B, T] documents, from 1; 0 is padding
    single_document: bool = False,  # whether the segments of a row are one and padding
    token_types: jax.Array | None = None,  # [B, T]
    prefix_lengths: jax.Array | None = None,  # [B]
    cache: tuple[Any, ...] | None = None,
    dropout_rngs: jax.Array | None,  # [B]
    outputs: Outputs,
) -> BackboneOutput:
    """Declares embeddings and layers of `module`, so that all such models have one layout."""
    check_tokens(tokens, config, positions)
    positions = positions_or_arange(positions, tokens)
    words = declare_embedding(module, "embedding", config.padded_vocab_size, config)
    given: dict[str, Any] = dict(positions=positions, dropout_rngs=dropout_rngs)
    x = embed_tokens(
        module, words, tokens, token_types=token_types, config=config, context=context, **given
    )
    # Behind the newest token of a cache there is nothing yet, but room: no model sees it.
    causal = config.causal or cache is not None
    pattern = MaskPattern(causal=causal, prefix=prefix_lengths is not None)
    mask = Mask(
        pattern,
        positions=positions,
        segments=segments,
        prefix_lengths=prefix_lengths,
        single_document=single_document,
    )
    return BackboneOutput(
        apply_layers(config, config, context, x, mask=mask, cache=cache, outputs=outputs, **given),
        words,
    )
