"""The decoder-only language model."""

from typing import Any

import jax
from flax import linen as nn

from transformer import stack
from transformer.backbone import backbone
from transformer.mixers import Outputs
from transformer.model import (
    LOGITS,
    TOKENS,
    Model,
    ModelOutput,
    check_cache,
    output_table,
    vocabulary_logits,
)


class LanguageModel(Model):
    """Embeddings, a causal stack, and logits over the vocabulary (Radford et al. 2018).

    With `config.causal` off every token sees the next one, and the model learns to copy it. With a
    cache it sees none ahead all the same: when it writes there is none.
    """

    @nn.nowrap
    def example(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (TOKENS,)

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
        check_cache(cache, positions, segments)
        output, words = backbone(
            self,
            tokens,
            config=config,
            shared=self.shared,
            positions=positions,
            segments=segments,
            prefix=prefix,
            cache=cache,
            dropout_rngs=dropout_rngs,
            outputs=outputs,
        )
        matrix = words.T if config.tied else output_table(self, config)
        logits = vocabulary_logits(output.x, matrix, self) if "logits" in outputs else None
        return ModelOutput(logits, output.x, output.cache, output.aux)

    @nn.nowrap
    def init_cache(self, batch: int, length: int) -> tuple[Any, ...]:
        """An empty cache for `batch` examples of up to `length` tokens: one entry a layer.

        Raises ValueError for more tokens than there are learned positions.
        """
        limit = self.config.max_length
        if limit is not None and length > limit:
            raise ValueError(
                f"a cache of {length} tokens: the table of learned positions has {limit} rows; "
                "give a shorter one"
            )
        return stack.init_cache(self.config.pattern, self.shared, batch, length)
