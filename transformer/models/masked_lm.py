"""Masked language model: an encoder that predicts masked tokens."""

from collections.abc import Mapping

from flax import linen as nn
from jaxtyping import Array, Int, Key

from transformer.attention.masks import Segments
from transformer.layers.activations import ACTIVATIONS
from transformer.layers.basic import apply_linear, declare_weight
from transformer.layers.norms import Norm, NormConfig
from transformer.models.embedding import compute_logits, declare_output_matrix
from transformer.models.heads import pool_sequence
from transformer.models.model import LOGITS, Model, ModelOutput
from transformer.taps import Edit, Outputs


class MaskedLanguageModel(Model):
    """BERT (Devlin et al. 2019) with its masked-token head.

    The head is a linear layer, an activation (GELU) and a norm, then the output matrix with a bias
    for each token of the vocabulary (`config.masked_head`). `hidden` is the head's output before
    the matrix, [B, T, D].
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.config.causal:
            raise ValueError(
                "config.causal True: a masked language model reads both sides of a token; set it "
                "to False"
            )

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segments: Segments | None = None,
        token_types: Int[Array, "#B T"] | None = None,
        dropout_rngs: Key[Array, "B"] | None = None,
        outputs: Outputs = LOGITS,
        edits: Mapping[str, Edit] | None = None,
    ) -> ModelOutput:
        """Return `logits` [B, T, V]; `Model` describes the arguments."""
        config, context = self.config, self.context
        output = self.apply_backbone(
            tokens,
            positions=positions,
            segments=segments,
            token_types=token_types,
            dropout_rngs=dropout_rngs,
            outputs=outputs,
            edits=edits,
        )
        x, embed = output.x, {"embed": config.d_model}
        if config.pooler:
            # Unused here, but published checkpoints have its weights: it must be declared.
            pool_sequence(self, x, segments, "first", config, context)
        head = config.masked_head
        narrow = {"embed": config.embedding_width}  # that of the table, to which it may be tied
        x = apply_linear(self, "head", x, embed, narrow, context, bias=head.bias)
        x = ACTIVATIONS[head.activation](x)
        x = Norm(config.embedding_norm or NormConfig(), context, name="head_norm")(x)
        matrix = declare_output_matrix(self, output.embedding_table, config, context)
        bias = None
        if head.output_bias:
            bias = declare_weight(
                self,
                "head_output_bias",
                outputs={"vocab": config.padded_vocab_size},
                init=nn.initializers.zeros,
                dtype=config.precision.parameters,
            )
        logits = None
        if "logits" in outputs:
            logits = compute_logits(x, matrix, config, context, bias)
        return ModelOutput(logits, x, None, output.aux)
