"""Decoder-only language model."""

from collections.abc import Mapping
from typing import Any

from flax import linen as nn
from jaxtyping import Array, Int, Key

from transformer.attention.masks import Segments
from transformer.models.embedding import (
    compute_logits,
    declare_output_bias,
    declare_output_matrix,
)
from transformer.models.model import (
    LOGITS,
    Model,
    ModelOutput,
    check_cache_length,
)
from transformer.models.stack import init_cache
from transformer.taps import Edit, Outputs


class LanguageModel(Model):
    """Embeddings, a causal stack, and logits over the vocabulary (Radford et al. 2018).

    Without `config.causal` every token attends to the next one, and the model learns to copy it.
    Decoding from a cache is causal in any case.
    """

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segments: Segments | None = None,
        prefix_lengths: Int[Array, "#B"] | None = None,  # prefix that all tokens attend to
        cache: tuple[Any, ...] | None = None,
        dropout_rngs: Key[Array, "B"] | None = None,
        outputs: Outputs = LOGITS,
        edits: Mapping[str, Edit] | None = None,
    ) -> ModelOutput:
        """Return logits [B, T, V] and hidden states; `Model` describes the arguments."""
        output = self.apply_backbone(
            tokens,
            positions=positions,
            segments=segments,
            prefix_lengths=prefix_lengths,
            cache=cache,
            dropout_rngs=dropout_rngs,
            outputs=outputs,
            edits=edits,
        )
        matrix = declare_output_matrix(self, output.embedding_table, self.config, self.context)
        bias = declare_output_bias(self, self.config)
        logits = None
        if "logits" in outputs:  # the trainer asks for none: its loss is fused with the matrix
            logits = compute_logits(output.x, matrix, self.config, self.context, bias)
        return ModelOutput(logits, output.x, output.cache, output.aux)

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int) -> tuple[Any, ...]:
        """Return an empty cache for `batch_size` examples of up to `length` tokens, by layer.

        ValueError: there are fewer learned positions than `length`.
        """
        check_cache_length(self.config, length)
        return init_cache(self.config.layer_pattern, self.context, batch_size, length)
