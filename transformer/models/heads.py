"""Encoders with a classification head: of whole sequences (`Classifier`) or tokens (`Tagger`)."""

from collections.abc import Mapping
from typing import ClassVar, Literal, get_args

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, Key

from transformer.attention.masks import Segments
from transformer.layers.activations import ACTIVATIONS
from transformer.layers.basic import apply_linear, dropout
from transformer.layers.norms import Norm
from transformer.model_context import ModelContext
from transformer.models.config import TransformerConfig
from transformer.models.embedding import head_rngs
from transformer.models.encoder_decoder import apply_both_sides
from transformer.models.model import LOGITS, Model, ModelOutput
from transformer.taps import Edit, Outputs
from transformer.validation import check_integer

Pooling = Literal["first", "last", "mean", "max"]
"""Vector of a sequence: that of its first or last token, the mean or the maximum of all."""


def check_head(num_classes: int, head_dropout: float) -> None:
    """Raise ValueError for a number of classes or a dropout rate that no head can have."""
    check_integer("num_classes", num_classes, 1)
    if not 0 <= head_dropout < 1:
        raise ValueError(f"head_dropout {head_dropout}: give a number in [0, 1)")


def check_pooling(pooling: str, causal: bool) -> None:
    """Raise ValueError for an unknown pooling, and for the first token of a causal model."""
    if pooling not in get_args(Pooling):
        known = ", ".join(get_args(Pooling))
        raise ValueError(f"pooling {pooling}: is not known; give one of {known}")
    if causal and pooling == "first":
        raise ValueError(
            "pooling first: the first token of a causal model sees no other; set config.causal "
            "to False, or pooling to mean"
        )


def pool_sequence(
    module: nn.Module,
    x: Float[Array, "B T D"],
    segments: Int[Array, "B T"] | None,  # 0 is padding
    pooling: Pooling,
    config: TransformerConfig,
    context: ModelContext,
) -> Float[Array, "B D"]:
    """Return one vector for each sequence: of its first ([CLS]) or last token, mean or maximum.

    "last" is the last token that is not padding, as in decoders. "max" is the maximum of each
    feature over the tokens (Collobert et al. 2011, section 3.3.2). With `config.pooler` a layer
    `pooler` of `module` follows, as in BERT.
    """
    match pooling:
        case "first":
            pooled = x[:, :1]
        case "last":
            pooled = last_token(x, segments)
        case "mean":
            pooled = masked_mean(x, segments)
        case _:
            pooled = masked_max(x, segments)
    return apply_pooler(module, pooled, config, context)[:, 0]


def apply_pooler(
    module: nn.Module, x: Float[Array, "B T D"], config: TransformerConfig, context: ModelContext
) -> Float[Array, "B T D"]:
    """Apply the layer `pooler` of `module`, if the model has one."""
    if not config.pooler:
        return x
    layer, width = config.pooler_layer, {"embed": config.d_model}
    x = apply_linear(module, "pooler", x, width, width, context, bias=layer.bias)
    x = jnp.tanh(x) if layer.activation == "tanh" else ACTIVATIONS[layer.activation](x)
    return x if layer.norm is None else Norm(layer.norm, context, name="pooler_norm")(x)


def last_token(
    x: Float[Array, "B T D"],
    segments: Int[Array, "B T"] | None,  # 0 is padding
) -> Float[Array, "B 1 D"]:
    """Return the last token that is not padding; the first one if all are."""
    if segments is None:
        return x[:, -1:]
    return jnp.take_along_axis(x, last_index(segments)[:, None, None], axis=1)


def last_index(segments: Segments) -> Int[Array, "B"]:
    """Return the index of the last token that is not padding; 0 if all are."""
    return jnp.max(jnp.arange(segments.shape[1])[None] * (segments != 0), axis=1)


def last_token_first(
    tokens: Int[Array, "B T"],
    segments: Segments | None,  # 0 is padding
) -> Int[Array, "B T"]:
    """Return tokens shifted right by one, with the last that is not padding at the front."""
    last = tokens[:, -1:]
    if segments is not None:
        last = jnp.take_along_axis(tokens, last_index(segments)[:, None], axis=1)
    return jnp.concatenate([last, tokens[:, :-1]], axis=1)


def masked_mean(
    x: Float[Array, "B T D"],
    segments: Int[Array, "B T"] | None,  # 0 is padding
) -> Float[Array, "B 1 D"]:
    """Return the mean over tokens that are not padding; zeros if all are."""
    if segments is None:
        return jnp.mean(x, axis=1, keepdims=True)
    token_mask = (segments != 0).astype(x.dtype)[:, :, None]
    count = jnp.maximum(jnp.sum(token_mask, 1, keepdims=True), 1)
    return jnp.sum(x * token_mask, axis=1, keepdims=True) / count


def masked_max(
    x: Float[Array, "B T D"],
    segments: Int[Array, "B T"] | None,  # 0 is padding
) -> Float[Array, "B 1 D"]:
    """Return the maximum of each feature over tokens that are not padding; zeros if all are."""
    if segments is None:
        return jnp.max(x, axis=1, keepdims=True)
    is_token = (segments != 0)[:, :, None]
    highest = jnp.max(x, axis=1, keepdims=True, where=is_token, initial=-jnp.inf)
    return jnp.where(is_token.any(1, keepdims=True), highest, 0)


class Classifier(Model):
    """An encoder, pooling, and logits of C classes for each sequence.

    With `pooling` "first", the first token should be one added for the purpose, such as BERT's
    [CLS] (Devlin et al. 2019, section 3). With `config.encoder` encoder and decoder both read the
    text, the decoder with the last token moved to the front, and its states are pooled (Lewis et
    al. 2020, section 3.1).
    """

    num_classes: int = 2  # C
    pooling: Pooling = "first"  # vector of a sequence
    end_token: int | None = None  # pooling "last" takes the last of these; None: of all tokens
    head_dropout: float = 0.0  # dropout rate of the pooled vector
    head_bias: bool = True  # add a bias to each logit
    predicted_fraction: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self.num_classes, self.head_dropout)
        check_pooling(self.pooling, self.config.causal)
        if self.end_token is not None and self.pooling != "last":
            raise ValueError(f"end_token {self.end_token}: is for pooling last; set it to None")

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        # 1 for tokens; 0 is padding
        segments: Segments | None = None,
        token_types: Int[Array, "#B T"] | None = None,
        dropout_rngs: Key[Array, "B"] | None = None,
        outputs: Outputs = LOGITS,
        edits: Mapping[str, Edit] | None = None,
    ) -> ModelOutput:
        """Return `logits` [B, C]; `Model` describes the arguments."""
        config, context = self.config, self.context
        if config.encoder is None:
            output = self.apply_backbone(
                tokens,
                positions=positions,
                segments=segments,
                single_document=True,
                token_types=token_types,
                dropout_rngs=dropout_rngs,
                outputs=outputs,
                edits=edits,
            )
        else:
            output = apply_both_sides(
                self,
                tokens,
                last_token_first(tokens, segments),
                source_segments=segments,
                source_positions=positions,
                positions=positions,
                segments=segments,
                dropout_rngs=dropout_rngs,
                outputs=outputs,
                edits=edits,
            )
        candidates = segments
        if self.end_token is not None:
            is_end = tokens == self.end_token
            is_end = is_end if segments is None else is_end & (segments != 0)
            candidates = is_end.astype(jnp.int32)
        pooled = pool_sequence(self, output.x, candidates, self.pooling, config, context)
        rngs = head_rngs(output.dropout_rngs, context)
        pooled = dropout(pooled, self.head_dropout, rngs)[:, None]
        embed, classes = {"embed": config.d_model}, {"classes": self.num_classes}
        bias = self.head_bias
        logits = apply_linear(self, "head", pooled, embed, classes, context, bias=bias)[:, 0]
        return ModelOutput(logits, output.x, None, output.aux, output.encoder_aux)


class Tagger(Model):
    """An encoder, and logits of C tags for each token."""

    num_classes: int = 2  # C
    head_dropout: float = 0.0  # dropout rate of the hidden states
    predicted_fraction: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_head(self.num_classes, self.head_dropout)

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
        """Return `logits` [B, T, C]; `Model` describes the arguments."""
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
        x = apply_pooler(self, output.x, config, context)
        x = dropout(x, self.head_dropout, head_rngs(output.dropout_rngs, context))
        embed, classes = {"embed": config.d_model}, {"classes": self.num_classes}
        logits = apply_linear(self, "head", x, embed, classes, context, bias=True)
        return ModelOutput(logits, output.x, None, output.aux)


class QuestionAnswerer(Tagger):
    """A tagger whose two logits of each token say that an answer starts there, and ends there.

    Devlin et al. 2019, section 4.2.
    """
