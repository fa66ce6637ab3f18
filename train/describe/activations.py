"""What the forward pass keeps for the backward pass: an estimate, beside the textbook's."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformer.model import Model
    from transformer.sizes import LayerMixer

FLASH = ("blockwise", "cudnn", "splash", "ring")
"""Forms of attention that compute scores again in the backward pass."""


@dataclasses.dataclass(frozen=True)
class Activations:
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
    model: "Model", batch: int, length: int, *, segments: bool = False
) -> Activations:
    """For `batch` windows of `length` tokens; `segments` says that documents are kept apart.

    Cross attention adds to its layer the part of a layer that attention is: 6 of 14 vectors of
    width D, 13 of 34 bytes, and its scores.
    """
    import jax.numpy as jnp

    from transformer.attention import AttentionConfig
    from transformer.sizes import layer_mixers

    config, tokens = model.config, batch * length
    textbook, kept, sixteen_bit = 0, [], 0
    for layer in layer_mixers(config):
        mixer = layer.mixer
        vectors, sixteen = (6, 13) if layer.cross else (14, 34)
        scores = length * (mixer.heads if isinstance(mixer, AttentionConfig) else 0)
        held = length * _kept_heads(model, layer, length, segments)
        textbook += tokens * (vectors * config.width + scores)
        kept.append(tokens * (vectors * config.width + held))
        sixteen_bit += tokens * (sixteen * config.width + 5 * scores)
    item = jnp.dtype(config.precision.compute).itemsize
    return Activations(
        bytes=item * _elements(model, kept, tokens),
        textbook_elements=textbook,
        textbook_bytes=item * textbook,
        sixteen_bit_bytes=sixteen_bit,
    )


def _elements(model: "Model", layers: list[int], tokens: int) -> int:
    """What is kept of all layers, given what each has when nothing is computed again."""
    from transformer.sizes import abstract

    config = model.config
    if config.remat == "none":
        return sum(layers)
    encoder = config.encoder.layers if config.encoder is not None else 0
    inputs = (config.layers + encoder) * config.width
    products = sum(
        leaf.size // leaf.inputs
        for leaf in abstract(model).leaves()
        if leaf.inner[0] == "layers" and leaf.axes.is_matrix and "experts" not in leaf.axes.stack
    )
    a_token = inputs + products if config.remat == "dots" else inputs
    return tokens * a_token + max(layers)


def _kept_heads(model: "Model", layer: "LayerMixer", length: int, segments: bool) -> int:
    """N, or 0 where the scores of a layer never exist all at once."""
    from transformer.attention import AttentionConfig

    choice = layer.choice(model.config, length, hardware=model.hardware, segments=segments)
    if choice is None or choice.form in FLASH:
        return 0
    assert isinstance(layer.mixer, AttentionConfig)
    return layer.mixer.heads
