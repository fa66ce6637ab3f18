"""The masked language model: an encoder that says which word stands at each place."""

import jax
from flax import linen as nn

from transformer.activations import ACTIVATIONS
from transformer.backbone import backbone
from transformer.linear import linear
from transformer.mixers import Outputs
from transformer.model import (
    LOGITS,
    TOKENS,
    Model,
    ModelOutput,
    output_table,
    vocabulary_logits,
)
from transformer.norms import Norm, NormConfig
from transformer.pooling import pool
from transformer.weights import weight


class MaskedLanguageModel(Model):
    """BERT (Devlin et al. 2019) with its masked-word head.

    The head is a linear map, GELU and LayerNorm, then logits by the embedding table with a bias for
    each word. `hidden` is what the output matrix is applied to: [B, T, D] after the head's norm.
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
        types: jax.Array | None = None,  # [B, T] which sentence
        dropout_rngs: jax.Array | None = None,  # [B] random keys; None: no dropout
        outputs: Outputs = LOGITS,
    ) -> ModelOutput:
        """Raises ValueError for inputs longer than a table of learned positions."""
        config, shared = self.config, self.shared
        output, words = backbone(
            self,
            tokens,
            config=config,
            shared=shared,
            positions=positions,
            segments=segments,
            types=types,
            dropout_rngs=dropout_rngs,
            outputs=outputs,
        )
        x, width = output.x, {"embed": config.width}
        if config.pooler:
            pool(self, x, segments, "first", config, shared)
        x = linear(self, "head", x, width, width, shared, bias=True)
        x = ACTIVATIONS["gelu"](x)
        x = Norm(config.embedding_norm or NormConfig(), config.precision, name="head_norm")(x)
        matrix = words.T if config.tied else output_table(self, config)
        rows, zeros = {"vocab": config.vocab_rows}, nn.initializers.zeros
        dtype = config.precision.parameters
        bias = weight(self, "head_output_bias", outputs=rows, init=zeros, dtype=dtype)
        logits = vocabulary_logits(x, matrix, self, bias) if "logits" in outputs else None
        return ModelOutput(logits, x, None, output.aux)
