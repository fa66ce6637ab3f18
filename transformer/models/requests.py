"""Requests of a model's intermediate values: the names that it has, and its taps."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from transformer.attention.mixer import mixer_class
from transformer.models.block import BlockConfig
from transformer.models.config import EncoderConfig, TransformerConfig
from transformer.taps import (
    BLOCK_VALUES,
    OTHER_OUTPUTS,
    Edit,
    Outputs,
    Taps,
    edits_within,
)


class ModelTaps(NamedTuple):
    """Taps of both stacks of a model; None where nothing is requested."""

    layers: Taps | None = None
    encoder: Taps | None = None


def make_taps(
    config: TransformerConfig, outputs: Outputs, edits: Mapping[str, Edit] | None
) -> ModelTaps:
    """Return the taps of a model's layers and of its encoder.

    Raises:
      ValueError: A name is unknown, or no layer of the model has such a value.
    """
    edits = dict(edits or {})
    if not edits and OTHER_OUTPUTS.keys() >= set(outputs):
        return ModelTaps()
    known = _known_names(config.layer_pattern)
    known_in_encoder = {} if config.encoder is None else _known_names(config.encoder.layer_pattern)
    _check_names("outputs", outputs, {**OTHER_OUTPUTS, **known, **known_in_encoder})
    editable = {**known, **{f"encoder_{name}": text for name, text in known_in_encoder.items()}}
    _check_names("edits", edits, editable)
    for name, edit in edits.items():
        side: TransformerConfig | EncoderConfig = config
        if config.encoder is not None and name.startswith("encoder_"):
            side = config.encoder
        _check_layers(name, edit, side)
    layer_edits = tuple((name, edit) for name, edit in edits.items() if name in known)
    encoder_edits = edits_within(edits.items(), "encoder_") if known_in_encoder else ()
    # `weights` are an output of `attend`, whoever requests them.
    requested = frozenset(outputs) & (known.keys() | known_in_encoder.keys()) - {"weights"}
    return ModelTaps(
        Taps(outputs=requested, edits=layer_edits) if requested or layer_edits else None,
        Taps(outputs=requested, edits=encoder_edits) if requested or encoder_edits else None,
    )


def _known_names(pattern: Iterable[BlockConfig]) -> dict[str, str]:
    """Return the names of the values that the layers of a pattern have, with their meaning."""
    always = ("residual_pre", "residual_mid", "residual_post", "mixer_output")
    known: dict[str, str] = {}
    for block in pattern:
        known |= {name: BLOCK_VALUES[name] for name in always}
        if block.feed_forward is not None:
            known["feed_forward_output"] = BLOCK_VALUES["feed_forward_output"]
        known |= mixer_class(block.mixer).values
        if block.cross_attention is not None:
            known["cross_output"] = BLOCK_VALUES["cross_output"]
            cross_values = mixer_class(block.cross_attention).values
            known |= {f"cross_{name}": text for name, text in cross_values.items()}
    return known


def _check_names(argument: str, names: Iterable[str], known: Mapping[str, str]) -> None:
    for name in sorted(names):
        if name not in known:
            raise ValueError(
                f"{argument} {name!r}: the model has no such value; give {', '.join(sorted(known))}"
            )


def _check_layers(name: str, edit: Edit, config: TransformerConfig | EncoderConfig) -> None:
    """Raise ValueError for an edit of a layer that has no such value: it would do nothing."""
    value, pattern = name.removeprefix("encoder_"), config.layer_pattern
    for layer in getattr(edit, "layers", ()):
        if not 0 <= layer < config.num_layers:
            raise ValueError(
                f"edit of {name}: there is no layer {layer}; give 0 to {config.num_layers - 1}"
            )
        if value not in _known_names([pattern[layer % len(pattern)]]):
            raise ValueError(f"edit of {name}: layer {layer} has no such value; give another layer")
