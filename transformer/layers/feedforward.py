"""Feed-forward layers: plain (Vaswani et al. 2017, section 3.3) and gated (Shazeer 2020)."""

import dataclasses
import functools
import math
from typing import ClassVar, NamedTuple

import jax
from flax import linen as nn
from jaxtyping import Array, Float, Key

from transformer.layers.activations import (
    ACTIVATIONS,
    FORMS_ON_GPU,
    Activation,
    ActivationKind,
    clamped_gate,
    swish,
)
from transformer.layers.basic import (
    apply_linear,
    apply_matrix,
    declare_linear,
    declare_weight,
    dropout,
)
from transformer.model_context import ModelContext
from transformer.validation import Fraction, NonNegativeFloat, NonNegativeInt, Settings


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig(Settings):
    """Position-wise feed-forward: two linear layers with an activation between them."""

    kind: ClassVar[str] = "plain"

    d_ff: NonNegativeInt = 0
    """F, width of the hidden layer. 0: 4 D, or 8/3 D rounded up to a multiple of 64 if gated, which
    has the same number of weights."""
    activation: ActivationKind = "gelu_tanh"
    """`gelu` is exact (erf), `gelu_tanh` its tanh approximation (GPT-2). `swish` uses `swish_beta`;
    `learned_swish` trains one beta in each layer."""
    gated: bool = False
    """Multiply the activation by a second linear layer (Shazeer 2020): ReGLU, GEGLU and SwiGLU are
    `relu`, `gelu` and `silu` with this on."""
    bias: bool = True
    """Add biases to the linear layers."""
    dropout: Fraction = 0.0
    """Dropout rate of the hidden layer."""
    swish_beta: float = 1.0
    """beta of `swish`, x sigmoid(beta x), and initial beta of `learned_swish`."""
    gate_clamp: NonNegativeFloat = 0.0
    """Clamp c: activation(min(gate, c)) * (1 + clip(up, -c, c)), the gate of gpt-oss (Agarwal
    et al. 2025, section 2.3). 0: the plain gate. Needs `gated`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate_clamp and not self.gated:
            raise ValueError(
                f"FeedForwardConfig.gate_clamp {self.gate_clamp}: there is no gate; set gated to "
                "True, or gate_clamp to 0"
            )
        if self.swish_beta != 1 and self.activation not in ("swish", "learned_swish"):
            raise ValueError(
                f"FeedForwardConfig.swish_beta {self.swish_beta}: {self.activation} has none; "
                "leave it at 1, or set activation to swish or learned_swish"
            )


class FeedForwardOutput(NamedTuple):
    """Result of a feed-forward or mixture of experts."""

    y: Float[Array, "B T D"]
    aux: dict[str, jax.Array]  # auxiliary losses of a mixture of experts, if requested


def resolve_d_ff(config: FeedForwardConfig, d_model: int) -> int:
    """Return F: `d_ff`, or 4 D, or 8/3 D in multiples of 64 if gated (as many weights)."""
    if config.d_ff:
        return config.d_ff
    return math.ceil(8 * d_model / (3 * 64)) * 64 if config.gated else 4 * d_model


def make_activation(
    module: nn.Module, config: FeedForwardConfig, context: ModelContext
) -> Activation:
    """Return the activation; the beta of `learned_swish` becomes a weight of `module`."""
    if config.activation in ACTIVATIONS:
        return ACTIVATIONS[config.activation]
    beta: float | jax.Array = config.swish_beta
    if config.activation == "learned_swish":
        beta = declare_weight(
            module,
            "beta",
            outputs={},
            init=nn.initializers.constant(config.swish_beta),
            dtype=context.precision.parameters,
        ).astype(context.precision.compute)
    return functools.partial(swish, beta=beta)


class FeedForward(nn.Module):
    """Compute down(activation(up x)), or down(activation(gate x) * up x) if gated."""

    config: FeedForwardConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        dropout_rngs: Key[Array, "B"] | None = None,
    ) -> FeedForwardOutput:
        config, context = self.config, self.context
        embed = {"embed": context.d_model}
        mlp = {"mlp": resolve_d_ff(config, context.d_model)}
        activation = make_activation(self, config, context)
        if context.hardware.platform == "gpu":
            activation = FORMS_ON_GPU.get(config.activation, activation)

        def combine(products: list[jax.Array], biases: list[jax.Array | None]) -> jax.Array:
            """Return the hidden units from x W of `up`, or of `gate` and `up`."""
            maps = [
                y if b is None else y + b.astype(y.dtype)[None, None]
                for y, b in zip(products, biases, strict=True)
            ]
            if not config.gated:
                return activation(maps[0])
            gate, up = maps
            if config.gate_clamp:
                return clamped_gate(gate, up, activation, config.gate_clamp)
            return activation(gate) * up

        products, biases = [], []
        for name in ("gate", "up") if config.gated else ("up",):
            w, b = declare_linear(self, name, embed, mlp, context, bias=config.bias)
            products.append(apply_matrix(x, w, 1, context.flatten_tokens))
            biases.append(b)
        if context.hardware.platform == "gpu":
            # Autodiff would save the steps of the activation. Only the products with the weights
            # are saved; biases are added and the activation is computed again in the backward pass.
            combine = jax.checkpoint(combine)
        hidden = context.constrain(combine(products, biases), ("batch", "length", "mlp"))
        hidden = dropout(hidden, config.dropout, dropout_rngs)
        y = apply_linear(self, "down", hidden, mlp, embed, context, bias=config.bias, residual=True)
        return FeedForwardOutput(y, {})
