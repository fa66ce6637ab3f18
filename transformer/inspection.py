"""Intermediate values of a model: return them, replace them, and read them by layer.

    output = model.apply(variables, tokens, outputs={"logits", "residual_post", "weights"})
    layer_values(output, "residual_post")          # [L, B, T, D]

    edits = {"head_outputs": zero_heads(layer=2, heads=[0, 3])}
    model.apply(variables, tokens, edits=edits)    # the same model without two of its heads

An edit is a function (value, layer) -> value of the same shape and dtype. The number of the layer
is traced where layers are scanned, so an edit selects layers by `jnp.where` (see `at_layers`).
Requests and edits work under `jax.jit` and `jax.grad`, with a cache and with rematerialization. A
model without them computes what it always does: nothing here is called.

In a layer with cross-attention, names of that sublayer begin with `cross_`; edits of an encoder
begin with `encoder_`, and its values are in `ModelOutput.encoder_aux`.
"""

from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from transformer.layers.norms import Norm
from transformer.models.embedding import compute_logits, get_output_matrix
from transformer.models.language_model import LanguageModel
from transformer.models.model import ModelOutput
from transformer.taps import Edit

Indices = int | Collection[int] | jax.Array
"""Numbers of layers, heads or tokens: one, or several; they may be traced."""


def layer_values(output: ModelOutput, name: str, *, encoder: bool = False) -> jax.Array:
    """Return a requested value of all layers that have it, stacked in the order of the layers.

    Args:
      output: Of a model that was applied with `outputs={name, ...}`.
      name: Name of the value.
      encoder: Read the layers of the encoder.

    Returns:
      [L, ...].

    Raises:
      ValueError: The value was not requested, or has other shapes in other layers.
    """
    places = output.encoder_aux if encoder else output.aux
    stacks = [place[name] for place in places if name in place]
    if not stacks:
        present = sorted({each for place in places for each in place})
        raise ValueError(
            f"name {name!r}: is not among the outputs ({', '.join(present) or 'none'}); request it "
            f"with outputs={{{name!r}}}"
        )
    if len({stack.shape[1:] for stack in stacks}) > 1:
        shapes = " and ".join(str(stack.shape[1:]) for stack in stacks)
        raise ValueError(f"name {name!r}: has shapes {shapes} in different layers; read output.aux")
    # Layer l is entry l // P of place l % P.
    num_layers = sum(map(len, stacks))
    num_places = len(stacks)
    return jnp.stack([stacks[i % num_places][i // num_places] for i in range(num_layers)])


def _indices(name: str, numbers: Indices) -> np.ndarray | jax.Array:  # [n] integers
    """Return numbers as an array. Raise ValueError unless they are integers."""
    if isinstance(numbers, jax.core.Tracer):
        return jnp.atleast_1d(numbers)
    indices = np.atleast_1d(np.asarray(list(numbers) if isinstance(numbers, Set) else numbers))
    if indices.ndim != 1 or (indices.size and indices.dtype.kind not in "iu"):
        raise ValueError(f"{name} of shape {indices.shape}, {indices.dtype}: give integers")
    return indices.astype(np.int32)


def _check_below(name: str, indices: np.ndarray | jax.Array, size: int) -> None:
    """Raise ValueError for indices out of range, which JAX would drop. Traced ones pass."""
    if isinstance(indices, jax.core.Tracer):
        return
    for index in np.asarray(indices):
        if not 0 <= index < size:
            raise ValueError(f"{name} {index}: the value has {size}; give 0 to {size - 1}")


def at_layers(layers: Indices, edit: Callable[[jax.Array], jax.Array]) -> Edit:
    """Return an edit that applies a function in some layers only."""
    chosen = _indices("layers", layers)

    def edit_layers(value: jax.Array, layer: int | jax.Array) -> jax.Array:
        return jnp.where(jnp.any(chosen == layer), edit(value), value)

    if not isinstance(chosen, jax.core.Tracer):
        # For the check that these layers have the value.
        edit_layers.layers = tuple(map(int, chosen))  # type: ignore[attr-defined]
    return edit_layers


def zero_heads(layer: int | jax.Array, heads: Indices) -> Edit:
    """Return an edit of `head_outputs` that removes heads of a layer (Michel et al. 2019)."""
    removed = _indices("heads", heads)

    def zero(value: jax.Array) -> jax.Array:
        _check_below("heads", removed, value.shape[2])
        return value.at[:, :, removed].set(0)

    return at_layers(layer, zero)


def add_vector(
    layer: int | jax.Array,
    vector: jax.Array | float,  # [D], or anything that broadcasts to the value
) -> Edit:
    """Return an edit that adds a steering vector in one layer (Turner et al. 2023)."""

    def add(value: jax.Array) -> jax.Array:
        shape = jnp.shape(vector)
        if len(shape) > value.ndim or any(
            size not in (1, target_size)
            for size, target_size in zip(reversed(shape), reversed(value.shape), strict=False)
        ):
            raise ValueError(
                f"vector of shape {shape}: does not broadcast to the value's {value.shape}; give "
                f"({value.shape[-1]},)"
            )
        return value + jnp.broadcast_to(vector, value.shape).astype(value.dtype)

    return at_layers(layer, add)


def patch(layer: int | jax.Array, source: jax.Array, positions: Indices | None = None) -> Edit:
    """Return an edit that takes a value from another run (activation patching, Vig et al. 2020).

    Args:
      layer: Layer to patch.
      source: The value of this layer in the other run, as from `layer_values(...)[layer]`.
      positions: Tokens to patch, along the value's second axis; None: all.
    """
    index = None if positions is None else _indices("positions", positions)

    def take(value: jax.Array) -> jax.Array:
        if source.shape != value.shape:
            raise ValueError(
                f"source of shape {source.shape}: the value has {value.shape}; give that of one "
                "layer, of a run with inputs of the same shape"
            )
        if index is None:
            return source.astype(value.dtype)
        _check_below("positions", index, value.shape[1])
        return value.at[:, index].set(source[:, index].astype(value.dtype))

    return at_layers(layer, take)


def logit_lens(
    model: LanguageModel,
    params: Mapping[str, Any],
    hidden: Float[Array, "L B T D"] | Float[Array, "B T D"],  # residual stream
) -> Float[Array, "L B T V"] | Float[Array, "B T V"]:
    """Read residual streams by the model's final norm and output matrix (nostalgebraist 2020).

    Raises:
      ValueError: `hidden` has another shape.
    """
    config = model.config
    if hidden.ndim not in (3, 4) or hidden.shape[-1] != config.d_model:
        raise ValueError(
            f"hidden of shape {hidden.shape}: give [L, B, T, {config.d_model}] or "
            f"[B, T, {config.d_model}]"
        )
    if config.final_norm is not None:
        norm = Norm(config.final_norm, model.context)
        normed: Any = norm.apply({"params": params["final_norm"]}, hidden)
        hidden = normed
    flat = hidden.reshape(-1, *hidden.shape[-2:])
    matrix, bias = get_output_matrix(dict(params), config), params.get("output_bias")
    logits = compute_logits(flat, matrix, config, model.context, bias)
    return logits.reshape(*hidden.shape[:-1], -1)
