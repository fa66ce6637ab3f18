"""Interface of all models, and what they share: embeddings and a stack of layers."""

from collections.abc import Callable, Mapping, Set
from typing import Any, ClassVar, NamedTuple, cast

import jax
from flax import errors
from flax import linen as nn
from flax.core import meta

from transformer.attention.masks import Mask, MaskPattern, positions_or_arange
from transformer.attention.mixer import MixerInputs, Outputs
from transformer.config import EncoderConfig, TransformerConfig
from transformer.hardware import Hardware
from transformer.inspection import Edit, make_taps
from transformer.layers.basic import Norm
from transformer.layers.cross_attention import Memory
from transformer.layers.embedding import declare_embedding, embed_tokens
from transformer.layers.logical_axes import unbox_axes
from transformer.layers.stack import Stack, StackOutput
from transformer.model_context import ActivationConstraint, ModelContext, unconstrained
from transformer.models.initial_weights import draw_weights
from transformer.models.input_checks import check_tokens, invalid_rng
from transformer.models.parameter_checks import DECLARED, check_variables
from transformer.shape_checks import check_shapes, may_be_below

LOGITS: Outputs = frozenset({"logits"})
"""Default `outputs` of a model: logits, and no auxiliary outputs."""

DEFAULT_OUTPUTS: Outputs = LOGITS | {"losses"}
"""Outputs that all models have, so that their names need no check."""

EXAMPLE_TOKENS = jax.ShapeDtypeStruct((1, 1), jax.numpy.int32)
"""Smallest batch of tokens, for `Model.example_inputs`."""


class ModelOutput(NamedTuple):
    """Result of a model."""

    logits: jax.Array | None
    """[B, T, V], or [B, C] / [B, T, C] of a classifier / tagger. None if not requested."""
    hidden: jax.Array
    """[B, T, D] hidden states after the final norm."""
    cache: Any = None
    """The input's cache with the new tokens appended; None without a cache."""
    aux: Any = ()
    """Requested auxiliary outputs: one dict for each place of the layer pattern, with arrays
    stacked over its layers (`transformer.inspection.layer_values` reads them by layer)."""
    encoder_aux: Any = ()
    """`aux` of the encoder of an encoder-decoder."""


class Model(nn.Module):
    """Base class of all models. Parameters are nested dicts of arrays."""

    config: TransformerConfig  # sizes and kinds of all layers
    hardware: Hardware = Hardware()  # what `auto` settings are resolved for
    constrain: ActivationConstraint = unconstrained  # sharding of activations over a mesh

    predicted_fraction: ClassVar[float] = 1.0
    """Fraction of tokens with a vocabulary prediction, for FLOPs: 0 for classifiers and taggers."""

    def __post_init__(self) -> None:
        check_shapes(config=(self.config, TransformerConfig), hardware=(self.hardware, Hardware))
        super().__post_init__()

    @nn.nowrap
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return shapes of the smallest inputs, for `init` and `jax.eval_shape`."""
        return (EXAMPLE_TOKENS,)

    @nn.nowrap
    def init_with_output(self, rngs: Any, *args: Any, **kwargs: Any) -> Any:
        """Like Linen's, with plain arrays, also in `init`; `logical_axes` has their axis names."""
        try:
            output, variables = meta.unbox(_call(super().init_with_output, (rngs, *args), kwargs))
        except errors.InvalidRngError as error:
            raise invalid_rng(rngs, error) from None
        DECLARED.add((type(self), self.config, jax.tree.structure(variables)))
        return output, variables

    @nn.nowrap
    def apply(self, variables: Any, *args: Any, **kwargs: Any) -> ModelOutput:
        """Like Linen's, with the arguments of `__call__`. ValueError: weights of another model."""
        key = type(self), self.config, jax.tree.structure(variables)
        if "rngs" in kwargs or key not in DECLARED:
            check_variables(self, variables, kwargs.get("rngs"))
        return cast(ModelOutput, _call(super().apply, (variables, *args), kwargs))

    @nn.nowrap
    def logical_axes(self) -> Any:
        """Return the tree of `LogicalAxes` of the parameters."""
        inputs = jax.random.key(0), *self.example_inputs()
        _, boxed = jax.eval_shape(super().init_with_output, *inputs)
        return unbox_axes(boxed["params"])

    @nn.nowrap
    def init_params(self, rng: jax.Array) -> Any:
        """Return initial parameters: `init` with the smallest inputs, compiled as one program."""
        return draw_weights(self, rng)

    @property
    def context(self) -> ModelContext:
        """Settings that all modules of the model share."""
        config = self.config
        settings = config.d_model, config.num_layers, config.precision, config.initialization
        return ModelContext(*settings, self.hardware, self.constrain)

    @nn.nowrap
    def apply_backbone(
        self,
        tokens: jax.Array,  # [B, T]
        *,
        positions: jax.Array | None = None,  # [B or 1, T]; None: 0 to T - 1
        segments: jax.Array | None = None,  # [B, T] documents, from 1; 0 is padding
        single_document: bool = False,  # promise: each row has one document and padding
        token_types: jax.Array | None = None,  # [B, T]
        prefix_lengths: jax.Array | None = None,  # [B]
        cache: tuple[Any, ...] | None = None,
        dropout_rngs: jax.Array | None = None,  # [B]
        outputs: Outputs,
        edits: Mapping[str, Edit] | None = None,
    ) -> tuple[StackOutput, jax.Array]:  # x [B, T, D] after the final norm; table [V padded, D]
        """Embed tokens and apply the layers; return the stack's output and the embedding table.

        ValueError: shapes or dtypes disagree, or inputs exceed a table of learned positions.
        """
        check_shapes(
            tokens=(tokens, "B T", int),
            positions=(positions, "B? T | None", int),
            segments=(segments, "B? T | None", int, bool),
            token_types=(token_types, "B? T | None", int),
            prefix_lengths=(prefix_lengths, "B? | None", int),
            dropout_rngs=(dropout_rngs, "B | None"),
            outputs=(outputs, Set),
        )
        config, context = self.config, self.context
        in_range = tokens.dtype.itemsize >= 4 and may_be_below(tokens, config.vocab_size)
        in_range &= segments is None or may_be_below(segments, 0)  # traced
        if config.max_length is not None or not in_range:
            check_tokens(tokens, config, positions, segments)
        positions = positions_or_arange(positions, tokens.shape[1])
        table = declare_embedding(self, "embedding", config.padded_vocab_size, config)
        embedded = tokens, positions, token_types, dropout_rngs
        x = embed_tokens(self, table, *embedded, config=config, context=context)
        # The cache has room, but no keys, beyond each example's newest token.
        causal, prefix = config.causal or cache is not None, prefix_lengths is not None
        arrays: Any = dict(positions=positions, segments=segments, prefix_lengths=prefix_lengths)
        mask = Mask(MaskPattern(causal, prefix=prefix), **arrays, single_document=single_document)
        taps = make_taps(self, outputs, edits)[0] if edits or outputs - DEFAULT_OUTPUTS else None
        options: Any = dict(cache=cache, dropout_rngs=dropout_rngs, outputs=outputs, taps=taps)
        inputs = MixerInputs(positions, mask, **options)
        return apply_layers(config, config, context, x, inputs), table


def apply_layers(
    side_config: TransformerConfig | EncoderConfig,  # has the layer pattern and the final norm
    config: TransformerConfig,
    context: ModelContext,
    x: jax.Array,  # [B, T, D]
    inputs: MixerInputs,
    memory: Memory | None = None,
) -> StackOutput:
    """Apply a stack and its final norm, in the scope of the calling module."""
    pattern, loop = side_config.layer_pattern, config.layer_loop
    output = Stack(pattern, context, loop, config.remat, name="layers")(x, inputs, memory)
    if side_config.final_norm is not None:
        norm = Norm(side_config.final_norm, context, name="final_norm")
        output = output._replace(x=norm(output.x))
    return output


def _call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a method of Linen; with automatic axes if the mesh of an array has explicit ones."""
    for leaf in jax.tree.leaves((args, kwargs)):
        if isinstance(leaf, jax.Array) and jax.typeof(leaf).sharding.mesh.explicit_axes:
            from transformer.models.explicit_sharding import call_with_auto_axes

            return call_with_auto_axes(function, args, kwargs, leaf)
    return function(*args, **kwargs)
