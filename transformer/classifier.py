"""The encoder that puts a whole sequence into one of several classes."""

from typing import ClassVar

import jax
from flax import linen as nn

from transformer.backbone import apply_backbone
from transformer.dropout import dropout, fold_in
from transformer.linear import apply_linear
from transformer.mixers import Outputs
from transformer.model import EXAMPLE_TOKENS, LOGITS, Model, ModelOutput
from transformer.pooling import Pooling, check_pooling, pool_sequence


class Classifier(Model):
    """A stack over tokens, one vector for all of them, and logits of C classes.

    With `pooling` "first", the first token is one put there for the purpose: BERT's [CLS] (Devlin
    et al. 2019, section 3).
    """

    num_classes: int = 2  # C
    pooling: Pooling = "first"
    head_dropout: float = 0.0  # of the pooled vector
    predicted_fraction: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.num_classes < 1:
            raise ValueError(f"classes {self.num_classes}: give 1 or more")
        check_pooling(self.pooling)
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
        segments: jax.Array | None = None,  # [B, T] 1, and 0 where there is padding
        types: jax.Array | None = None,  # [B, T] which sentence
        dropout_rngs: jax.Array | None = None,  # [B] random keys; None: no dropout
        outputs: Outputs = LOGITS,
    ) -> ModelOutput:
        """`logits` are [B, C]. Raises ValueError for inputs longer than a table of positions."""
        config, shared = self.config, self.context
        output, _ = apply_backbone(
            self,
            tokens,
            config=config,
            context=shared,
            positions=positions,
            segments=segments,
            single_document=True,
            token_types=types,
            dropout_rngs=dropout_rngs,
            outputs=outputs,
        )
        pooled = pool_sequence(self, output.x, segments, self.pooling, config, shared)
        pooled = dropout(pooled, self.head_dropout, fold_in(dropout_rngs, shared.num_layers + 1))
        embed, classes = {"embed": config.d_model}, {"classes": self.num_classes}
        logits = apply_linear(self, "head", pooled[:, None], embed, classes, shared, bias=True)[
            :, 0
        ]
        return ModelOutput(logits, output.x, None, output.aux)
