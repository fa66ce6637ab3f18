"""The feed-forward layer, plain (Vaswani et al. 2017, section 3.3) and gated (Shazeer 2020)."""

import dataclasses
from typing import Literal, NamedTuple

import jax
from flax import linen as nn

from transformer.dropout import dropout
from transformer.linear import linear
from transformer.shared import Shared

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """Two linear maps with a nonlinearity between, applied to each token."""

    hidden: int = 0
    """F; 0 means 4 D, or 8/3 D in multiples of 64 when gated: the same number of weights."""
    activation: Activation = "gelu_tanh"
    """GELU is exact (`gelu`, with erf) or its approximation by tanh (`gelu_tanh`, as in GPT-2)."""
    gated: bool = False
    """Multiply by a second linear map: SwiGLU is `silu` gated."""
    bias: bool = True
    dropout: float = 0.0
    """Of the hidden activations."""

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
    ) -> FeedForwardOutput:
        config, shared = self.config, self.shared
        embed, mlp = {"embed": shared.width}, {"mlp": config.hidden_width(shared.width)}
        activation = ACTIVATIONS[config.activation]
        if config.gated:
            gate = linear(self, "gate", x, embed, mlp, shared, bias=config.bias)
            hidden = activation(gate) * linear(self, "up", x, embed, mlp, shared, bias=config.bias)
        else:
            hidden = activation(linear(self, "up", x, embed, mlp, shared, bias=config.bias))
        hidden = shared.constrain(hidden, ("batch", "length", "mlp"))
        hidden = dropout(hidden, config.dropout, keys)
        y = linear(self, "down", hidden, mlp, embed, shared, bias=config.bias, residual=True)
        return FeedForwardOutput(y, {})
