"""Decoder-only language model."""

from collections.abc import Mapping
from typing import Any

import jax
from flax import linen as nn

from transformer.attention.mixer import Outputs
from transformer.inspection import Edit
from transformer.layers.embedding import compute_logits, declare_output_matrix
from transformer.layers.stack_weights import init_cache
from transformer.models.input_checks import (
    check_cache_inputs,
    check_cache_length,
    resolve_dropout_rngs,
)
from transformer.models.model import LOGITS, Model, ModelOutput


class LanguageModel(Model):
    """Embeddings, a causal stack, and logits over the vocabulary (Radford et al. 2018).

    Without `config.causal` every token attends to the next one, and the model learns to copy it.
    Decoding from a cache is causal in any case.
    """

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,  # [B, T]
        *,
        positions: jax.Array | None = None,  # [B or 1, T]; None: 0 to T - 1
        segments: jax.Array | None = None,  # [B, T] documents, from 1; 0 is padding
        prefix_lengths: jax.Array | None = None,  # [B] prefix that all tokens attend to
        cache: tuple[Any, ...] | None = None,  # from `init_cache`; tokens go to `positions`
        dropout_rngs: jax.Array | None = None,  # [B] random keys, or Flax's rngs; None: no dropout
        outputs: Outputs = LOGITS,  # names of requested outputs
        edits: Mapping[str, Edit] | None = None,  # see `transformer.inspection`
    ) -> ModelOutput:
        """Return logits and hidden states.

        ValueError: shapes disagree, or inputs exceed a table of learned positions.
        """
        if self.has_rng("dropout") or getattr(dropout_rngs, "ndim", 1) != 1:
            dropout_rngs = resolve_dropout_rngs(self, dropout_rngs, tokens)
        if cache is not None:
            check_cache_inputs(cache, tokens, self.config.num_layers, positions, segments)
        output, table = self.apply_backbone(
            tokens,
            positions=positions,
            segments=segments,
            prefix_lengths=prefix_lengths,
            cache=cache,
            dropout_rngs=dropout_rngs,
            outputs=outputs,
            edits=edits,
        )
        matrix = declare_output_matrix(self, table, self.config)
        logits = None
        if "logits" in outputs:  # the trainer asks for none: its loss is fused with the matrix
            logits = compute_logits(output.x, matrix, self.config, self.context)
        return ModelOutput(logits, output.x, output.cache, output.aux)

    @nn.nowrap
    def init_cache(self, batch_size: int, length: int) -> tuple[Any, ...]:
        """Return an empty cache for `batch_size` examples of up to `length` tokens, by layer.

        ValueError: there are fewer learned positions than `length`.
        """
        check_cache_length(self.config, length)
        return init_cache(self.config.layer_pattern, self.context, batch_size, length)
