"""Configuration of norms, feed-forwards and mixtures of experts. Imports no JAX."""

import dataclasses
from typing import ClassVar, Literal, get_args

from transformer.validation import check_at_least, check_choice, check_fraction

NormKind = Literal["layer", "rms", "rms_offset"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "swish", "learned_swish", "squared_relu"]
MaskedHeadActivation = Literal["relu", "gelu", "gelu_tanh", "silu", "squared_relu"]
DispatcherKind = Literal["auto", "dense", "sorted"]


@dataclasses.dataclass(frozen=True)
class NormConfig:
    """Normalization over the last axis."""

    kind: NormKind = "layer"
    """`layer`: LayerNorm (Ba et al. 2016). `rms`: RMSNorm (Zhang and Sennrich 2019).
    `rms_offset`: RMSNorm whose gain is 1 + weight, so that weight decay pulls it to 1 (Gemma)."""
    epsilon: float = 1e-5
    """Added to the variance (or mean square) before the square root."""
    bias: bool = True
    """Add a bias after the gain. LayerNorm only."""

    def __post_init__(self) -> None:
        check_choice("norm.kind", self.kind, get_args(NormKind))
        check_at_least("norm.epsilon", self.epsilon, 0)


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """Position-wise feed-forward: two linear layers with an activation between them."""

    kind: ClassVar[str] = "plain"

    d_ff: int = 0
    """F, width of the hidden layer. 0: 4 D, or 8/3 D rounded up to a multiple of 64 if gated, which
    has the same number of weights."""
    activation: Activation = "gelu_tanh"
    """`gelu` is exact (erf), `gelu_tanh` its tanh approximation (GPT-2). `swish` uses `swish_beta`;
    `learned_swish` trains one beta in each layer."""
    gated: bool = False
    """Multiply the activation by a second linear layer (Shazeer 2020): ReGLU, GEGLU and SwiGLU are
    `relu`, `gelu` and `silu` with this on."""
    bias: bool = True
    """Add biases to the linear layers."""
    dropout: float = 0.0
    """Dropout rate of the hidden layer."""
    swish_beta: float = 1.0
    """beta of `swish`, x sigmoid(beta x), and initial beta of `learned_swish`."""
    gate_clamp: float = 0.0
    """Clamp c: activation(min(gate, c)) * (1 + clip(up, -c, c)), the gate of gpt-oss (Agarwal
    et al. 2025, section 2.3). 0: the plain gate. Needs `gated`."""

    def __post_init__(self) -> None:
        check_at_least("feed_forward.d_ff", self.d_ff, 0)
        check_choice("feed_forward.activation", self.activation, get_args(Activation))
        check_fraction("feed_forward.dropout", self.dropout)
        check_at_least("feed_forward.gate_clamp", self.gate_clamp, 0)
        if self.gate_clamp and not self.gated:
            raise ValueError(
                f"feed_forward.gate_clamp {self.gate_clamp}: there is no gate; set gated to True, "
                "or gate_clamp to 0"
            )
        if self.swish_beta != 1 and self.activation not in ("swish", "learned_swish"):
            raise ValueError(
                f"feed_forward.swish_beta {self.swish_beta}: {self.activation} has none; leave it "
                "at 1, or set activation to swish or learned_swish"
            )


@dataclasses.dataclass(frozen=True)
class MaskedHeadConfig:
    """Head of a masked language model: a linear layer, an activation and a norm, then logits."""

    activation: MaskedHeadActivation = "gelu"
    """Activation of the linear layer."""
    bias: bool = True
    """Add a bias to the linear layer."""
    output_bias: bool = True
    """Add a bias to each logit."""

    def __post_init__(self) -> None:
        check_choice("masked_head.activation", self.activation, get_args(MaskedHeadActivation))


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture of experts: E feed-forwards and a router (Shazeer et al. 2017; Fedus et al. 2022)."""

    kind: ClassVar[str] = "mixture"

    num_experts: int = 8
    """E, number of experts."""
    num_experts_per_token: int = 2
    """C, experts that each token is sent to: 1 in Switch, 2 in Mixtral."""
    expert: FeedForwardConfig = FeedForwardConfig()
    """Feed-forward of one expert. Dropout drops the same hidden units in all experts of a token."""
    router_bias: bool = False
    """Add a bias to the router's logits."""
    normalize_gates: bool = True
    """Scale the gates of a token to sum to 1 (Mixtral); False: plain probabilities (Switch)."""
    capacity_factor: float = 0.0
    """Slots of each expert, as a multiple of T C / E, the count if tokens spread evenly. Tokens
    beyond the capacity are dropped, so a token's output depends on later tokens: not for causal
    models. 0: no limit, no token is dropped."""
    load_balance_loss_weight: float = 0.01
    """Weight of the load-balancing loss (Fedus et al. 2022, equation 4)."""
    router_z_loss_weight: float = 0.001
    """Weight of the router z-loss, which keeps router logits small (Zoph et al. 2022, eq. 5)."""
    dispatcher: DispatcherKind = "auto"
    """Dispatch without a capacity. `dense`: every expert computes every token. `sorted`: tokens are
    sorted by expert. `auto`: `sorted` on a single accelerator, else `dense`."""

    def __post_init__(self) -> None:
        check_at_least("mixture.num_experts", self.num_experts, 1)
        check_at_least("mixture.num_experts_per_token", self.num_experts_per_token, 1)
        for name in ("capacity_factor", "load_balance_loss_weight", "router_z_loss_weight"):
            check_at_least(f"mixture.{name}", getattr(self, name), 0)
        check_choice("mixture.dispatcher", self.dispatcher, get_args(DispatcherKind))
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"mixture.num_experts_per_token {self.num_experts_per_token}: there are "
                f"{self.num_experts} experts; give at most {self.num_experts}"
            )
        if self.num_experts_per_token == 1 and self.normalize_gates:
            raise ValueError(
                "mixture.normalize_gates True: the gate of a single expert is always 1, and the "
                "router learns nothing; set it to False"
            )
        if self.capacity_factor and self.dispatcher != "auto":
            raise ValueError(
                f"mixture.dispatcher {self.dispatcher}: has no effect with a capacity_factor; "
                "leave it at auto"
            )

    @property
    def causal(self) -> bool:
        """True if a token's output does not depend on later tokens."""
        return not self.capacity_factor
