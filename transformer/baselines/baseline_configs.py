"""Settings of the pre-transformer baselines: mixers, and whole models (a bag of embeddings, GNMT).

Importing this module loads no JAX.
"""

import dataclasses
from typing import Any, ClassVar

from transformer.attention.attention_config import (
    AdditiveScore,
    BilinearScore,
    DotScore,
    MixerConfig,
)
from transformer.config import BlockConfig, EncoderConfig, TransformerConfig
from transformer.layers.layer_config import FeedForwardConfig
from transformer.validation import check_at_least, check_fraction


@dataclasses.dataclass(frozen=True)
class IdentityConfig(MixerConfig):
    """y = x: no information moves between tokens. Used by bag-of-embeddings models."""

    kind: ClassVar[str] = "identity"


@dataclasses.dataclass(frozen=True)
class ConvolutionConfig(MixerConfig):
    """1-D convolution over the tokens of a document: y_t = sum_i W_i x_(t + i).

    Taps lie at i <= 0 under a causal mask and are centered otherwise. The cache holds the last
    k - 1 inputs.
    """

    kind: ClassVar[str] = "convolution"

    kernel_size: int = 3
    """k, number of taps, including the token itself."""
    separable: bool = False
    """Depthwise separable convolution (Kaiser et al. 2017): one weight per tap and channel,
    followed by one D x D matrix. k D + D^2 weights instead of k D^2."""

    def __post_init__(self) -> None:
        check_at_least("convolution.kernel_size", self.kernel_size, 1)


@dataclasses.dataclass(frozen=True)
class ElmanConfig(MixerConfig):
    """Simple recurrent network (Elman 1990): h_t = tanh(W x_t + U h_(t-1) + b).

    The cache is the state h.
    """

    kind: ClassVar[str] = "elman"

    hidden_size: int = 0
    """H, width of the state; 0: D. If H differs from D, the output is projected to D."""
    transition_depth: int = 1
    """Number of layers from one state to the next. More than 1 makes the transition an MLP of x_t
    and h_(t-1) (deep transition, Pascanu et al. 2014)."""

    def __post_init__(self) -> None:
        check_at_least("elman.hidden_size", self.hidden_size, 0)
        check_at_least("elman.transition_depth", self.transition_depth, 1)


@dataclasses.dataclass(frozen=True)
class LSTMConfig(MixerConfig):
    """LSTM with a forget gate whose bias starts at 1 (Gers et al. 2000; Jozefowicz et al. 2015).

    The cache is the state. A unidirectional LSTM is causal with or without a causal mask.
    """

    kind: ClassVar[str] = "lstm"

    hidden_size: int = 0
    """H, width of each direction. 0: the outputs of all directions together are D wide. Any other
    width is projected to D."""
    bidirectional: bool = False
    """Also read each document backward (Schuster and Paliwal 1997). Not under a causal mask."""

    def __post_init__(self) -> None:
        check_at_least("lstm.hidden_size", self.hidden_size, 0)

    def check_d_model(self, d_model: int) -> None:
        self.resolved_hidden_size(d_model)

    def resolved_hidden_size(self, d_model: int) -> int:
        """Return H for a model of width D.

        Raises:
          ValueError: D has to be halved and is odd.
        """
        if self.bidirectional and not self.hidden_size and d_model % 2:
            raise ValueError(
                f"lstm.bidirectional: halves the width {d_model}, which is odd; give an even "
                "width, or set hidden_size"
            )
        return self.hidden_size or d_model // (1 + self.bidirectional)


@dataclasses.dataclass(frozen=True)
class BahdanauConfig(MixerConfig):
    """GRU decoder that attends to the memory before each step (Bahdanau et al. 2015).

    The initial state is computed from the first memory vector. That vector should summarize the
    whole source, so use a bidirectional encoder, as the paper does.
    """

    kind: ClassVar[str] = "bahdanau"
    reads_memory: ClassVar[bool] = True

    hidden_size: int = 0
    """H, width of the state; 0: D."""
    score_size: int = 0
    """A, width of the hidden layer of the additive score; 0: H."""

    def __post_init__(self) -> None:
        check_at_least("bahdanau.hidden_size", self.hidden_size, 0)
        check_at_least("bahdanau.score_size", self.score_size, 0)

    def resolved_sizes(self, d_model: int) -> tuple[int, int]:
        """Return H and A for a model of width D."""
        hidden_size = self.hidden_size or d_model
        return hidden_size, self.score_size or hidden_size


@dataclasses.dataclass(frozen=True)
class LuongConfig(MixerConfig):
    """LSTM decoder that attends to the memory after each step (Luong et al. 2015).

    The output h~ = tanh(W [c; h]) is also an input of the next step (input feeding, sections 3.1
    and 3.3). The initial state is computed from the last memory vector.
    """

    kind: ClassVar[str] = "luong"
    reads_memory: ClassVar[bool] = True

    hidden_size: int = 0
    """H, width of the state; 0: D."""
    score: DotScore | BilinearScore | AdditiveScore = BilinearScore()
    """Score of a state and a memory vector. The paper calls these `dot`, `general`, `concat`."""

    def __post_init__(self) -> None:
        check_at_least("luong.hidden_size", self.hidden_size, 0)

    def check_d_model(self, d_model: int) -> None:
        if isinstance(self.score, DotScore) and self.hidden_size not in (0, d_model):
            raise ValueError(
                f"luong.hidden_size {self.hidden_size}: the dot score needs states as wide as the "
                f"memory ({d_model}); give 0, or another score"
            )

    def resolved_sizes(self, d_model: int) -> tuple[int, int]:
        """Return H and A, the width in which states and memory are scored, for width D."""
        hidden_size = self.hidden_size or d_model
        score_size = self.score.hidden_dim if isinstance(self.score, AdditiveScore) else 0
        return hidden_size, score_size or hidden_size


@dataclasses.dataclass(frozen=True)
class ChengConfig(MixerConfig):
    """Long Short-Term Memory-Network (Cheng et al. 2016): an LSTM that attends to its past states.

    The backward pass keeps all previous states for every step, T^2 D numbers per row. Use it for
    short sequences only.
    """

    kind: ClassVar[str] = "cheng"

    score_size: int = 0
    """A, width of the hidden layer of the additive score; 0: D."""

    def __post_init__(self) -> None:
        check_at_least("cheng.score_size", self.score_size, 0)


@dataclasses.dataclass(frozen=True)
class Seq2SeqConfig(MixerConfig):
    """LSTM decoder of width D that reads the source only through its initial state.

    An encoder's output has no final LSTM state, so the initial state is computed from the last
    memory vector m: h_0 = tanh(W m), c_0 = W' m.
    """

    kind: ClassVar[str] = "seq2seq"
    reads_memory: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class GNMTEncoderConfig(MixerConfig):
    """Encoder of GNMT: stacked LSTM layers, the first bidirectional, residual from the third on."""

    kind: ClassVar[str] = "gnmt_encoder"

    num_layers: int = 3
    """Number of LSTM layers; the paper uses 8."""
    dropout: float = 0.0
    """Dropout rate of the input of each layer, in [0, 1)."""

    def __post_init__(self) -> None:
        check_at_least("gnmt_encoder.num_layers", self.num_layers, 2)
        check_fraction("gnmt_encoder.dropout", self.dropout)


@dataclasses.dataclass(frozen=True)
class GNMTDecoderConfig(MixerConfig):
    """Decoder of GNMT: stacked LSTM layers that share the attention of the first one.

    The first layer attends with its state before each token, so that upper layers can run one
    after the other over the whole sequence. Layers are residual from the third on.
    """

    kind: ClassVar[str] = "gnmt_decoder"
    reads_memory: ClassVar[bool] = True

    num_layers: int = 3
    """Number of LSTM layers; the paper uses 8."""
    score_size: int = 0
    """A, width of the hidden layer of the additive score; 0: D."""
    dropout: float = 0.0
    """Dropout rate of the input of each layer, in [0, 1)."""

    def __post_init__(self) -> None:
        check_at_least("gnmt_decoder.num_layers", self.num_layers, 1)
        check_at_least("gnmt_decoder.score_size", self.score_size, 0)
        check_fraction("gnmt_decoder.dropout", self.dropout)

    def resolved_sizes(self, d_model: int) -> tuple[int, int]:
        """Return H and A for a model of width D."""
        return d_model, self.score_size or d_model


def bag_of_embeddings_config(
    width: int,  # D
    hidden: int,  # F
    *,
    num_layers: int = 1,
    dropout: float = 0.0,  # of the hidden activations
    embedding_dropout: float = 0.0,
    **model_fields: Any,  # other fields of the config
) -> TransformerConfig:
    """Return an embedding and an MLP per token, for `Classifier(config, pooling="mean")`.

    The order of the tokens has no effect. The deep averaging network of Iyyer et al. 2015 takes
    the mean before the MLP instead.
    """
    mlp = FeedForwardConfig(d_ff=hidden, activation="relu", dropout=dropout)
    # No residual: the MLP's output takes the place of the embedding.
    block = BlockConfig(mixer=IdentityConfig(), feed_forward=mlp, norm=None, residual=False)
    fields: dict[str, Any] = (
        dict(final_norm=None, causal=False, embedding_dropout=embedding_dropout) | model_fields
    )
    return TransformerConfig(d_model=width, num_layers=num_layers, layer_pattern=(block,), **fields)


def gnmt_config(
    width: int = 1024,  # D
    *,
    num_layers: int = 8,  # of the encoder and of the decoder
    dropout: float = 0.2,
    **model_fields: Any,  # other fields of the config
) -> TransformerConfig:
    """Return Google's neural machine translation model (Wu et al. 2016).

    Encoder and decoder are one mixer each, with `num_layers` LSTM layers inside.
    """
    encoder = EncoderConfig(
        num_layers=1,
        layer_pattern=(_mixer_only(GNMTEncoderConfig(num_layers, dropout)),),
        final_norm=None,
    )
    # Residuals and dropout are inside the mixer, between its LSTM layers.
    decoder = _mixer_only(GNMTDecoderConfig(num_layers, dropout=dropout))
    fields: dict[str, Any] = (
        dict(final_norm=None, tie_embeddings=False, encoder=encoder) | model_fields
    )
    return TransformerConfig(d_model=width, num_layers=1, layer_pattern=(decoder,), **fields)


def _mixer_only(mixer: MixerConfig) -> BlockConfig:
    """Return a block without feed-forward, norm or residual."""
    return BlockConfig(mixer=mixer, feed_forward=None, norm=None, residual=False)
