"""The feed-forward layer, plain (Vaswani et al. 2017, section 3.3) and gated (Shazeer 2020)."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple, get_args

import jax
from flax import linen as nn

from transformer.activations import ACTIVATIONS, Activation, swish
from transformer.checks import check_choice, check_least, check_share
from transformer.dropout import dropout
from transformer.linear import linear
from transformer.mixers import NOTHING, Want
from transformer.shared import Shared
from transformer.weights import weight


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """Two linear maps with a nonlinearity between, applied to each token."""

    kind: ClassVar[str] = "plain"

    hidden: int = 0
    """F; 0 means 4 D, or 8/3 D in multiples of 64 when gated: the same number of weights."""
    activation: Activation = "gelu_tanh"
    """GELU is exact (`gelu`, with erf) or its approximation by tanh (`gelu_tanh`, as in GPT-2).
    `swish` has the `beta` below, `learned_swish` one for each layer that is a weight."""
    gated: bool = False
    """Multiply by a second linear map: ReGLU, GEGLU and SwiGLU are `relu`, `gelu` and `silu`."""
    bias: bool = True
    dropout: float = 0.0
    """Of the hidden activations."""
    beta: float = 1.0
    """Of `swish`, x sigmoid(beta x), and where that of `learned_swish` starts."""

    def __post_init__(self) -> None:
        check_least("feed_forward.hidden", self.hidden, 0)
        check_choice("feed_forward.activation", self.activation, get_args(Activation))
        check_share("feed_forward.dropout", self.dropout)
        if self.beta != 1 and self.activation in ACTIVATIONS:
            raise ValueError(
                f"feed_forward.beta {self.beta}: {self.activation} has none; leave it at 1, or set "
                "activation to swish or learned_swish"
            )

    def hidden_width(self, width: int) -> int:
        """F for a model of this width D."""
        if self.hidden:
            return self.hidden
        return -(-8 * width // (3 * 64)) * 64 if self.gated else 4 * width


class FeedForwardOutput(NamedTuple):
    """The result, and auxiliary losses where a kind has them."""

    y: jax.Array  # [B, T, D]
    aux: dict[str, jax.Array]


class FeedForward(nn.Module):
    """down(activation(up x)), or down(activation(gate x) * up x) when gated."""

    config: FeedForwardConfig
    shared: Shared

    @nn.compact
    def __call__(
        self,
        x: jax.Array,  # [B, T, D]
        keys: jax.Array | None = None,  # [B]
        *,
        real: jax.Array | None = None,  # [B, T] booleans: no padding. Each token is on its own here
        want: Want = NOTHING,
    ) -> FeedForwardOutput:
        config, shared = self.config, self.shared
        embed, mlp = {"embed": shared.width}, {"mlp": config.hidden_width(shared.width)}
        activation = nonlinearity(self, config, shared)
        if config.gated:
            gate = linear(self, "gate", x, embed, mlp, shared, bias=config.bias)
            hidden = activation(gate) * linear(self, "up", x, embed, mlp, shared, bias=config.bias)
        else:
            hidden = activation(linear(self, "up", x, embed, mlp, shared, bias=config.bias))
        hidden = shared.constrain(hidden, ("batch", "length", "mlp"))
        hidden = dropout(hidden, config.dropout, keys)
        y = linear(self, "down", hidden, mlp, embed, shared, bias=config.bias, residual=True)
        return FeedForwardOutput(y, {})


def nonlinearity(
    module: nn.Module, config: FeedForwardConfig, shared: Shared
) -> Callable[[jax.Array], jax.Array]:
    """The activation function of a configuration; a learned beta becomes a weight of `module`."""
    if config.activation in ACTIVATIONS:
        return ACTIVATIONS[config.activation]
    beta: float | jax.Array = config.beta
    if config.activation == "learned_swish":
        start, precision = nn.initializers.constant(config.beta), shared.precision
        learned = weight(module, "beta", outputs={}, init=start, dtype=precision.parameters)
        beta = learned.astype(precision.compute)
    return lambda x: swish(x, beta)
