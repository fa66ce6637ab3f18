"""What the forward pass keeps for the backward pass: an estimate, beside the textbook's."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer.model import Model
    from transformer.sizes import LayerMixer

RECOMPUTING_BACKENDS = ("blockwise", "cudnn", "splash", "ring")
"""Forms of attention that compute scores again in the backward pass."""


@dataclasses.dataclass(frozen=True)
class ActivationMemory:
    """Of one batch (or microbatch), over all devices together."""

    bytes: int
    """With this model's rematerialisation and form of attention."""
    textbook_elements: int
    """L B T (14 D + T N): the intermediate results of every layer, scores included."""
    textbook_bytes: int
    """The same in the dtype that the model computes in."""
    sixteen_bit_bytes: int
    """L (34 B T D + 5 B N T^2), for 16-bit training with dropout (Korthikanti et al. 2022,
    section 4.1)."""


def estimate_activations(
    model: "Model", batch_size: int, sequence_length: int, *, segments: bool = False
) -> ActivationMemory:
    """For `batch_size` windows of `sequence_length` tokens; `segments` says that documents are kept apart.

    Cross attention adds to its layer the part of a layer that attention is: 6 of 14 vectors of
    width D, 13 of 34 bytes, and its scores.
    """
    import jax.numpy as jnp

    from transformer.attention import AttentionConfig
    from transformer.sizes import layer_mixers

    config, tokens = model.config, batch_size * sequence_length
    textbook, kept, sixteen_bit = 0, [], 0
    for layer in layer_mixers(config):
        mixer = layer.mixer
        vectors, sixteen = (6, 13) if layer.cross else (14, 34)
        scores = sequence_length * (mixer.num_heads if isinstance(mixer, AttentionConfig) else 0)
        held = sequence_length * _kept_heads(model, layer, sequence_length, segments)
        textbook += tokens * (vectors * config.d_model + scores)
        kept.append(tokens * (vectors * config.d_model + held))
        sixteen_bit += tokens * (sixteen * config.d_model + 5 * scores)
    item = jnp.dtype(config.precision.compute).itemsize
    return ActivationMemory(
        bytes=item * _elements(model, kept, tokens),
        textbook_elements=textbook,
        textbook_bytes=item * textbook,
        sixteen_bit_bytes=sixteen_bit,
    )


def _elements(model: "Model", layers: list[int], tokens: int) -> int:
    """What is kept of all layers, given what each has when nothing is computed again."""
    from transformer.sizes import abstract_parameters

    config = model.config
    if config.remat == "none":
        return sum(layers)
    encoder = config.encoder.num_layers if config.encoder is not None else 0
    inputs = (config.num_layers + encoder) * config.d_model
    products = sum(
        leaf.size // leaf.fan_in
        for leaf in abstract_parameters(model).leaves()
        if leaf.path_in_side[0] == "layers"
        and leaf.axes.is_matrix
        and "experts" not in leaf.axes.stack
    )
    a_token = inputs + products if config.remat == "dots" else inputs
    return tokens * a_token + max(layers)


def _kept_heads(model: "Model", layer: "LayerMixer", length: int, segments: bool) -> int:
    """N, or 0 where the scores of a layer never exist all at once."""
    from transformer.attention import AttentionConfig

    choice = layer.backend_choice(model.config, length, hardware=model.hardware, segments=segments)
    if choice is None or choice.backend in RECOMPUTING_BACKENDS:
        return 0
    assert isinstance(layer.mixer, AttentionConfig)
    return layer.mixer.num_heads
