"""Classifier of continuous inputs: patches of an image, frames of audio, or nodes of a graph."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int, Key

from transformer.attention.masks import Mask, MaskPattern, Segments, positions_or_arange
from transformer.attention.mixer import MixerInputs
from transformer.layers.basic import apply_linear, dropout
from transformer.layers.position_embedding import NoPosition, embed_positions
from transformer.models.embedding import finish_embedding, head_rngs
from transformer.models.heads import Pooling, check_head, check_pooling, pool_sequence
from transformer.models.model import (
    LOGITS,
    Model,
    ModelOutput,
    apply_layers,
    reject_explicit_axes,
)
from transformer.models.requests import make_taps
from transformer.models.stack import declare_shared_bias
from transformer.taps import Outputs
from transformer.validation import check_integer, check_positions, check_segments, check_shapes


class FeatureClassifier(Model):
    """An encoder of vectors, pooling, and logits of C classes for each example.

    A linear layer takes the place of the token embedding, as in the Vision Transformer
    (Dosovitskiy et al. 2021, equation 1): what comes before it, such as cutting an image into
    patches, is data preparation. With `adjacency`, attention is along the edges of a graph.
    """

    num_features: int = 1  # I, numbers of each input vector
    num_classes: int = 2  # C
    pooling: Pooling = "mean"  # vector of an example: its first input's, the mean or the maximum
    head_dropout: float = 0.0  # dropout rate of the pooled vector
    predicted_fraction: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("num_features", self.num_features, 1)
        check_head(self.num_classes, self.head_dropout)
        check_pooling(self.pooling, self.config.causal)
        if self.config.embedding_dim:
            raise ValueError(
                f"TransformerConfig.embedding_dim {self.config.embedding_dim}: is for models of "
                "tokens; set it to 0"
            )

    @nn.nowrap
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((1, 1, self.num_features), jnp.float32),)

    @nn.compact
    def __call__(
        self,
        features: Float[Array, "B T I"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        # 1 for inputs; 0 is padding
        segments: Segments | None = None,
        adjacency: Bool[Array, "#B T T"] | None = None,  # True: the first attends to the second
        dropout_rngs: Key[Array, "B"] | None = None,
        outputs: Outputs = LOGITS,
    ) -> ModelOutput:
        """Return `logits` [B, C].

        A node with an empty row in `adjacency` attends to nothing; add loops to `adjacency` if it
        should attend to itself.

        Raises:
          ValueError: If shapes disagree, or inputs exceed a table of learned positions.
        """
        check_shapes(
            {"I": self.num_features},
            features=(features, "B T I", float),
            positions=(positions, "B? T | None", int),
            segments=(segments, "B? T | None", int, bool),
            adjacency=(adjacency, "B? T T | None", bool),
        )
        dropout_rngs = self.example_rngs(dropout_rngs, features.shape[0])
        config, context = self.config, self.context
        check_positions("inputs", features.shape[1], positions, config.max_length)
        check_segments("segments", segments)
        reject_explicit_axes(features=features)
        embed = {"embed": config.d_model}
        x = features.astype(config.precision.compute)
        x = apply_linear(
            self, "input", x, {"features": self.num_features}, embed, context, bias=True
        )
        positions = positions_or_arange(positions, features.shape[1])
        if not isinstance(config.position_embedding, NoPosition):
            vectors = embed_positions(self, positions, config.position_embedding, context)
            x = x + vectors.astype(x.dtype)
        x = finish_embedding(x, dropout_rngs, config, context)
        mask = Mask(
            MaskPattern(causal=config.causal),
            positions=positions,
            segments=segments,
            allowed=adjacency,
            single_document=True,
        )
        inputs = MixerInputs(
            positions,
            mask,
            dropout_rngs=dropout_rngs,
            shared_bias=declare_shared_bias(self, config.layer_pattern, context),
            outputs=outputs,
            taps=make_taps(config, outputs, None).layers,
        )
        output = apply_layers(config, config, context, x, inputs)
        pooled = pool_sequence(self, output.x, segments, self.pooling, config, context)
        pooled = dropout(pooled, self.head_dropout, head_rngs(dropout_rngs, context))[:, None]
        classes = {"classes": self.num_classes}
        logits = apply_linear(self, "head", pooled, embed, classes, context, bias=True)[:, 0]
        return ModelOutput(logits, output.x, None, output.aux)
