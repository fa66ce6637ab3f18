"""Interface and shared parts of all models: embeddings, the stack of layers, and logits."""

import abc
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import meta

from transformer.attention.base import Outputs
from transformer.attention.masks import Mask, MaskPattern
from transformer.config import EncoderConfig, TransformerConfig
from transformer.context import ActivationConstraint, ModelContext, unconstrained
from transformer.hardware import Hardware
from transformer.layers.basic import Norm, apply_matrix
from transformer.layers.embedding import declare_embedding, declare_table, embed_tokens
from transformer.layers.logical_axes import unbox_axes
from transformer.layers.stack import Stack, StackOutput
from transformer.models.input_checks import InconclusiveDimensionOperation, check_length
from transformer.shapes import check_shapes

LOGITS: Outputs = frozenset({"logits"})
"""Default `outputs` of a model: logits, and no auxiliary outputs."""

EXAMPLE_TOKENS = jax.ShapeDtypeStruct((1, 1), jnp.int32)
"""Smallest batch of tokens, for `Model.example_inputs`."""


class ModelOutput(NamedTuple):
    """Result of a model."""

    logits: jax.Array | None
    """[B, T, V padded], or [B, C] / [B, T, C] of a classifier / tagger. None if not requested."""
    hidden: jax.Array
    """[B, T, D] hidden states after the final norm."""
    cache: Any = None
    """The input's cache with the new tokens appended; None without a cache."""
    aux: Any = ()
    """Requested auxiliary outputs: one dict for each place of the layer pattern, with arrays
    stacked over its layers."""


class Model(nn.Module, abc.ABC):
    """Base class of all models. Parameters are nested dicts of arrays."""

    config: TransformerConfig
    hardware: Hardware = Hardware()
    constrain: ActivationConstraint = unconstrained

    predicted_fraction: ClassVar[float] = 1.0
    """Fraction of tokens with a vocabulary prediction, for FLOPs: 0 for classifiers and taggers."""

    @abc.abstractmethod
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return shapes of the smallest inputs, for `init` and `jax.eval_shape`."""

    @nn.nowrap
    def init_with_output(self, *args: Any, **kwargs: Any) -> Any:
        """Like `nn.Module.init_with_output`, with plain arrays; so `init` returns them too.

        `logical_axes` returns the names of their axes.
        """
        return meta.unbox(_call(super().init_with_output, args, kwargs, with_variables=True))

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> ModelOutput:
        """Like `nn.Module.apply`, typed; the arguments are those of `__call__`."""
        mutable = kwargs.get("mutable", False) is not False
        output: Any
        try:
            output = _call(super().apply, (variables, *args), kwargs, with_variables=mutable)
        except InconclusiveDimensionOperation as error:
            raise ValueError(
                "inputs of symbolic shape: layers of this model split the tokens into blocks, "
                "which needs their number; export it with a concrete length"
            ) from error
        return output

    @nn.nowrap
    def logical_axes(self) -> Any:
        """Return the tree of `LogicalAxes` of the parameters."""
        init = super().init_with_output
        boxed = jax.eval_shape(init, jax.random.key(0), *self.example_inputs())[1]
        axes: dict[str, Any] = unbox_axes(boxed["params"])
        return axes

    @nn.nowrap
    def init_params(self, rng: jax.Array) -> Any:
        """Return initial parameters: `init` with the smallest inputs."""
        inputs = [jnp.zeros(each.shape, each.dtype) for each in self.example_inputs()]
        return self.init(rng, *inputs)["params"]

    @property
    def context(self) -> ModelContext:
        """Settings that all modules of the model share."""
        config = self.config
        return ModelContext(
            d_model=config.d_model,
            num_layers=config.num_layers,
            precision=config.precision,
            initialization=config.initialization,
            hardware=self.hardware,
            constrain=self.constrain,
        )


def _call(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    with_variables: bool,
) -> Any:
    """Call `init_with_output` or `apply`: with automatic axes if a mesh has explicit ones."""
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.Array) and jax.typeof(leaf).sharding.mesh.explicit_axes:
            from transformer.models.explicit_axes import call_with_auto_axes

            return call_with_auto_axes(function, args, kwargs, leaf, with_variables)
    return function(*args, **kwargs)


class BackboneOutput(NamedTuple):
    """Result of `apply_backbone`."""

    stack_output: StackOutput  # x [B, T, D] after the final norm
    embedding_table: jax.Array  # [V padded, D]


def apply_backbone(
    module: nn.Module,
    tokens: jax.Array,  # [B, T]
    *,
    config: TransformerConfig,
    context: ModelContext,
    positions: jax.Array | None,  # [B or 1, T]; None: 0 to T - 1
    segments: jax.Array | None,  # [B, T] documents, from 1; 0 is padding
    single_document: bool = False,  # promise: each row has one document and padding
    token_types: jax.Array | None = None,  # [B, T]
    prefix_lengths: jax.Array | None = None,  # [B]
    cache: tuple[Any, ...] | None = None,
    dropout_rngs: jax.Array | None,  # [B]
    outputs: Outputs,
) -> BackboneOutput:
    """Embed tokens and apply the layers, in the scope of `module`.

    All models with one stack share this function, so their parameter trees and the checks of their
    inputs are alike.

    Raises:
      ValueError: If shapes disagree, or inputs exceed a table of learned positions.
    """
    check_shapes(
        tokens=(tokens, "B T"),
        positions=(positions, "B? T"),
        segments=(segments, "B? T"),
        token_types=(token_types, "B? T"),
        prefix_lengths=(prefix_lengths, "B?"),
        dropout_rngs=(dropout_rngs, "B"),
    )
    if config.max_length is not None:
        check_length(tokens, config, positions)
    positions = positions_or_arange(positions, tokens)
    table = declare_embedding(module, "embedding", config.padded_vocab_size, config)
    shared: dict[str, Any] = dict(positions=positions, dropout_rngs=dropout_rngs)
    x = embed_tokens(
        module, table, tokens, token_types=token_types, config=config, context=context, **shared
    )
    # With a cache the mask is causal in any model: the cache holds room, but no keys, beyond each
    # example's newest token.
    pattern = MaskPattern(
        causal=config.causal or cache is not None, prefix=prefix_lengths is not None
    )
    mask = Mask(
        pattern,
        positions=positions,
        segments=segments,
        prefix_lengths=prefix_lengths,
        single_document=single_document,
    )
    inputs: dict[str, Any] = dict(mask=mask, cache=cache, outputs=outputs, **shared)
    return BackboneOutput(apply_layers(config, config, context, x, **inputs), table)


def apply_layers(
    side_config: TransformerConfig | EncoderConfig,  # has the layer pattern and the final norm
    config: TransformerConfig,
    context: ModelContext,
    x: jax.Array,  # [B, T, D]
    **inputs: Any,  # of `Stack.__call__`
) -> StackOutput:
    """Apply a stack and its final norm, in the scope of the calling module."""
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
    """Declare the output matrix of a model without tied embeddings."""
    sizes = {"embed": config.d_model}, {"vocab": config.padded_vocab_size}
    return declare_table(module, "output", *sizes, config)


def get_output_matrix(
    params: dict[str, Any],
    config: TransformerConfig,
) -> jax.Array:  # [D, V padded]
    """Return the output matrix from a model's parameters, tied or not."""
    matrix: jax.Array = params["embedding"].T if config.tie_embeddings else params["output"]
    return matrix


def compute_logits(
    hidden: jax.Array,  # [B, T, D]
    matrix: jax.Array,  # [D, V padded]
    model: Model,
    bias: jax.Array | None = None,  # [V padded]
) -> jax.Array:  # [B, T, V padded]
    """Return logits over the vocabulary; padding rows get the lowest finite number."""
    logits = apply_matrix(hidden, matrix.astype(hidden.dtype), 1, model.context.flatten_tokens)
    logits = logits if bias is None else logits + bias.astype(logits.dtype)[None, None]
    return mask_padded_logits(logits, model.config.vocab_size)


def mask_padded_logits(
    logits: jax.Array,  # [..., V padded]
    vocab_size: int,  # V
) -> jax.Array:  # [..., V padded]
    """Replace the logits of vocabulary padding by the lowest finite number."""
    if logits.shape[-1] == vocab_size:
        return logits
    in_vocab = jnp.arange(logits.shape[-1]) < vocab_size
    in_vocab = in_vocab.reshape((1,) * (logits.ndim - 1) + (-1,))
    return jnp.where(in_vocab, logits, jnp.finfo(logits.dtype).min)


def positions_or_arange(
    positions: jax.Array | None,  # [B or 1, T]
    tokens: jax.Array,  # [B, T]
) -> jax.Array:  # [B or 1, T]
    """Return `positions`, or 0 to T - 1 if None."""
    return jnp.arange(tokens.shape[1])[None, :] if positions is None else positions
