"""The encoder that gives every token a tag."""

from typing import ClassVar

import jax
from flax import linen as nn

from transformer.backbone import apply_backbone
from transformer.dropout import dropout, fold_in
from transformer.linear import apply_linear
from transformer.mixers import Outputs
from transformer.model import EXAMPLE_TOKENS, LOGITS, Model, ModelOutput


class Tagger(Model):
    """A stack over tokens, and logits of C tags for each: a transducer of equal lengths."""

    num_classes: int = 2  # C
    head_dropout: float = 0.0  # of each token's vector
    predicted_fraction: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.num_classes < 1:
            raise ValueError(f"classes {self.num_classes}: give 1 or more")
        super().__post_init__()

    @nn.nowrap
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (EXAMPLE_TOKENS,)

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,  # [B, T]
        *,
        positions: jax.Array | None = None,  # [B, T]; None: 0 to T - 1
        segments: jax.Array | None = None,  # [B, T] sequences, from 1; 0 is padding
        types: jax.Array | None = None,  # [B, T] which sentence
        dropout_rngs: jax.Array | None = None,  # [B] random keys; None: no dropout
        outputs: Outputs = LOGITS,
    ) -> ModelOutput:
        """`logits` are [B, T, C]. Raises ValueError for inputs longer than a position table."""
        config, shared = self.config, self.context
        output, _ = apply_backbone(
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
        x = dropout(output.x, self.head_dropout, fold_in(dropout_rngs, shared.num_layers + 1))
        embed, classes = {"embed": config.d_model}, {"classes": self.num_classes}
        logits = apply_linear(self, "head", x, embed, classes, shared, bias=True)
        return ModelOutput(logits, output.x, None, output.aux)
