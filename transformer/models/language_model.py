"""The decoder-only language model."""

from typing import Any

import jax
from flax import linen as nn

from transformer.attention.base import Outputs
from transformer.layers import stack
from transformer.models.base import (
    EXAMPLE_TOKENS,
    LOGITS,
    Model,
    ModelOutput,
    apply_backbone,
    check_cache_inputs,
    compute_logits,
    declare_output_matrix,
)


class LanguageModel(Model):
    """Embeddings, a causal stack, and logits over the vocabulary (Radford et al. 2018).

    With `config.causal` off every token sees the next one, and the model learns to copy it. With a
    cache it sees none ahead all the same: when it writes there is none.
    """

    @nn.nowrap
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (EXAMPLE_TOKENS,)

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,  # [B, T]
        *,
        positions: jax.Array | None = None,  # [B, T]; None: 0 to T - 1
        segments: jax.Array | None = None,  # [B, T] documents, from 1; 0 is padding
        prefix: jax.Array | None = None,  # [B] so many first positions are seen by all tokens
        cache: tuple[Any, ...] | None = None,  # from `init_cache`: positions says where tokens go
        dropout_rngs: jax.Array | None = None,  # [B] random keys; None: no dropout
        outputs: Outputs = LOGITS,
    ) -> ModelOutput:
        """Raises ValueError for inputs longer than a table of learned positions."""
        config = self.config
        check_cache_inputs(cache, positions, segments)
        output, words = apply_backbone(
            self,
            tokens,
            config=config,
            context=self.context,
            positions=positions,
            segments=segments,
            prefix_lengths=prefix,
            cache=cache,
            dropout_rngs=dropout_rngs,
            outputs=outputs,
        )
        matrix = words.T if config.tie_embeddings else declare_output_matrix(self, config)
        logits = compute_logits(output.x, matrix, self) if "logits" in outputs else None
        return ModelOutput(logits, output.x, output.cache, output.aux)

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int) -> tuple[Any, ...]:
        """An empty cache for `batch_size` examples of up to `length` tokens: one entry a layer.

        Raises ValueError for more tokens than there are learned positions.
        """
        limit = self.config.max_length
        if limit is not None and length > limit:
            raise ValueError(
                f"a cache of {length} tokens: the table of learned positions has {limit} rows; "
                "give a shorter one"
            )
        return stack.init_cache(self.config.layer_pattern, self.context, batch_size, length)
