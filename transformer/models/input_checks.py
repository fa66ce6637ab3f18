"""Checks of a model's inputs beyond shapes: lengths, positions, token ids, caches, random keys."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from transformer.attention.rope_scaling import LongRoPEScaling
from transformer.config import TransformerConfig
from transformer.shape_checks import check_shapes, may_be_below
from transformer.validation import check_size

# jax 0.10 moved it there from `jax.core`.
InconclusiveDimensionOperation: type[Exception] = (
    jax.errors if hasattr(jax.errors, "InconclusiveDimensionOperation") else jax.core
).InconclusiveDimensionOperation


def check_tokens(
    tokens: jax.Array,  # [B, T]
    config: TransformerConfig,
    positions: jax.Array | None = None,  # [B or 1, T]
    segments: jax.Array | None = None,  # [B or 1, T]
    *,
    vocab_size: int = 0,  # 0: that of the configuration
) -> None:
    """Raise ValueError if tokens or positions exceed a table of learned positions.

    Also if the dtype of tokens is too narrow for the vocabulary, or segments mark no token. Arrays
    that are traced have no values yet and are not checked.
    """
    check_segments("segments", segments)
    rows = config.pad_vocab_size(vocab_size) if vocab_size else config.padded_vocab_size
    # Unsigned indices work at any width; for signed ones JAX computes index + rows in their dtype.
    if tokens.dtype.kind == "i" and np.iinfo(tokens.dtype).max < rows:
        raise ValueError(f"tokens of dtype {tokens.dtype}: cannot index {rows:,} rows; give int32")
    vocab_size = vocab_size or config.vocab_size
    if not may_be_below(tokens, vocab_size):
        ids = np.asarray(tokens)  # by NumPy, which computes while JAX traces
        wrong = next(x for x in (ids.min(), ids.max()) if not 0 <= x < vocab_size)
        raise ValueError(
            f"tokens: {wrong} is not one of the model's {vocab_size:,}; use the tokenizer that it "
            "was trained with"
        )
    check_positions("tokens", tokens.shape[1], positions, config)


def check_positions(
    inputs: str,  # name of the inputs, in messages
    length: Any,  # T; maybe symbolic
    positions: jax.Array | None,  # [B or 1, T]; -1: padding
    config: TransformerConfig,
) -> None:
    """Raise ValueError if inputs or their positions exceed a table of learned positions."""
    limit = config.max_length
    if limit is None:
        return
    try:
        too_long = length > limit
    except InconclusiveDimensionOperation as error:
        raise ValueError(
            f"{inputs} of symbolic length {length}: the table of learned positions has {limit} "
            f'rows; give jax.export.symbolic_shape the constraint "{length} <= {limit}"'
        ) from error
    if too_long:
        raise ValueError(
            f"{length} {inputs}: the table of learned positions has {limit} rows; give shorter "
            "inputs or a longer table"
        )
    if positions is None or may_be_below(positions, limit):
        return
    values = np.asarray(positions)
    for position in (values.min(), values.max()):
        if not -1 <= position < limit:
            raise ValueError(
                f"position {position}: the table of learned positions has {limit} rows, from 0; "
                f"give positions from 0 to {limit - 1}, or a longer table"
            )


def check_segments(name: str, segments: jax.Array | None) -> None:
    """Raise ValueError for negative segments, and for those that are padding throughout.

    Traced ones have no values yet. Segments counted from 0 cannot be told from padding on the left.
    """
    if segments is None or may_be_below(segments, 0):  # traced, or empty
        return
    values = np.asarray(segments)
    if values.min() < 0:
        raise ValueError(
            f"{name}: {values.min()} is not a document; number documents from 1, padding is 0"
        )
    if not values.any():
        raise ValueError(f"{name}: are all 0, which is padding; number documents from 1")


def check_token_ids(
    name: str,
    tokens: Sequence[int] | np.ndarray,  # [T]
    vocab_size: int,
    if_empty: str = "give it at least one token",
) -> None:
    """Raise ValueError unless `tokens` is a sequence of one or more ids below `vocab_size`."""
    row = np.asarray(tokens)
    if not row.size:
        raise ValueError(f"{name}: is empty; {if_empty}")
    check_shapes(**{name: (row, "T", int)})
    for token in (row.min(), row.max()):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{name}: token {token} is not one of the model's {vocab_size:,}; use the "
                "tokenizer that it was trained with"
            )


def check_cache_inputs(
    cache: Any,
    tokens: Any,  # [B, T]
    num_layers: int,
    positions: jax.Array | None,
    segments: jax.Array | None,
) -> None:
    """Raise ValueError for inputs that do not go with a cache."""
    leaves = jax.tree.leaves(cache)
    is_sequence = isinstance(cache, list | tuple)
    if not is_sequence or not all(hasattr(leaf, "ndim") for leaf in leaves):
        raise ValueError(
            f"cache of type {type(cache).__name__}: give that of the model's init_cache"
        )
    if positions is None:
        raise ValueError("cache: needs positions; give those of the new tokens")
    if segments is not None:
        raise ValueError(
            "cache: cannot be combined with segments; decode one document for each example"
        )
    if len(cache) != num_layers:
        raise ValueError(
            f"cache: has {len(cache)} layers, the model {num_layers}; give that of its init_cache"
        )
    # Axis 0 is the batch in most caches; one of several leading sizes is left to the mixer.
    sizes = {leaf.shape[0] for leaf in leaves if leaf.ndim}
    if len(sizes) == 1 and getattr(tokens, "ndim", 0) == 2 and len(tokens) not in sizes:
        raise ValueError(
            f"cache: is for {sizes.pop()} examples, tokens has {len(tokens)}; give init_cache this "
            "batch size"
        )


def invalid_rng(rngs: Any, error: Exception) -> Exception:
    """Return an error for an argument of `init` that is not a random key.

    Of a dict of keys, it is Linen's own error, which names the missing key.
    """
    if isinstance(rngs, Mapping):
        return error
    is_array = hasattr(rngs, "shape")
    shown = f"of shape {rngs.shape}, {rngs.dtype}" if is_array else f"of type {type(rngs).__name__}"
    return ValueError(f"rng {shown}: give one random key, such as jax.random.key(0)")


def check_cache_length(config: TransformerConfig, length: int) -> None:
    """Raise ValueError if positions do not reach as far as a cache."""
    check_size("length", length, 1)
    limit = config.max_length
    if limit is not None and length > limit:
        raise ValueError(
            f"a cache of {length} tokens: the table of learned positions has {limit} rows; "
            "give a shorter one"
        )
    limit = _max_cached_by_rope(config)
    if limit is not None and length > limit:
        raise ValueError(
            f"a cache of {length} tokens: LongRoPE changes its factors after {limit}, when earlier "
            "keys are already cached; decode fewer tokens, or set scaling.factors to long"
        )


def max_cache_length(config: TransformerConfig) -> int | None:
    """Return the largest length that `check_cache_length` accepts; None: any."""
    limits = config.max_length, _max_cached_by_rope(config)
    return min((each for each in limits if each is not None), default=None)


def _max_cached_by_rope(config: TransformerConfig) -> int | None:
    limits = []
    for block in config.layer_pattern:
        scaling = getattr(getattr(block.mixer, "position", None), "scaling", None)
        if isinstance(scaling, LongRoPEScaling) and scaling.factors == "by_length":
            limits.append(scaling.original_max_length)
    return min(limits, default=None)


def resolve_dropout_rngs(
    module: nn.Module,
    dropout_rngs: jax.Array | None,
    tokens: Any,  # [B, T]
) -> jax.Array:  # [B]
    """Return a random key for each example, from `dropout_rngs` or Flax's `rngs`.

    `model.apply(variables, tokens, rngs={"dropout": key})` is what Flax's own layers take: its key
    is split among the examples.

    Raises:
      ValueError: For a single key, or keys in both arguments.
    """
    if dropout_rngs is not None and module.has_rng("dropout"):
        raise ValueError("dropout_rngs and rngs: both have keys of dropout; give one of them")
    if dropout_rngs is None:
        key = module.make_rng("dropout")
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # of jax.random.PRNGKey
            key = jax.random.wrap_key_data(key)
        return jax.random.split(key, len(tokens))
    raise ValueError(
        f"dropout_rngs of shape {dropout_rngs.shape}: has to be one typed key for each of the "
        f"{len(tokens)} examples; give jax.random.split(jax.random.key(0), {len(tokens)})"
    )
