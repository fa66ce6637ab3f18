"""Settings of the parts of a layer: norms, mixers, feed-forwards. Imports nothing that computes."""

import dataclasses
from typing import ClassVar, Literal, get_args

from transformer.checks import check_at_least, check_choice, check_fraction


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """What the configurations of all mixers have in common: the name under which they are built."""

    kind: ClassVar[str]
    reads_memory: ClassVar[bool] = False
    """Whether it looks at the memory beside its own input, as a recurrence with attention inside
    does: then it is given `memory` in the mixer's place of a block, `mask.segments` are those of
    its own input and `mask.key_segments` those of the memory."""

    depends_on_row_index: ClassVar[bool] = False
    """Whether what a token sees follows from where it stands in its row, and not in its document
    alone: documents of a pack are kept apart, but one of them differs from the same alone."""

    def check_d_model(self, d_model: int) -> None:
        """Raises ValueError if a model of this width cannot have it."""


NormKind = Literal["layer", "rms"]


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """A norm over the last axis."""

    kind: NormKind = "layer"
    epsilon: float = 1e-5
    """Added to the variance (or mean square) inside the root."""
    bias: bool = True
    """LayerNorm alone: whether a bias is added after the gain."""

    def __post_init__(self) -> None:
        check_choice("norm.kind", self.kind, get_args(NormKind))
        check_at_least("norm.epsilon", self.epsilon, 0)


@dataclasses.dataclass(frozen=True)
class MultiHeadConfig(MixerConfig):
    """What the configurations of mixers with heads have in common."""

    num_heads: int = 8
    """N, heads of the queries."""
    num_kv_heads: int = 0
    """K, heads of keys and values: N is multi-head (0 means N), 1 multi-query (Shazeer 2019),
    between them grouped-query (Ainslie et al. 2023)."""
    head_dim: int = 0
    """H of queries and keys; 0 means D / N."""
    bias: bool = True
    """Biases of the query, key, value and output projections."""
    qk_norm: NormConfig | None = None
    """The norm of each head's queries and keys, before they meet (Dehghani et al. 2023)."""

    def __post_init__(self) -> None:
        check_at_least("attention.heads", self.num_heads, 1)
        for name in ("kv_heads", "head_width"):
            check_at_least(f"attention.{name}", getattr(self, name), 0)
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(
                f"attention.kv_heads {self.num_kv_heads}: does not divide heads {self.num_heads}; "
                "give a divisor of it"
            )

    def check_d_model(self, d_model: int) -> None:
        self.resolved_head_dim(d_model)

    @property
    def resolved_num_kv_heads(self) -> int:
        """K."""
        return self.num_kv_heads or self.num_heads

    def resolved_head_dim(self, d_model: int) -> int:
        """H for a model of width D. Raises ValueError if D / N is needed and is no integer."""
        if not self.head_dim and d_model % self.num_heads:
            raise ValueError(
                f"attention.heads {self.num_heads}: does not divide the width {d_model}; "
                "give a divisor of it, or set head_width"
            )
        return self.head_dim or d_model // self.num_heads


Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swish", "learned_swish", "squared_relu"]


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """Two linear maps with a nonlinearity between, applied to each token."""

    kind: ClassVar[str] = "plain"

    d_ff: int = 0
    """F; 0 means 4 D, or 8/3 D in multiples of 64 when gated: the same number of weights."""
    activation: Activation = "gelu_tanh"
    """GELU is exact (`gelu`, with erf) or its approximation by tanh (`gelu_tanh`, as in GPT-2).
    `swish` has the `beta` below, `learned_swish` one for each layer that is a weight."""
    gated: bool = False
    """Multiply by a second linear map: ReGLU, GEGLU and SwiGLU are `relu`, `gelu` and `silu`."""
    bias: bool = True
    dropout: float = 0.0
    """Of the hidden activations."""
    swish_beta: float = 1.0
    """Of `swish`, x sigmoid(beta x), and where that of `learned_swish` starts."""

    def __post_init__(self) -> None:
        check_at_least("feed_forward.hidden", self.d_ff, 0)
        check_choice("feed_forward.activation", self.activation, get_args(Activation))
        check_fraction("feed_forward.dropout", self.dropout)
        if self.swish_beta != 1 and self.activation not in ("swish", "learned_swish"):
            raise ValueError(
                f"feed_forward.beta {self.swish_beta}: {self.activation} has none; leave it at 1, or set "
                "activation to swish or learned_swish"
            )

    def resolved_d_ff(self, width: int) -> int:
        """F for a model of this width D."""
        if self.d_ff:
            return self.d_ff
        return -(-8 * width // (3 * 64)) * 64 if self.gated else 4 * width


DispatcherKind = Literal["auto", "dense", "sorted"]


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """E feed-forwards and a router (Shazeer et al. 2017; Fedus et al. 2022, Switch)."""

    kind: ClassVar[str] = "mixture"

    num_experts: int = 8
    """E."""
    num_experts_per_token: int = 2
    """C, experts that each token goes through: 1 in Switch, 2 in Mixtral."""
    expert: FeedForwardConfig = FeedForwardConfig()
    """Each of them; its dropout drops the same hidden units in all experts of a token."""
    normalize_gates: bool = True
    """Whether the gates of a token sum to 1 (Mixtral), or are plain probabilities (Switch)."""
    capacity_factor: float = 0.0
    """Places for tokens in each expert, as a multiple of what an even spread would need. Tokens
    beyond are dropped, so what a token gets depends on later ones: no causal model can have it.
    0: no token is ever dropped."""
    load_balance_loss_weight: float = 0.01
    """Coefficient of the loss that spreads tokens evenly (Fedus et al. 2022, eq. 4)."""
    router_z_loss_weight: float = 0.001
    """Coefficient of the loss that keeps the router's logits small (Zoph et al. 2022, eq. 5)."""
    dispatcher: DispatcherKind = "auto"
    """How tokens without a capacity reach their experts: every expert computes all of them, or they
    are sorted first; `auto` sorts on a single accelerator."""

    def __post_init__(self) -> None:
        check_at_least("mixture.experts", self.num_experts, 1)
        check_at_least("mixture.chosen", self.num_experts_per_token, 1)
        for name in ("capacity", "load_balance", "router_z"):
            check_at_least(f"mixture.{name}", getattr(self, name), 0)
        check_choice("mixture.form", self.dispatcher, get_args(DispatcherKind))
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"mixture.chosen {self.num_experts_per_token}: there are {self.num_experts} experts; give at most that"
            )
        if self.num_experts_per_token == 1 and self.normalize_gates:
            raise ValueError(
                "mixture.renormalise True: the gate of one chosen expert is always 1, and the "
                "router learns nothing; set it to False"
            )
        if self.capacity_factor and self.dispatcher != "auto":
            raise ValueError(
                f"mixture.form {self.dispatcher}: experts with a capacity have slots; leave it at auto"
            )

    @property
    def causal(self) -> bool:
        """Whether a token gets the same whatever follows: not if later ones take its place."""
        return not self.capacity_factor


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
        check_at_least("convolution.taps", self.kernel_size, 1)
