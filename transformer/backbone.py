"""What models of one stack share: tokens embedded, then passed through the layers."""

from typing import Any, NamedTuple

import jax
from flax import linen as nn

from transformer.config import TransformerConfig
from transformer.embedding import embed, word_table
from transformer.masks import Mask, Pattern
from transformer.mixers import Outputs
from transformer.model import check_tokens, layers, or_arange
from transformer.shared import Shared
from transformer.stack import StackOutput


class Read(NamedTuple):
    """Tokens as the layers have read them."""

    stack: StackOutput  # x [B, T, D] after the final norm
    words: jax.Array  # [V padded, D] the embedding table


def backbone(
    module: nn.Module,
    tokens: jax.Array,  # [B, T]
    *,
    config: TransformerConfig,
    shared: Shared,
    positions: jax.Array | None,  # [B, T]; None: 0 to T - 1
    segments: jax.Array | None,  # [B, T] documents, from 1; 0 is padding
    one_document: bool = False,  # whether the segments of a row are one and padding
    types: jax.Array | None = None,  # [B, T]
    prefix: jax.Array | None = None,  # [B]
    cache: tuple[Any, ...] | None = None,
    dropout_rngs: jax.Array | None,  # [B]
    outputs: Outputs,
) -> Read:
    """Declares embeddings and layers of `module`, so that all such models have one layout."""
    check_tokens(tokens, config, positions)
    positions = or_arange(positions, tokens)
    words = word_table(module, "embedding", config.vocab_rows, config)
    given: dict[str, Any] = dict(positions=positions, dropout_rngs=dropout_rngs)
    x = embed(module, words, tokens, types=types, config=config, shared=shared, **given)
    # Behind the newest token of a cache there is nothing yet, but room: no model sees it.
    causal = config.causal or cache is not None
    pattern = Pattern(causal=causal, prefix=prefix is not None)
    mask = Mask(
        pattern,
        positions=positions,
        segments=segments,
        prefix=prefix,
        one_document=one_document,
    )
    return Read(
        layers(config, config, shared, x, mask=mask, cache=cache, outputs=outputs, **given), words
    )
