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

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct

from transformer.argument_checks import check_arguments
from transformer.shape_checks import check_shapes

if TYPE_CHECKING:  # these import this module
    from transformer.attention.attend import AttentionOutput, ScoreSpec
    from transformer.attention.masks import Mask
    from transformer.attention.mixer import MixerInputs
    from transformer.layers.block import Block, BlockOutput
    from transformer.layers.cross_attention import Memory
    from transformer.models.language_model import LanguageModel
    from transformer.models.model import Model, ModelOutput

Edit = Callable[[jax.Array, int | jax.Array], jax.Array]
"""(value, number of the layer from 0) -> the value to continue with, of equal shape and dtype."""

Indices = int | Collection[int] | jax.Array
"""Numbers of layers, heads or tokens: one, or several; they may be traced."""

BLOCK_VALUES = {
    "residual_pre": "[B, T, D] residual stream that enters the layer",
    "residual_mid": "[B, T, D] residual stream after the mixer and cross-attention",
    "residual_post": "[B, T, D] residual stream that leaves the layer: its hidden states",
    "mixer_output": "[B, T, D] output of the mixer, before the residual connection",
    "cross_output": "[B, T, D] output of cross-attention",
    "feed_forward_output": "[B, T, D] output of the feed-forward or mixture of experts",
}
"""Values of every layer, by name."""

ATTENTION_VALUES = {
    "queries": "[B, T, N, H] queries, after RoPE",
    "keys": "[B, S, K, H] keys, after RoPE; with a cache all that it holds",
    "values": "[B, S, K, H of values] values; with a cache all that it holds",
    "weights": "[B, N, T, S] attention weights (selects the reference backend)",
    "head_outputs": "[B, T, N, H of values] output of each head, before the output projection",
}
"""Values of attention mixers that call `attend`, by name."""

HEAD_OUTPUTS = {"head_outputs": ATTENTION_VALUES["head_outputs"]}
"""Values of mixers that compute the outputs of their heads in another way than by `attend`."""

OTHER_OUTPUTS = {
    "logits": "logits of the model's head",
    "losses": "auxiliary losses, by name",
    "weights": "attention weights, of mixers that have them",
}
"""Outputs that can be requested of every model; mixers without them return none, or refuse."""


class Taps(struct.PyTreeNode):
    """Requested values and edits, as one layer sees them."""

    layer: Any = None
    """Number of the layer; traced in a scan."""
    outputs: frozenset[str] = struct.field(pytree_node=False, default=frozenset())
    edits: tuple[tuple[str, Edit], ...] = struct.field(pytree_node=False, default=())

    def visit(self, name: str, value: jax.Array, aux: dict[str, Any]) -> jax.Array:
        """Return the value, edited if there is an edit of it, and record it if it is requested.

        Raises:
          ValueError: If an edit returns another shape or dtype.
        """
        for edited, edit in self.edits:
            if edited == name:
                new = edit(value, self.layer)
                check_shapes(**{f"edit of {name}: a result": (new, "...")})
                if (new.shape, new.dtype) != (value.shape, value.dtype):
                    raise ValueError(
                        f"edit of {name}: returns {new.dtype}{list(new.shape)} for "
                        f"{value.dtype}{list(value.shape)}; return the same shape and dtype"
                    )
                value = new
        if name in self.outputs:
            aux[name] = value
        return value

    def within(self, prefix: str) -> "Taps":
        """Return the taps of a part whose names have a prefix: only its edits, without it."""
        return self.replace(edits=_edits_within(self.edits, prefix))


def reject_requests(kind: str, taps: Taps, where: str) -> None:
    """Raise ValueError if other values than `HEAD_OUTPUTS` are requested or edited."""
    others = ATTENTION_VALUES.keys() - HEAD_OUTPUTS.keys()
    for name in sorted((taps.outputs | dict(taps.edits).keys()) & others):
        raise ValueError(f"mixer {kind}: shows no {name} {where}; leave the request out")


def observe_block(
    block: "Block",
    weights: Any,
    x: jax.Array,  # [B, T, D]
    inputs: "MixerInputs",
    memory: "Memory | None",
    layer: int | jax.Array,  # its number, from 0
) -> "BlockOutput":
    """Apply a block with taps at its residual stream and its sublayers.

    `Block.add_residual` is the one place where a sublayer's output meets the residual stream, so
    intercepting it shows both, and the block itself need not know of taps.
    """
    assert inputs.taps is not None  # checked by the stack
    taps: Taps = inputs.taps.replace(layer=layer)
    aux: dict[str, Any] = {}

    def intercept(
        method: Any, arguments: Any, _: Any, context: nn.module.InterceptorContext
    ) -> Any:
        if context.module is not bound or context.method_name != "add_residual":
            return method(*arguments)
        name, x, y, rngs = arguments
        sublayer = name.removesuffix("_norm")
        x = method(name, x, taps.visit(f"{sublayer}_output", y, aux), rngs)
        is_middle = sublayer == ("mixer" if block.config.cross_attention is None else "cross")
        return taps.visit("residual_mid", x, aux) if is_middle else x

    x = taps.visit("residual_pre", x, aux)
    bound = block.bind({"params": weights})
    with nn.intercept_methods(intercept):
        output = bound(x, inputs.replace(taps=taps), memory)
    return output._replace(x=taps.visit("residual_post", output.x, aux), aux=output.aux | aux)


def observe_attention(
    taps: Taps,
    attend_fn: "Callable[..., AttentionOutput]",
    q: jax.Array,  # [B, T, N, H]
    k: jax.Array,  # [B, S, K, H]
    v: jax.Array,  # [B, S, K, H of values]
    mask: "Mask",
    score_spec: "ScoreSpec",
    **options: Any,  # of `attend`
) -> "AttentionOutput":
    """Call `attend` with taps at its inputs, its weights and its output."""
    from transformer.attention.attend import AttentionOutput, attend_reference

    aux: dict[str, Any] = {}
    q = taps.visit("queries", q, aux)
    k, v = taps.visit("keys", k, aux), taps.visit("values", v, aux)
    if any(name == "weights" for name, _ in taps.edits):
        # The weights meet the values only in the reference: other backends never hold them.
        edit = functools.partial(taps.visit, "weights", aux={})
        inputs = q, k, v, mask, score_spec, options["sink_logits"]
        y, weights = attend_reference(*inputs, edit_weights=edit)
        aux |= {"weights": weights} if "weights" in options["outputs"] else {}
    else:
        output = attend_fn(q, k, v, mask, score_spec, **options)
        y, aux = output.y, aux | output.aux
    return AttentionOutput(taps.visit("head_outputs", y, aux), aux)


def _edits_within(edits: Iterable[tuple[str, Edit]], prefix: str) -> tuple[tuple[str, Edit], ...]:
    return tuple((n.removeprefix(prefix), edit) for n, edit in edits if n.startswith(prefix))


def make_taps(
    model: "Model", outputs: Collection[str], edits: Mapping[str, Edit] | None
) -> "tuple[Taps | None, Taps | None]":
    """Return the taps of a model's layers and of its encoder; None where nothing is requested.

    Raises:
      ValueError: A name is unknown, or no layer of the model has such a value.
    """
    check_shapes(edits=(edits or {}, Mapping))
    edits = dict(edits or {})
    check_shapes(**{f"edit of {name}": (edit, Callable) for name, edit in edits.items()})
    config = model.config
    known = _known_names(config.layer_pattern)
    known_in_encoder = {} if config.encoder is None else _known_names(config.encoder.layer_pattern)
    outputs = frozenset(outputs)
    _check_names("outputs", outputs, {**OTHER_OUTPUTS, **known, **known_in_encoder})
    editable = {**known, **{f"encoder_{name}": text for name, text in known_in_encoder.items()}}
    _check_names("edits", edits, editable)
    for name, edit in edits.items():
        _check_layers(name, edit, config.encoder if name.startswith("encoder_") else config)
    own = tuple((n, edit) for n, edit in edits.items() if n in known)
    encoder = _edits_within(edits.items(), "encoder_") if known_in_encoder else ()
    requested = outputs & (BLOCK_VALUES.keys() | ATTENTION_VALUES.keys() - {"weights"})
    return (
        Taps(outputs=requested, edits=own) if requested or own else None,
        Taps(outputs=requested, edits=encoder) if requested or encoder else None,
    )


def _known_names(pattern: Iterable[Any]) -> dict[str, str]:
    """Return the names of the values that the layers of a pattern have, with their meaning."""
    from transformer.attention.mixer import mixer_class

    known: dict[str, str] = {}
    for block in pattern:
        known |= {n: text for n, text in BLOCK_VALUES.items() if not n.startswith(("cross", "fe"))}
        if block.feed_forward is not None:
            known["feed_forward_output"] = BLOCK_VALUES["feed_forward_output"]
        known |= dict(mixer_class(block.mixer).values)
        if block.cross_attention is not None:
            known["cross_output"] = BLOCK_VALUES["cross_output"]
            of_cross = mixer_class(block.cross_attention).values.items()
            known |= {f"cross_{name}": text for name, text in of_cross}
    return known


def _check_names(argument: str, names: Iterable[str], known: Mapping[str, str]) -> None:
    for name in sorted(names):
        if name not in known:
            raise ValueError(
                f"{argument} {name!r}: the model has no such value; give {', '.join(sorted(known))}"
            )


def _check_layers(name: str, edit: Edit, config: Any) -> None:
    """Raise ValueError for an edit of a layer that has no such value: it would do nothing."""
    value, pattern = name.removeprefix("encoder_"), config.layer_pattern
    for layer in getattr(edit, "layers", ()):
        if not 0 <= layer < config.num_layers:
            raise ValueError(
                f"edit of {name}: there is no layer {layer}; give 0 to {config.num_layers - 1}"
            )
        if value not in _known_names([pattern[layer % len(pattern)]]):
            raise ValueError(f"edit of {name}: layer {layer} has no such value; give another layer")


@check_arguments
def layer_values(output: "ModelOutput", name: str, *, encoder: bool = False) -> jax.Array:
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


@check_arguments
def at_layers(layers: Indices, edit: Callable[[jax.Array], jax.Array]) -> Edit:
    """Return an edit that applies a function in some layers only."""
    chosen = _indices("layers", layers)

    def edit_layers(value: jax.Array, layer: int | jax.Array) -> jax.Array:
        return jnp.where(jnp.any(chosen == layer), edit(value), value)

    if not isinstance(chosen, jax.core.Tracer):
        # For the check that these layers have the value.
        edit_layers.layers = tuple(map(int, chosen))  # type: ignore[attr-defined]
    return edit_layers


@check_arguments
def zero_heads(layer: int | jax.Array, heads: Indices) -> Edit:
    """Return an edit of `head_outputs` that removes heads of a layer (Michel et al. 2019)."""
    removed = _indices("heads", heads)

    def zero(value: jax.Array) -> jax.Array:
        _check_below("heads", removed, value.shape[2])
        return value.at[:, :, removed].set(0)

    return at_layers(layer, zero)


@check_arguments
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


@check_arguments
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


@check_arguments
def logit_lens(
    model: "LanguageModel",
    params: Mapping[str, Any],
    hidden: jax.Array,  # [L, B, T, D] or [B, T, D] residual stream
) -> jax.Array:  # [L, B, T, V] or [B, T, V]
    """Read residual streams by the model's final norm and output matrix (nostalgebraist 2020).

    Raises:
      ValueError: `hidden` has another shape.
    """
    from transformer.layers.basic import Norm
    from transformer.layers.embedding import compute_logits, get_output_matrix

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
    logits = compute_logits(flat, get_output_matrix(dict(params), config), config, model.context)
    return logits.reshape(*hidden.shape[:-1], -1)
