"""Settings of the parts of a layer: norms, mixers, feed-forwards. Imports nothing that computes."""

import dataclasses
from typing import ClassVar, Literal, get_args

from transformer.validation import check_at_least, check_choice, check_fraction

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
        check_at_least("feed_forward.d_ff", self.d_ff, 0)
        check_choice("feed_forward.activation", self.activation, get_args(Activation))
        check_fraction("feed_forward.dropout", self.dropout)
        if self.swish_beta != 1 and self.activation not in ("swish", "learned_swish"):
            raise ValueError(
                f"feed_forward.swish_beta {self.swish_beta}: {self.activation} has none; leave it at 1, or set "
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
        check_at_least("mixture.num_experts", self.num_experts, 1)
        check_at_least("mixture.num_experts_per_token", self.num_experts_per_token, 1)
        for name in ("capacity_factor", "load_balance_loss_weight", "router_z_loss_weight"):
            check_at_least(f"mixture.{name}", getattr(self, name), 0)
        check_choice("mixture.dispatcher", self.dispatcher, get_args(DispatcherKind))
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"mixture.num_experts_per_token {self.num_experts_per_token}: there are {self.num_experts} experts; give at most that"
            )
        if self.num_experts_per_token == 1 and self.normalize_gates:
            raise ValueError(
                "mixture.normalize_gates True: the gate of one chosen expert is always 1, and the "
                "router learns nothing; set it to False"
            )
        if self.capacity_factor and self.dispatcher != "auto":
            raise ValueError(
                f"mixture.dispatcher {self.dispatcher}: experts with a capacity have slots; leave it at auto"
            )

    @property
    def causal(self) -> bool:
        """Whether a token gets the same whatever follows: not if later ones take its place."""
        return not self.capacity_factor
