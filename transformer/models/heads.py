"""One vector for a whole sequence: that of its first token, or the mean of all.

The encoder that puts a whole sequence into one of several classes.

The encoder that gives every token a tag.
"""

from typing import ClassVar, get_args

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer.attention.base import Outputs
from transformer.config import Pooling, TransformerConfig
from transformer.context import ModelContext
from transformer.layers.dropout import dropout, fold_in
from transformer.layers.params import apply_linear
from transformer.models.base import EXAMPLE_TOKENS, LOGITS, Model, ModelOutput, apply_backbone


def check_pooling(pooling: str) -> None:
    """Raises ValueError for a pooling that is not known."""
    if pooling not in get_args(Pooling):
        known = ", ".join(get_args(Pooling))
        raise ValueError(f"pooling {pooling}: is not known; give one of {known}")


def pool_sequence(
    module: nn.Module,
    x: jax.Array,  # [B, T, D]
    segments: jax.Array | None,  # [B, T] 0 is padding
    pooling: Pooling,
    config: TransformerConfig,
    context: ModelContext,
) -> jax.Array:  # [B, D]
    """The first token's vector (a [CLS] that has attended to everything), or the mean of real ones.

    With `config.pooler` a linear map and tanh follow, as in BERT (Devlin et al. 2019).
    """
    pooled = x[:, :1] if pooling == "first" else masked_mean(x, segments)
    if config.pooler:
        width = {"embed": config.d_model}
        pooled = jnp.tanh(apply_linear(module, "pooler", pooled, width, width, context, bias=True))
    return pooled[:, 0]


def masked_mean(
    x: jax.Array,  # [B, T, D]
    segments: jax.Array | None,  # [B, T] 0 is padding
) -> jax.Array:  # [B, 1, D]
    """The mean over tokens that are no padding; zeros where all are."""
    if segments is None:
        return jnp.mean(x, axis=1, keepdims=True)
    real = (segments != 0).astype(x.dtype)[:, :, None]
    return jnp.sum(x * real, axis=1, keepdims=True) / jnp.maximum(
        jnp.sum(real, 1, keepdims=True), 1
    )


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
            raise ValueError(f"num_classes {self.num_classes}: give 1 or more")
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


class Tagger(Model):
    """A stack over tokens, and logits of C tags for each: a transducer of equal lengths."""

    num_classes: int = 2  # C
    head_dropout: float = 0.0  # of each token's vector
    predicted_fraction: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        if self.num_classes < 1:
            raise ValueError(f"num_classes {self.num_classes}: give 1 or more")
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
