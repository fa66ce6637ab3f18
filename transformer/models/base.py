"""What all models have in common: how they are called, initialised and described.

What models of one stack share: tokens embedded, then passed through the layers.
"""

import abc
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core import meta

from transformer.attention.base import Outputs
from transformer.attention.masks import Mask, MaskPattern
from transformer.config import EncoderConfig, TransformerConfig
from transformer.context import ActivationConstraint, ModelContext, unconstrained
from transformer.hardware import Hardware
from transformer.layers.embedding import declare_embedding, embed_tokens
from transformer.layers.norms import Norm
from transformer.layers.params import apply_matrix, declare_weight, unbox_axes
from transformer.layers.stack import Stack, StackOutput
from transformer.precision import finfo_min

LOGITS: Outputs = frozenset({"logits"})


class ModelOutput(NamedTuple):
    """What a model makes of tokens."""

    logits: (
        jax.Array | None
    )  # [B, T, V padded], or [..., C] of a classifier or tagger; if requested
    hidden: jax.Array  # [B, T, D] after the final norm
    cache: Any = None  # as it came in, with the new tokens
    aux: Any = ()  # of each place of the pattern, stacked over its layers


class Model(nn.Module, abc.ABC):
    """The interface. `model.init(key, *inputs)["params"]` are plain nested dicts of arrays."""

    config: TransformerConfig
    hardware: Hardware = Hardware()
    constrain: ActivationConstraint = unconstrained

    predicted_fraction: ClassVar[float] = 1.0
    """Share of the tokens of which a word is told: 0 of what tells classes or tags."""

    @abc.abstractmethod
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The smallest inputs: what `init` can be given, or shapes for `jax.eval_shape`."""

    @nn.nowrap
    def init(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.init`, with plain arrays; `axes` tells what their axes are called."""
        return meta.unbox(super().init(*args, **kwargs))

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> ModelOutput:
        """As `nn.Module.apply`; the arguments are those of `__call__`."""
        output: Any = super().apply(variables, *args, **kwargs)
        return output

    @nn.nowrap
    def logical_axes(self) -> Any:
        """The logical axes of every parameter: a tree of `Axes` like that of the parameters."""
        boxed = jax.eval_shape(super().init, jax.random.key(0), *self.example_inputs())
        axes: dict[str, Any] = unbox_axes(boxed["params"])
        return axes

    @nn.nowrap
    def init_params(self, rng: jax.Array) -> Any:
        """The parameters that a key gives: `init` on the smallest inputs."""
        inputs = [jnp.zeros(each.shape, each.dtype) for each in self.example_inputs()]
        return self.init(rng, *inputs)["params"]

    @property
    def context(self) -> ModelContext:
        config = self.config
        return ModelContext(
            d_model=config.d_model,
            num_layers=config.num_layers,
            precision=config.precision,
            initialization=config.initialization,
            hardware=self.hardware,
            constrain=self.constrain,
        )


EXAMPLE_TOKENS = jax.ShapeDtypeStruct((1, 1), jnp.int32)
"""The smallest input of tokens."""


def apply_layers(
    side_config: TransformerConfig | EncoderConfig,  # whose pattern and final norm
    config: TransformerConfig,
    context: ModelContext,
    x: jax.Array,  # [B, T, D]
    **inputs: Any,
) -> StackOutput:
    """A stack with its final norm, in the scope of the module that calls."""
    stack = Stack(
        side_config.layer_pattern, context, config.layer_loop, config.remat, name="layers"
    )
    output = stack(x, **inputs)
    if side_config.final_norm is None:
        return output
    norm = Norm(side_config.final_norm, config.precision, name="final_norm")
    return output._replace(x=norm(output.x))


def declare_output_matrix(
    module: nn.Module, config: TransformerConfig
) -> jax.Array:  # [D, V padded]
    """Declares the output matrix of a model whose embeddings are not tied to it."""
    axes = {"embed": config.d_model}, {"vocab": config.padded_vocab_size}
    init, dtype = config.initialization.embedding_initializer(), config.precision.parameters
    return declare_weight(module, "output", inputs=axes[0], outputs=axes[1], init=init, dtype=dtype)


def compute_logits(
    hidden: jax.Array,  # [B, T, D]
    matrix: jax.Array,  # [D, V padded]
    model: Model,
    bias: jax.Array | None = None,  # [V padded]
) -> jax.Array:  # [B, T, V padded]
    """Logits of all words; those of the padding are the lowest number."""
    logits = apply_matrix(hidden, matrix.astype(hidden.dtype), 1, model.context.flatten_tokens)
    logits = logits if bias is None else logits + bias.astype(logits.dtype)[None, None]
    return mask_padded_logits(logits, model.config.vocab_size)


def get_output_matrix(
    params: dict[str, Any],
    config: TransformerConfig,
) -> jax.Array:  # [D, V padded]
    """The matrix from hidden states to logits, taken from a model's parameters."""
    matrix: jax.Array = params["embedding"].T if config.tie_embeddings else params["output"]
    return matrix


def mask_padded_logits(
    logits: jax.Array,  # [..., V padded]
    vocab_size: int,  # V
) -> jax.Array:  # [..., V padded]
    """The lowest number in place of the logits of words that are not there."""
    if logits.shape[-1] == vocab_size:
        return logits
    real = jnp.arange(logits.shape[-1]) < vocab_size
    real = real.reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.where(real, logits, finfo_min(logits.dtype))


def check_tokens(
    tokens: jax.Array,  # [B, T]
    config: TransformerConfig,
    positions: jax.Array | None = None,  # [B, T]
) -> None:
    """Raises ValueError for what is no batch of tokens, or too long for learned positions.

    Positions whose values are not known yet, while a program is traced, cannot be looked at.
    """
    if tokens.ndim != 2:
        raise ValueError(f"tokens of shape {tokens.shape}: give [batch, length]")
    limit = config.max_length
    if limit is not None and tokens.shape[1] > limit:
        raise ValueError(
            f"{tokens.shape[1]} tokens: the table of learned positions has {limit} rows; "
            "give shorter inputs or a longer table"
        )
    if limit is None or positions is None or isinstance(positions, jax.core.Tracer):
        return
    last = int(np.asarray(positions).max(initial=-1))
    if last >= limit:
        raise ValueError(
            f"position {last}: the table of learned positions has {limit} rows, from 0; give "
            "smaller ones or a longer table"
        )


def check_cache_inputs(
    cache: Any,
    positions: jax.Array | None,
    segments: jax.Array | None,
) -> None:
    """Raises ValueError for a cache with inputs that cannot be decoded from it."""
    if cache is not None and positions is None:
        raise ValueError("a cache without positions: say where the new tokens stand")
    if cache is not None and segments is not None:
        raise ValueError("a cache with segments: decode one document for each example")


def positions_or_arange(
    positions: jax.Array | None,  # [B, T]
    tokens: jax.Array,  # [B, T]
) -> jax.Array:  # [B or 1, T]
    """The positions given, or 0 to T - 1."""
    return jnp.arange(tokens.shape[1])[None, :] if positions is None else positions


class BackboneOutput(NamedTuple):
    """Tokens as the layers have read them."""

    stack_output: StackOutput  # x [B, T, D] after the final norm
    embedding_table: jax.Array  # [V padded, D] the embedding table


def apply_backbone(
    module: nn.Module,
    tokens: jax.Array,  # [B, T]
    *,
    config: TransformerConfig,
    context: ModelContext,
    positions: jax.Array | None,  # [B, T]; None: 0 to T - 1
    segments: jax.Array | None,  # [B, T] documents, from 1; 0 is padding
    single_document: bool = False,  # whether the segments of a row are one and padding
    token_types: jax.Array | None = None,  # [B, T]
    prefix_lengths: jax.Array | None = None,  # [B]
    cache: tuple[Any, ...] | None = None,
    dropout_rngs: jax.Array | None,  # [B]
    outputs: Outputs,
) -> BackboneOutput:
    """Declares embeddings and layers of `module`, so that all such models have one layout."""
    check_tokens(tokens, config, positions)
    positions = positions_or_arange(positions, tokens)
    words = declare_embedding(module, "embedding", config.padded_vocab_size, config)
    given: dict[str, Any] = dict(positions=positions, dropout_rngs=dropout_rngs)
    x = embed_tokens(
        module, words, tokens, token_types=token_types, config=config, context=context, **given
    )
    # Behind the newest token of a cache there is nothing yet, but room: no model sees it.
    causal = config.causal or cache is not None
    pattern = MaskPattern(causal=causal, prefix=prefix_lengths is not None)
    mask = Mask(
        pattern,
        positions=positions,
        segments=segments,
        prefix_lengths=prefix_lengths,
        single_document=single_document,
    )
    return BackboneOutput(
        apply_layers(config, config, context, x, mask=mask, cache=cache, outputs=outputs, **given),
        words,
    )
