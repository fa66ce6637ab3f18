"""The masked language model: an encoder that says which word stands at each place."""

import jax
from flax import linen as nn

from transformer.attention.base import Outputs
from transformer.layers.config import NormConfig
from transformer.layers.feedforward import ACTIVATIONS
from transformer.layers.norms import Norm
from transformer.layers.params import apply_linear, declare_weight
from transformer.models.base import (
    EXAMPLE_TOKENS,
    LOGITS,
    Model,
    ModelOutput,
    apply_backbone,
    compute_logits,
    declare_output_matrix,
)
from transformer.models.heads import pool_sequence


class MaskedLanguageModel(Model):
    """BERT (Devlin et al. 2019) with its masked-word head.

    The head is a linear map, GELU and LayerNorm, then logits by the embedding table with a bias for
    each word. `hidden` is what the output matrix is applied to: [B, T, D] after the head's norm.
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
        types: jax.Array | None = None,  # [B, T] which sentence
        dropout_rngs: jax.Array | None = None,  # [B] random keys; None: no dropout
        outputs: Outputs = LOGITS,
    ) -> ModelOutput:
        """Raises ValueError for inputs longer than a table of learned positions."""
        config, shared = self.config, self.context
        output, words = apply_backbone(
            self,
            tokens,
            config=config,
            context=shared,
            positions=positions,
            segments=segments,
            token_types=types,
            dropout_rngs=dropout_rngs,
            outputs=outputs,
        )
        x, width = output.x, {"embed": config.d_model}
        if config.pooler:
            pool_sequence(self, x, segments, "first", config, shared)
        x = apply_linear(self, "head", x, width, width, shared, bias=True)
        x = ACTIVATIONS["gelu"](x)
        x = Norm(config.embedding_norm or NormConfig(), config.precision, name="head_norm")(x)
        matrix = words.T if config.tie_embeddings else declare_output_matrix(self, config)
        rows, zeros = {"vocab": config.padded_vocab_size}, nn.initializers.zeros
        dtype = config.precision.parameters
        bias = declare_weight(self, "head_output_bias", outputs=rows, init=zeros, dtype=dtype)
        logits = compute_logits(x, matrix, self, bias) if "logits" in outputs else None
        return ModelOutput(logits, x, None, output.aux)
