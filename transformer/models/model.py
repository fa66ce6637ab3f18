"""Interface of all models, and what they share: embeddings and a stack of layers."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict
from jaxtyping import Array, Float, Int, Key

from transformer.attention.masks import Mask, MaskPattern, Segments, positions_or_arange
from transformer.attention.mixer import MixerInputs
from transformer.attention.rope import LongRoPEScaling, RoPE
from transformer.hardware import Hardware
from transformer.layers.logical_axes import abstract_weights
from transformer.layers.norms import Norm
from transformer.model_context import (
    ActivationConstraint,
    ModelContext,
    has_explicit_axes,
    unconstrained,
)
from transformer.models.block import Memory
from transformer.models.config import EncoderConfig, TransformerConfig
from transformer.models.embedding import declare_embedding, embed_tokens
from transformer.models.requests import make_taps
from transformer.models.stack import Stack, StackOutput, declare_shared_bias
from transformer.taps import Edit, Outputs
from transformer.validation import (
    check_integer,
    check_positions,
    check_segments,
    check_shapes,
    check_token_ids,
    may_be_below,
)

LOGITS: Outputs = frozenset({"logits"})
"""Default `outputs` of a model: logits, and no auxiliary outputs."""

EXAMPLE_TOKENS = jax.ShapeDtypeStruct((1, 1), jnp.int32)
"""Smallest batch of tokens, for `Model.example_inputs`."""


class ModelOutput(NamedTuple):
    """Result of a model."""

    logits: Float[Array, "B T V"] | Float[Array, "B C"] | None
    """[B, T, V], or [B, C] / [B, T, C] of a classifier / tagger. None if not requested."""
    hidden: Float[Array, "B T D"]
    """[B, T, D] hidden states after the final norm."""
    cache: Any = None
    """The input's cache with the new tokens appended; None without a cache."""
    aux: Any = ()
    """Requested auxiliary outputs: one dict for each place of the layer pattern, with arrays
    stacked over its layers (`transformer.inspection.layer_values` reads them by layer)."""
    encoder_aux: Any = ()
    """`aux` of the encoder of an encoder-decoder."""


class BackboneOutput(NamedTuple):
    """Result of `Model.apply_backbone`."""

    x: Float[Array, "B T D"]
    cache: tuple[Any, ...] | None
    aux: tuple[dict[str, jax.Array], ...]
    embedding_table: Float[Array, "Vp De"]
    dropout_rngs: Key[Array, "B"] | None  # one for each example
    encoder_aux: Any = ()


class Model(nn.Module):
    """Base class of all models. Parameters are nested dicts of arrays.

    `init` and `apply` are Linen's. All models take these arguments, as far as they have a meaning
    for them.

    Args:
      positions: [B or 1, T] position of each token. None: 0 to T - 1.
      segments: [B, T] document of each token, from 1; 0 is padding. None: one document.
      token_types: [B, T] token type. None: all 0.
      cache: From `init_cache`; tokens are appended at their `positions`.
      dropout_rngs: [B] a random key for each example, or Flax's `rngs={"dropout": key}`. None: no
        dropout.
      outputs: Names of requested outputs (`transformer.inspection`).
      edits: Functions that replace intermediate values, by name (`transformer.inspection`).

    Raises:
      ValueError: Shapes or dtypes of arrays disagree, or tokens, positions or types of tokens are
        beyond the tables of the model.
    """

    config: TransformerConfig  # sizes and kinds of all layers
    hardware: Hardware = Hardware()  # what `auto` settings are resolved for
    constrain: ActivationConstraint = unconstrained  # sharding of activations over a mesh

    predicted_fraction: ClassVar[float] = 1.0
    """Fraction of tokens with a vocabulary prediction, for FLOPs: 0 for classifiers and taggers."""

    if TYPE_CHECKING:  # Linen's, with the type of the result; `mutable` adds a second one

        def apply(self, variables: Any, *args: Any, **kwargs: Any) -> ModelOutput: ...

    @nn.nowrap
    def example_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return shapes of the smallest inputs, for `init` and `jax.eval_shape`."""
        return (EXAMPLE_TOKENS,)

    @nn.nowrap
    def logical_axes(self) -> Any:
        """Return the tree of `LogicalAxes` of the parameters."""
        return abstract_weights(self.init, jax.random.key(0), *self.example_inputs())[1]

    @nn.nowrap
    def init_params(self, rng: jax.Array) -> Any:
        """Return initial parameters: `init` with the smallest inputs, compiled as one program."""
        # Outside of a program each operation of `init` would be compiled alone, some hundred of
        # them. Inside of one they become a part of it, as JAX takes compiler options for the
        # outermost program only.
        if isinstance(rng, jax.core.Tracer):
            return _draw_params(self, rng)
        return _init_program(jax.default_backend())(self, rng)

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
            share_layers=config.share_layers,
        )

    def example_rngs(
        self,
        dropout_rngs: Key[Array, "B"] | None,
        num_examples: int,  # B
    ) -> Key[Array, "B"] | None:
        """Return a random key for each example: `dropout_rngs`, or Flax's `rngs` split among them.

        Raises:
          ValueError: For a single key, or keys in both arguments.
        """
        if self.has_rng("dropout"):
            if dropout_rngs is not None:
                raise ValueError(
                    "dropout_rngs and rngs: both have keys of dropout; give one of them"
                )
            key = self.make_rng("dropout")
            if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # of jax.random.PRNGKey
                key = jax.random.wrap_key_data(key)
            return jax.random.split(key, num_examples)
        if dropout_rngs is not None and dropout_rngs.shape != (num_examples,):
            raise ValueError(
                f"dropout_rngs of shape {dropout_rngs.shape}: has to be one typed key for each of "
                f"the {num_examples} examples; give jax.random.split(jax.random.key(0), "
                f"{num_examples})"
            )
        return dropout_rngs

    @nn.nowrap
    def apply_backbone(
        self,
        tokens: Int[Array, "B T"],
        *,
        positions: Int[Array, "#B T"] | None = None,
        segments: Segments | None = None,
        single_document: bool = False,  # promise: each row has one document and padding
        token_types: Int[Array, "#B T"] | None = None,
        prefix_lengths: Int[Array, "#B"] | None = None,
        cache: tuple[Any, ...] | None = None,
        dropout_rngs: Key[Array, "B"] | None = None,  # as the model gets them
        outputs: Outputs,
        edits: Mapping[str, Edit] | None = None,
    ) -> BackboneOutput:
        """Check the inputs of a model, embed tokens and apply the layers."""
        config, context = self.config, self.context
        check_shapes(
            tokens=(tokens, "B T", int),
            positions=(positions, "B? T | None", int),
            segments=(segments, "B? T | None", int, bool),
            token_types=(token_types, "B? T | None", int),
            prefix_lengths=(prefix_lengths, "B? | None", int),
        )
        if cache is not None:
            check_cache_inputs(cache, tokens, config.num_layers, positions, segments)
        dropout_rngs = self.example_rngs(dropout_rngs, tokens.shape[0])
        check_token_ids("tokens", tokens, config.vocab_size, config.padded_vocab_size)
        check_positions("tokens", tokens.shape[1], positions, config.max_length)
        check_segments("segments", segments)
        num_types = max(1, config.num_token_types)
        if token_types is not None and not may_be_below(token_types, num_types):
            raise ValueError(
                f"token_types: must be at least 0 and below {num_types}; "
                "TransformerConfig.num_token_types is the number of types"
            )
        positions = positions_or_arange(positions, tokens.shape[1])
        narrow = dataclasses.replace(context, d_model=config.embedding_width)
        table = declare_embedding(self, "embedding", config.padded_vocab_size, narrow)
        reject_explicit_axes(tokens=tokens, params=table)
        x = embed_tokens(
            self,
            table,
            tokens,
            positions,
            token_types,
            dropout_rngs,
            config=config,
            context=context,
        )
        # The cache has room, but no keys, beyond each example's newest token.
        causal = config.causal or cache is not None
        mask = Mask(
            MaskPattern(causal, prefix=prefix_lengths is not None),
            positions=positions,
            segments=segments,
            prefix_lengths=prefix_lengths,
            single_document=single_document,
        )
        inputs = MixerInputs(
            positions,
            mask,
            cache=cache,
            dropout_rngs=dropout_rngs,
            shared_bias=declare_shared_bias(self, config.layer_pattern, context),
            outputs=outputs,
            taps=make_taps(config, outputs, edits).layers,
        )
        output = apply_layers(config, config, context, x, inputs)
        return BackboneOutput(output.x, output.cache, output.aux, table, dropout_rngs)


def apply_layers(
    side_config: TransformerConfig | EncoderConfig,  # has the layer pattern and the final norm
    config: TransformerConfig,
    context: ModelContext,
    x: Float[Array, "B T D"],
    inputs: MixerInputs,
    memory: Memory | None = None,
) -> StackOutput:
    """Apply a stack and its final norm, in the scope of the calling module."""
    stack = Stack(
        side_config.layer_pattern, context, config.layer_loop, config.remat, name="layers"
    )
    output: StackOutput = stack(x, inputs, memory)
    if side_config.final_norm is None:
        return output
    return output._replace(x=Norm(side_config.final_norm, context, name="final_norm")(output.x))


# Initial weights are drawn by one program, compiled quickly, because it runs once.

INIT_OPTIMIZATION_LEVEL = 1
"""Level, from 0 to 3, to which XLA's CPU compiler optimizes the program."""


def init_compiler_options(platform: str) -> dict[str, Any] | None:
    """Return compiler options of a program that draws initial weights.

    On a CPU, most of the start of a short run would be LLVM optimizing the random numbers. With few
    of its passes the same values take a quarter of the time to compile, and little longer to draw
    (docs/performance.md).

    Args:
      platform: Name of the JAX backend: cpu, gpu or tpu.
    """
    # JAX's own setting asks for no optimization at all.
    if platform != "cpu" or jax.config.read("jax_disable_most_optimizations"):
        return None
    return {"xla_backend_optimization_level": INIT_OPTIMIZATION_LEVEL}


def _draw_params(model: Model, rng: jax.Array) -> Any:
    return model.init(rng, *map(jnp.zeros_like, model.example_inputs()))["params"]


@functools.cache
def _init_program(platform: str) -> Any:
    options = init_compiler_options(platform)
    return jax.jit(_draw_params, static_argnums=0, compiler_options=options)


# Checks of parameters and inputs


def check_params(model: Model, params: Any) -> None:
    """Raise ValueError unless these are parameters of the model: its paths, shapes and floats.

    Linen reads the weights that a model asks for and ignores all others, so a bias or a norm that
    the configuration lacks would silently be left out of the result. Call it where weights are
    loaded: `apply` does not.
    """
    if not isinstance(params, Mapping) or "params" in params:
        raise ValueError('params: are no dict of weights; give variables["params"]')
    expected = flatten_dict(jax.eval_shape(model.init_params, jax.random.key(0)), sep="/")
    given = flatten_dict(params, sep="/")
    for paths, problem in (
        (sorted(given.keys() - expected.keys()), "the model has no such weights"),
        (sorted(expected.keys() - given.keys()), "are missing"),
    ):
        if paths:
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            raise ValueError(
                f"params {', '.join(paths[:3])}{more}: {problem}; give the parameters of "
                "this configuration"
            )
    for path, weight in expected.items():
        shape, dtype = jnp.shape(given[path]), jnp.result_type(given[path])
        if shape != weight.shape or not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"params {path} of shape {shape}, {dtype}: the model has floats of shape "
                f"{weight.shape}; give the parameters of this configuration"
            )


def reject_explicit_axes(**arrays: jax.Array | None) -> None:
    """Raise ValueError for arrays on a mesh with explicit axes, where lookups are ambiguous."""
    for name, array in arrays.items():
        if has_explicit_axes(array):
            raise ValueError(
                f"{name}: is on a mesh with explicit axes; call "
                "transformer.models.explicit_sharding.with_auto_axes(model.apply), or make the "
                "mesh with axis_types=(jax.sharding.AxisType.Auto,) for each axis"
            )


# Caches


def check_cache_inputs(
    cache: Any,
    tokens: Int[Array, "B T"],
    num_layers: int,
    positions: jax.Array | None,
    segments: jax.Array | None,
) -> None:
    """Raise ValueError for inputs that do not go with a cache."""
    if positions is None:
        raise ValueError("cache: needs positions; give those of the new tokens")
    if segments is not None:
        raise ValueError(
            "cache: cannot be combined with segments; decode one document for each example"
        )
    if not isinstance(cache, list | tuple):
        raise ValueError(
            f"cache of type {type(cache).__name__}: give that of the model's init_cache"
        )
    if len(cache) != num_layers:
        raise ValueError(
            f"cache: has {len(cache)} layers, the model {num_layers}; give that of its init_cache"
        )
    # Axis 0 is the batch in most caches; one of several leading sizes is left to the mixer.
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(cache) if leaf.ndim}
    if len(sizes) == 1 and tokens.shape[0] not in sizes:
        raise ValueError(
            f"cache: is for {sizes.pop()} examples, tokens has {tokens.shape[0]}; give init_cache "
            "this batch size"
        )


def max_cache_length(config: TransformerConfig) -> int | None:
    """Return the largest length of a cache; None: any.

    LongRoPE changes its factors after `original_max_length`, when earlier keys are already cached.
    """
    positions = (getattr(block.mixer, "position", None) for block in config.layer_pattern)
    limits = [
        position.scaling.original_max_length
        for position in positions
        if isinstance(position, RoPE)
        and isinstance(position.scaling, LongRoPEScaling)
        and position.scaling.factors == "by_length"
    ]
    if config.max_length is not None:
        limits.append(config.max_length)
    return min(limits, default=None)


def check_cache_length(config: TransformerConfig, length: int) -> None:
    """Raise ValueError if positions do not reach as far as a cache."""
    check_integer("length", length, 1)
    limit = max_cache_length(config)
    if limit is not None and length > limit:
        raise ValueError(
            f"a cache of {length} tokens: the model's positions reach {limit}; give a shorter one, "
            "a longer table of positions, or LongRoPEScaling with factors long"
        )
