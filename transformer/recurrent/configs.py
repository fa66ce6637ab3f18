"""Settings of the recurrent mixers. Imports nothing that computes."""

import dataclasses
from typing import ClassVar

from transformer.checks import check_least, check_share
from transformer.layer_configs import MixerConfig
from transformer.scores import AdditiveScore, BilinearScore, DotScore


@dataclasses.dataclass(frozen=True)
class ElmanConfig(MixerConfig):
    """h_t = tanh(W x_t + U h_(t-1) + b); its state is its cache."""

    kind: ClassVar[str] = "elman"

    hidden: int = 0
    """H; 0 means D. Another is projected to D."""
    depth: int = 1
    """Layers from one state to the next: more than 1 make it an MLP of x_t and h_(t-1) (the deep
    transition of Pascanu et al. 2014)."""

    def __post_init__(self) -> None:
        check_least("elman.hidden", self.hidden, 0)
        check_least("elman.depth", self.depth, 1)


@dataclasses.dataclass(frozen=True)
class LSTMConfig(MixerConfig):
    """An LSTM with a forget gate whose bias starts at 1 (Gers et al. 2000; Jozefowicz et al. 2015).

    Its state is its cache. A causal mask and none are the same to it, unless it reads both ways.
    """

    kind: ClassVar[str] = "lstm"

    hidden: int = 0
    """H of each direction; 0 means that their results are D wide together. Others are projected."""
    bidirectional: bool = False
    """Read each document from its end too (Schuster and Paliwal 1997): not under a causal mask."""

    def __post_init__(self) -> None:
        check_least("lstm.hidden", self.hidden, 0)

    def check(self, width: int) -> None:
        self.state_width(width)

    def state_width(self, width: int) -> int:
        """H for a model of width D. Raises ValueError if D would have to be halved and is odd."""
        if self.bidirectional and not self.hidden and width % 2:
            raise ValueError(
                f"lstm.bidirectional: would halve the width {width}; set an even one, or hidden"
            )
        return self.hidden or width // (1 + self.bidirectional)


@dataclasses.dataclass(frozen=True)
class BahdanauConfig(MixerConfig):
    """A gated recurrent unit that looks at the memory before each step.

    Its first state is made from the first vector of the memory, which ought to have been read from
    its end too: the encoder of the paper is bidirectional.
    """

    kind: ClassVar[str] = "bahdanau"
    reads_memory: ClassVar[bool] = True

    hidden: int = 0
    """H of the state; 0 means D."""
    score: int = 0
    """A, the hidden layer of the score; 0 means H."""

    def __post_init__(self) -> None:
        check_least("bahdanau.hidden", self.hidden, 0)
        check_least("bahdanau.score", self.score, 0)

    def widths(self, width: int) -> tuple[int, int]:
        """H and A in a model of width D."""
        hidden = self.hidden or width
        return hidden, self.score or hidden


@dataclasses.dataclass(frozen=True)
class LuongConfig(MixerConfig):
    """An LSTM that looks at the memory after each step, and is fed what it found at the next.

    h~ = tanh(W [c; h]) is its result, and with the next token its input (sections 3.1 and 3.3). Its
    first state is made from the last vector of the memory.
    """

    kind: ClassVar[str] = "luong"
    reads_memory: ClassVar[bool] = True

    hidden: int = 0
    """H; 0 means D."""
    score: DotScore | BilinearScore | AdditiveScore = BilinearScore()
    """How well a vector of the memory answers the state: `dot`, `general` or `concat`."""

    def __post_init__(self) -> None:
        check_least("luong.hidden", self.hidden, 0)

    def check(self, width: int) -> None:
        if isinstance(self.score, DotScore) and self.hidden not in (0, width):
            raise ValueError(
                f"luong.hidden {self.hidden}: the dot score needs states as wide as the memory, "
                f"{width}; give 0, or another score"
            )

    def widths(self, width: int) -> tuple[int, int]:
        """H, and A where states and memory meet, in a model of width D."""
        hidden = self.hidden or width
        own = self.score.hidden if isinstance(self.score, AdditiveScore) else 0
        return hidden, own or hidden


@dataclasses.dataclass(frozen=True)
class ChengConfig(MixerConfig):
    """A long short-term memory network: tapes of all states in place of the last one.

    The backward pass keeps the tapes of every step, T^2 D numbers a row: for short sequences.
    """

    kind: ClassVar[str] = "cheng"

    score: int = 0
    """A, the hidden layer of the score; 0 means D."""

    def __post_init__(self) -> None:
        check_least("cheng.score", self.score, 0)


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

    layers: int = 3
    """Eight, as published."""
    dropout: float = 0.0
    """Of what each layer reads."""

    def __post_init__(self) -> None:
        check_least("gnmt_encoder.layers", self.layers, 2)
        check_share("gnmt_encoder.dropout", self.dropout)


@dataclasses.dataclass(frozen=True)
class GNMTDecoderConfig(MixerConfig):
    """LSTM layers; what the first looks at in the memory is an input of all of them.

    It looks with its state before each token, so the layers above need not wait for one another.
    From the third on they are residual.
    """

    kind: ClassVar[str] = "gnmt_decoder"
    reads_memory: ClassVar[bool] = True

    layers: int = 3
    """Eight, as published."""
    score: int = 0
    """A, the hidden layer of the score; 0 means D."""
    dropout: float = 0.0
    """Of what each layer reads."""

    def __post_init__(self) -> None:
        check_least("gnmt_decoder.layers", self.layers, 1)
        check_least("gnmt_decoder.score", self.score, 0)
        check_share("gnmt_decoder.dropout", self.dropout)

    def widths(self, width: int) -> tuple[int, int]:
        """H and A in a model of width D."""
        return width, self.score or width
