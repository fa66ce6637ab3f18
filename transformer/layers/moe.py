"""Mixture of experts: each token goes through C of E feed-forwards, and perhaps a shared one."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Key

from transformer.layers.activations import clamped_gate
from transformer.layers.basic import apply_linear, apply_matrix, declare_weight, dropout
from transformer.layers.feedforward import (
    FeedForward,
    FeedForwardConfig,
    FeedForwardOutput,
    make_activation,
    resolve_d_ff,
)
from transformer.layers.low_rank import LowRankWeight
from transformer.layers.moe_dispatch import (
    CapacityDispatcher,
    DenseDispatcher,
    RouterScore,
    Routing,
    SortedDispatcher,
    TokenDispatcher,
    load_balance_loss,
    route_tokens,
    router_z_loss,
    selection_bias_loss,
)
from transformer.layers.quantized import QuantizedWeight, multiply_dequantized, order_after
from transformer.model_context import ModelContext
from transformer.taps import NO_OUTPUTS, Outputs
from transformer.validation import Bounds, NonNegativeFloat, PositiveInt, Settings

DispatcherKind = Literal["auto", "dense", "sorted"]


@dataclasses.dataclass(frozen=True)
class MoEConfig(Settings):
    """Mixture of experts: E feed-forwards and a router (Shazeer et al. 2017; Fedus et al. 2022)."""

    kind: ClassVar[str] = "mixture"

    num_experts: Annotated[int, Bounds(1, 2**16)] = 8
    """E, number of experts."""
    num_experts_per_token: PositiveInt = 2
    """C, experts that each token is sent to: 1 in Switch, 2 in Mixtral."""
    expert: FeedForwardConfig = FeedForwardConfig()
    """Feed-forward of one expert. Dropout drops the same hidden units in all experts of a token."""
    shared_expert: FeedForwardConfig | None = None
    """Feed-forward that every token goes through, added to the routed experts (Dai et al. 2024,
    section 3.2). Several shared experts are one with the sum of their widths. None: no such."""
    shared_expert_gate: bool = False
    """Multiply the shared expert's output by sigmoid(w . x) (Qwen2-MoE)."""
    router_bias: bool = False
    """Add a bias to the router's logits."""
    normalize_gates: bool = True
    """Scale the gates of a token to sum to 1 (Mixtral); False: plain scores (Switch)."""
    router_score: RouterScore = "softmax"
    """Score of an expert: the softmax over all experts, or the sigmoid of its own logit
    (DeepSeek-V3, equation 15)."""
    selection_bias: bool = False
    """Add a bias to the scores for the choice of experts, not to the gates: DeepSeek-V3's
    `e_score_correction_bias` (section 2.1.2). Its gradient is not that of the loss: the optimizer
    lowers it for experts with more tokens than the mean, and raises it for the others."""
    num_groups: PositiveInt = 1
    """Groups of experts, which stand on one device each in DeepSeek (`n_group`)."""
    num_groups_per_token: PositiveInt = 1
    """Groups that the experts of a token come from (`topk_group`): those with the best expert
    (DeepSeek-V2, section 2.2.2), or, with `selection_bias`, the best two together (V3)."""
    routed_scaling_factor: float = 1.0
    """Factor of the gates, after they are normalized (DeepSeek)."""
    capacity_factor: NonNegativeFloat = 0.0
    """Slots of each expert, as a multiple of T C / E, the count if tokens spread evenly. Tokens
    beyond the capacity are dropped, so a token's output depends on later tokens: not for causal
    models. 0: no limit, no token is dropped."""
    load_balance_loss_weight: NonNegativeFloat = 0.01
    """Weight of the load-balancing loss (Fedus et al. 2022, equation 4)."""
    router_z_loss_weight: NonNegativeFloat = 0.001
    """Weight of the router z-loss, which keeps router logits small (Zoph et al. 2022, eq. 5)."""
    dispatcher: DispatcherKind = "auto"
    """Dispatch without a capacity. `dense`: every expert computes every token. `sorted`: tokens are
    sorted by expert. `auto`: `sorted` on a single accelerator, else `dense`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"MoEConfig.num_experts_per_token {self.num_experts_per_token}: there are "
                f"{self.num_experts} experts; give at most {self.num_experts}"
            )
        if self.num_experts_per_token == 1 and self.normalize_gates:
            raise ValueError(
                "MoEConfig.normalize_gates True: the gate of a single expert is always 1, and the "
                "router learns nothing; set it to False"
            )
        if self.num_experts % self.num_groups or self.num_groups_per_token > self.num_groups:
            raise ValueError(
                f"MoEConfig.num_groups {self.num_groups}: does not divide {self.num_experts} "
                f"experts, or is less than num_groups_per_token {self.num_groups_per_token}; give "
                "a divisor of num_experts and no more groups per token"
            )
        in_groups = self.num_experts // self.num_groups * self.num_groups_per_token
        if self.num_experts_per_token > in_groups or (
            self.num_groups > 1 and self.selection_bias and self.num_experts == self.num_groups
        ):
            raise ValueError(
                f"MoEConfig.num_groups_per_token {self.num_groups_per_token}: groups of "
                f"{self.num_experts // self.num_groups} experts are too small for the choice of "
                f"{self.num_experts_per_token}; give fewer num_groups, or more per token"
            )
        if self.shared_expert_gate and self.shared_expert is None:
            raise ValueError(
                "MoEConfig.shared_expert_gate True: there is no shared expert; give shared_expert, "
                "or set it to False"
            )
        if self.capacity_factor and self.dispatcher != "auto":
            raise ValueError(
                f"MoEConfig.dispatcher {self.dispatcher}: has no effect with a capacity_factor; "
                "leave it at auto"
            )

    @property
    def causal(self) -> bool:
        """True if a token's output does not depend on later tokens."""
        return not self.capacity_factor


class MixtureOfExperts(nn.Module):
    """Compute the sum over a token's C experts of gate * expert(x), and the shared expert."""

    config: MoEConfig
    context: ModelContext

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        dropout_rngs: Key[Array, "B"] | None = None,
        *,
        token_mask: Bool[Array, "#B T"] | None = None,  # False for padding, which gets zeros
        outputs: Outputs = NO_OUTPUTS,
    ) -> FeedForwardOutput:
        """Return the output; `aux` has the weighted auxiliary losses if `losses` are requested."""
        config = self.config
        # Logits are kept beside the routing: the z-loss penalizes their size, which a softmax
        # hides.
        logits = self.router_logits(x)
        bias = self.selection_bias() if config.selection_bias else None
        routing = route_tokens(
            logits,
            config.num_experts_per_token,
            normalize_gates=config.normalize_gates,
            token_mask=token_mask,
            score=config.router_score,
            selection_bias=bias,
            num_groups=config.num_groups,
            num_groups_per_token=config.num_groups_per_token,
        )
        if config.routed_scaling_factor != 1:
            routing = routing._replace(gates=routing.gates * config.routed_scaling_factor)
        # The dispatcher hides how tokens reach their experts; the experts themselves are one matmul
        # with stacked matrices, whatever the layout of its rows.
        y = self.apply_experts(choose_dispatcher(config, routing, self.context), x, dropout_rngs)
        if config.shared_expert is not None:
            shared = self.apply_shared_expert(config.shared_expert, x, dropout_rngs)
            y = y + jnp.where(routing.token_mask[..., None], shared, 0)
        if "losses" not in outputs:
            return FeedForwardOutput(y, {})
        # Weighted here, by the layer's own settings, so that the trainer only adds them up.
        load_balance = config.load_balance_loss_weight * load_balance_loss(routing)
        if bias is not None:
            load_balance += selection_bias_loss(bias, routing)
        losses = {
            "loss/load_balance": load_balance,
            "loss/router_z": config.router_z_loss_weight
            * router_z_loss(logits, routing.token_mask),
        }
        return FeedForwardOutput(y, losses)

    def router_logits(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Return router logits, in float32 for any policy: rounding would change the routing."""
        context, inputs = self.context, {"embed": self.context.d_model}
        matrix = declare_weight(
            self,
            "router",
            inputs=inputs,
            outputs={"routes": self.config.num_experts},
            init=context.initialization.matrix_initializer(inputs),
            dtype=context.precision.parameters,
        )
        matrix = context.constrain(matrix, (None, None))  # small: replicated
        x = x.astype(jnp.float32)
        logits = apply_matrix(x, matrix.astype(x.dtype), 1, context.flatten_tokens)
        if self.config.router_bias:
            bias = declare_weight(
                self,
                "router_bias",
                outputs={"routes": self.config.num_experts},
                init=nn.initializers.zeros,
                dtype=context.precision.parameters,
            )
            logits = logits + bias.astype(logits.dtype)[None, None]
        return context.constrain(logits, ("batch", "length", None))

    def selection_bias(self) -> Float[Array, "E"]:
        """Return the bias of the choice of experts, in float32 like the scores."""
        bias = declare_weight(
            self,
            "selection_bias",
            outputs={"routes": self.config.num_experts},
            init=nn.initializers.zeros,
            dtype=self.context.precision.parameters,
        )
        return bias.astype(jnp.float32)

    def apply_shared_expert(
        self,
        config: FeedForwardConfig,
        x: Float[Array, "B T D"],
        dropout_rngs: Key[Array, "B"] | None,
    ) -> Float[Array, "B T D"]:
        """Apply the feed-forward of all tokens, and its gate if it has one."""
        context = self.context
        y = FeedForward(config, context, name="shared_expert")(x, dropout_rngs).y
        if not self.config.shared_expert_gate:
            return y
        inputs, outputs = {"embed": context.d_model}, {"routes": 1}
        gate = apply_linear(self, "shared_expert_gate", x, inputs, outputs, context, bias=False)
        return jax.nn.sigmoid(gate) * y

    def apply_experts(
        self,
        dispatcher: TokenDispatcher,
        x: Float[Array, "B T D"],
        dropout_rngs: Key[Array, "B"] | None,
    ) -> Float[Array, "B T D"]:
        """Apply `FeedForward` to each row, with the weights of its expert."""
        config, context = self.config.expert, self.context
        embed = {"embed": context.d_model}
        mlp = {"mlp": resolve_d_ff(config, context.d_model)}
        activation = make_activation(self, config, context)
        rows = dispatcher.dispatch(x)
        # "up" before "gate": Linen derives initial values from the order of declaration.
        hidden = self.expert_linear(dispatcher, "up", rows, embed, mlp)
        # SwiGLU and its like: activation(gate x) * up x (Shazeer 2020).
        if config.gated:
            gate = self.expert_linear(dispatcher, "gate", rows, embed, mlp)
            if config.gate_clamp:
                hidden = clamped_gate(gate, hidden, activation, config.gate_clamp)
            else:
                hidden = activation(gate) * hidden
        else:
            hidden = activation(hidden)
        if dropout_rngs is not None and config.dropout:
            # One mask for each token, dispatched like the token: all its experts drop the same
            # hidden units.
            ones = jnp.ones((*x.shape[:2], *mlp.values()), x.dtype)
            hidden = hidden * dispatcher.dispatch(dropout(ones, config.dropout, dropout_rngs))
        # Gates weight the outputs, not the inputs: an activation is not linear.
        return dispatcher.combine(self.expert_linear(dispatcher, "down", hidden, mlp, embed))

    def expert_linear(
        self,
        dispatcher: TokenDispatcher,
        name: str,
        rows: jax.Array,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
    ) -> jax.Array:
        """Declare the experts' matrices `name` (and biases `name_bias`) and apply them."""
        context, stack = self.context, {"experts": self.config.num_experts}
        matrices = declare_weight(
            self,
            name,
            stack=stack,
            inputs=inputs,
            outputs=outputs,
            # Only `down` writes to the residual stream. The fan-in is that of one expert.
            init=context.initialization.matrix_initializer(
                inputs, num_residual_layers=context.num_layers if name == "down" else 0
            ),
            dtype=context.precision.parameters,
        )
        matrices = matrices.astype(rows.dtype)
        rows = multiply_rows(dispatcher, rows, matrices, in_order=context.flatten_tokens)
        if not self.config.expert.bias:
            return rows
        # Biases belong to experts, not to tokens: they are spread over rows as the tokens were.
        bias = declare_weight(
            self,
            f"{name}_bias",
            stack=stack,
            outputs=outputs,
            init=nn.initializers.zeros,
            dtype=context.precision.parameters,
        )
        return rows + dispatcher.broadcast(bias.astype(rows.dtype))


def multiply_rows(
    dispatcher: TokenDispatcher,
    rows: jax.Array,
    matrices: Float[Array, "E D F"] | LowRankWeight | QuantizedWeight,
    *,
    in_order: bool = False,  # read codes after the rows are computed: see `order_after`
) -> jax.Array:
    """Multiply rows with the matrices of their experts."""
    if isinstance(matrices, LowRankWeight):
        low_rank = dispatcher.matmul(rows, matrices.a)
        update = matrices.scale * dispatcher.matmul(low_rank, matrices.b)
        return multiply_rows(dispatcher, rows, matrices.base, in_order=in_order) + update
    if isinstance(matrices, QuantizedWeight):
        matrices = order_after(matrices, rows) if in_order else matrices
        return multiply_dequantized(dispatcher.matmul, rows, matrices)
    return dispatcher.matmul(rows, matrices)


def choose_dispatcher(
    config: MoEConfig, routing: Routing, context: ModelContext
) -> TokenDispatcher:
    """Return the dispatcher for a configuration and hardware.

    Sorting pays on a single accelerator only: XLA's CPU compiler expands `ragged_dot` into E dense
    products, and a sort over sharded tokens would gather them on every device.
    """
    # With a capacity all shapes are static, on any hardware and with any sharding.
    if config.capacity_factor:
        return CapacityDispatcher.from_routing(routing, config.capacity_factor, context.constrain)
    hardware = context.hardware
    single_accelerator = hardware.platform != "cpu" and hardware.count == 1
    if config.dispatcher == "sorted" or (config.dispatcher == "auto" and single_accelerator):
        return SortedDispatcher.from_routing(routing)
    return DenseDispatcher(routing, context.constrain)
