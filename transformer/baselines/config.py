"""Settings of the parts of a layer: norms, mixers, feed-forwards. Imports nothing that computes.

Settings of the recurrent mixers. Imports nothing that computes.
"""

import dataclasses
from typing import ClassVar

from transformer.attention.config import AdditiveScore, BilinearScore, DotScore, MixerConfig
from transformer.validation import check_at_least, check_fraction


@dataclasses.dataclass(frozen=True)
class IdentityConfig(MixerConfig):
    """y = x. In blocks without residual connections it is as if there were no mixer."""

    kind: ClassVar[str] = "identity"


@dataclasses.dataclass(frozen=True)
class ConvolutionConfig(MixerConfig):
    """y_t = sum over the taps i of W_i x_(t + i), i <= 0 under a causal mask.

    Without one the taps are centred. Its last inputs are its cache.
    """

    kind: ClassVar[str] = "convolution"

    kernel_size: int = 3
    """k, tokens that a token sees, itself among them."""
    separable: bool = False
    """One weight for each tap and channel, and then one matrix for all taps (Kaiser et al. 2017):
    k D + D^2 weights in place of k D^2."""

    def __post_init__(self) -> None:
        check_at_least("convolution.kernel_size", self.kernel_size, 1)


@dataclasses.dataclass(frozen=True)
class ElmanConfig(MixerConfig):
    """h_t = tanh(W x_t + U h_(t-1) + b); its state is its cache."""

    kind: ClassVar[str] = "elman"

    hidden_size: int = 0
    """H; 0 means D. Another is projected to D."""
    transition_depth: int = 1
    """Layers from one state to the next: more than 1 make it an MLP of x_t and h_(t-1) (the deep
    transition of Pascanu et al. 2014)."""

    def __post_init__(self) -> None:
        check_at_least("elman.hidden_size", self.hidden_size, 0)
        check_at_least("elman.transition_depth", self.transition_depth, 1)


@dataclasses.dataclass(frozen=True)
class LSTMConfig(MixerConfig):
    """An LSTM with a forget gate whose bias starts at 1 (Gers et al. 2000; Jozefowicz et al. 2015).

    Its state is its cache. A causal mask and none are the same to it, unless it reads both ways.
    """

    kind: ClassVar[str] = "lstm"

    hidden_size: int = 0
    """H of each direction; 0 means that their results are D wide together. Others are projected."""
    bidirectional: bool = False
    """Read each document from its end too (Schuster and Paliwal 1997): not under a causal mask."""

    def __post_init__(self) -> None:
        check_at_least("lstm.hidden_size", self.hidden_size, 0)

    def check_d_model(self, d_model: int) -> None:
        self.resolved_hidden_size(d_model)

    def resolved_hidden_size(self, width: int) -> int:
        """H for a model of width D. Raises ValueError if D would have to be halved and is odd."""
        if self.bidirectional and not self.hidden_size and width % 2:
            raise ValueError(
                f"lstm.bidirectional: would halve the width {width}; set an even one, or hidden_size"
            )
        return self.hidden_size or width // (1 + self.bidirectional)


@dataclasses.dataclass(frozen=True)
class BahdanauConfig(MixerConfig):
    """A gated recurrent unit that looks at the memory before each step.

    Its first state is made from the first vector of the memory, which ought to have been read from
    its end too: the encoder of the paper is bidirectional.
    """

    kind: ClassVar[str] = "bahdanau"
    reads_memory: ClassVar[bool] = True

    hidden_size: int = 0
    """H of the state; 0 means D."""
    score_size: int = 0
    """A, the hidden layer of the score; 0 means H."""

    def __post_init__(self) -> None:
        check_at_least("bahdanau.hidden_size", self.hidden_size, 0)
        check_at_least("bahdanau.score_size", self.score_size, 0)

    def resolved_sizes(self, width: int) -> tuple[int, int]:
        """H and A in a model of width D."""
        hidden = self.hidden_size or width
        return hidden, self.score_size or hidden


@dataclasses.dataclass(frozen=True)
class LuongConfig(MixerConfig):
    """An LSTM that looks at the memory after each step, and is fed what it found at the next.

    h~ = tanh(W [c; h]) is its result, and with the next token its input (sections 3.1 and 3.3). Its
    first state is made from the last vector of the memory.
    """

    kind: ClassVar[str] = "luong"
    reads_memory: ClassVar[bool] = True

    hidden_size: int = 0
    """H; 0 means D."""
    score: DotScore | BilinearScore | AdditiveScore = BilinearScore()
    """How well a vector of the memory answers the state: `dot`, `general` or `concat`."""

    def __post_init__(self) -> None:
        check_at_least("luong.hidden_size", self.hidden_size, 0)

    def check_d_model(self, d_model: int) -> None:
        if isinstance(self.score, DotScore) and self.hidden_size not in (0, d_model):
            raise ValueError(
                f"luong.hidden_size {self.hidden_size}: the dot score needs states as wide as the memory, "
                f"{d_model}; give 0, or another score"
            )

    def resolved_sizes(self, width: int) -> tuple[int, int]:
        """H, and A where states and memory meet, in a model of width D."""
        hidden = self.hidden_size or width
        own = self.score.hidden_dim if isinstance(self.score, AdditiveScore) else 0
        return hidden, own or hidden


@dataclasses.dataclass(frozen=True)
class ChengConfig(MixerConfig):
    """A long short-term memory network: tapes of all states in place of the last one.

    The backward pass keeps the tapes of every step, T^2 D numbers a row: for short sequences.
    """

    kind: ClassVar[str] = "cheng"

    score_size: int = 0
    """A, the hidden layer of the score; 0 means D."""

    def __post_init__(self) -> None:
        check_at_least("cheng.score_size", self.score_size, 0)


@dataclasses.dataclass(frozen=True)
class Seq2SeqConfig(MixerConfig):
    """An LSTM, D wide, that begins from the last vector of the memory and sees no more of it.

    In place of the encoder's last state, which is no part of its output, the first state is made
    from its last output: h_0 = tanh(W m), c_0 = W' m.
    """

    kind: ClassVar[str] = "seq2seq"
    reads_memory: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class GNMTEncoderConfig(MixerConfig):
    """LSTM layers, of which the first reads both ways; from the third on, residual."""

    kind: ClassVar[str] = "gnmt_encoder"

    num_layers: int = 3
    """Eight, as published."""
    dropout: float = 0.0
    """Of what each layer reads."""

    def __post_init__(self) -> None:
        check_at_least("gnmt_encoder.num_layers", self.num_layers, 2)
        check_fraction("gnmt_encoder.dropout", self.dropout)


@dataclasses.dataclass(frozen=True)
class GNMTDecoderConfig(MixerConfig):
    """LSTM layers; what the first looks at in the memory is an input of all of them.

    It looks with its state before each token, so the layers above need not wait for one another.
    From the third on they are residual.
    """

    kind: ClassVar[str] = "gnmt_decoder"
    reads_memory: ClassVar[bool] = True

    num_layers: int = 3
    """Eight, as published."""
    score_size: int = 0
    """A, the hidden layer of the score; 0 means D."""
    dropout: float = 0.0
    """Of what each layer reads."""

    def __post_init__(self) -> None:
        check_at_least("gnmt_decoder.num_layers", self.num_layers, 1)
        check_at_least("gnmt_decoder.score_size", self.score_size, 0)
        check_fraction("gnmt_decoder.dropout", self.dropout)

    def resolved_sizes(self, width: int) -> tuple[int, int]:
        """H and A in a model of width D."""
        return width, self.score_size or width
