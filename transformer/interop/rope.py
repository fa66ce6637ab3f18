"""Rotary positions in a config.json, as transformers 5 (`rope_parameters`) or 4 has them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from transformer.attention.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NoScaling,
    RoPE,
    RopeLayout,
    RopeScaling,
    YaRNScaling,
)
from transformer.interop.fields import Fields
from transformer.models.config import TransformerConfig

FRACTION = "partial_rotary_factor"
TRAINED_LENGTH = "original_max_position_embeddings"


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rule of rotary positions that all layers share."""

    partial: bool = False
    """Allow other fractions than 1. Most families ignore `partial_rotary_factor` in `transformers`
    and rotate whole heads."""
    theta: str = "rope_theta"
    """Field of the base in transformers 4."""
    fraction: str = FRACTION
    layout: RopeLayout = "halves"

    def read(self, fields: Fields) -> dict[str, Any]:
        """Return the positions by their path."""
        defaults = {
            "rope_theta": fields.take(self.theta),
            FRACTION: fields.take(self.fraction, 1.0),
        }
        # Both are taken: a file may have both, and a field that nobody reads is refused.
        old, new = (fields.take(name, {}) for name in ("rope_scaling", "rope_parameters"))
        rope = read_rope(fields, defaults | (old or new), partial=self.partial)
        if self.partial:
            head_dim = fields.take("head_dim", 0)
            head_dim = head_dim or fields.size("hidden_size") // fields.size("num_attention_heads")
            if int(head_dim * rope.fraction) % 2:  # `transformers` rounds odd numbers up
                raise fields.unsupported(
                    "rope_parameters", f"a {FRACTION} that rotates an even part of {head_dim}"
                )
        rope = dataclasses.replace(rope, layout=self.layout)
        return {"layer_pattern.mixer.position": rope}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the fields in the form that transformers 4 and 5 read."""
        positions = [getattr(block.mixer, "position", None) for block in config.layer_pattern]
        ropes = [position for position in positions if isinstance(position, RoPE)]
        if not ropes:
            return {}
        rope = ropes[0]  # some layers may have no positions
        fields = {self.theta: rope.theta, "rope_scaling": write_scaling(rope.scaling)}
        if rope.fraction != 1 or self.partial:
            fields[self.fraction] = rope.fraction
        return fields


def read_rope(fields: Fields, parameters: Mapping[str, Any], *, partial: bool = False) -> RoPE:
    """Return the rotary positions with parameters named as in `rope_parameters`."""
    rest = {FRACTION: 1.0, **parameters}
    theta, fraction = float(rest.pop("rope_theta")), float(rest.pop(FRACTION))
    if fraction != 1 and not partial:
        raise fields.unsupported(FRACTION, "1, which this architecture rotates")
    return RoPE(theta=theta, fraction=fraction, scaling=_read_scaling(rest, fields))


def read_ropes(
    fields: Fields, theta_names: Mapping[str, str], scaling: Mapping[str, Any]
) -> dict[str, RoPE]:
    """Read the rotary positions of each kind of layers.

    Args:
      fields: Fields of the config.
      theta_names: For each kind, the field of its base in transformers 4.
      scaling: For each kind that has it, `rope_scaling` of transformers 4.
    """
    parameters = fields.take("rope_parameters", {})
    if parameters.keys() - theta_names.keys():
        raise fields.unsupported("rope_parameters", f"parameters of {' and '.join(theta_names)}")
    return {
        kind: read_rope(
            fields,
            {
                "rope_theta": fields.take(name),
                **(parameters.get(kind) or {}),
                **scaling.get(kind, {}),
            },
        )
        for kind, name in theta_names.items()
    }


def write_ropes(ropes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of the rotary positions of each kind of layers."""
    parameters = {
        kind: {"rope_theta": rope.theta, "rope_type": "default"}
        | (write_scaling(rope.scaling) or {})
        for kind, rope in ropes.items()
        if isinstance(rope, RoPE)
    }
    return {"rope_parameters": parameters}


def _read_scaling(parameters: dict[str, Any], fields: Fields) -> RopeScaling:
    older = parameters.pop("type", None)  # the name of the field before transformers 4.43
    kind = parameters.pop("rope_type", None) or older or "default"
    # Phi-3 has its own field, with a default. It wins wherever it is.
    trained_length = parameters.pop(TRAINED_LENGTH, None)
    trained_length = fields.take(TRAINED_LENGTH, 0) or trained_length
    trained_length = int(trained_length or fields.take("max_position_embeddings", 0))
    where = "rope_scaling" if "rope_scaling" in fields else "rope_parameters"
    scaling: RopeScaling
    match kind:
        case "default":
            scaling = NoScaling()
            parameters.pop("factor", None)
        case "linear":
            scaling = LinearScaling(float(parameters.pop("factor")))
        case "llama3":
            scaling = Llama3Scaling(
                factor=float(parameters.pop("factor")),
                low_freq_factor=float(parameters.pop("low_freq_factor")),
                high_freq_factor=float(parameters.pop("high_freq_factor")),
                original_max_length=trained_length,
            )
        case "yarn":
            scaling = YaRNScaling(
                factor=float(parameters.pop("factor")),
                original_max_length=trained_length,
                beta_fast=float(parameters.pop("beta_fast", None) or 32),
                beta_slow=float(parameters.pop("beta_slow", None) or 1),
                attention_factor=float(parameters.pop("attention_factor", None) or 0),
                mscale=float(parameters.pop("mscale", None) or 0),
                mscale_all_dim=float(parameters.pop("mscale_all_dim", None) or 0),
                round_bounds=bool(parameters.pop("truncate", True)),
            )
        case "longrope" | "su":
            ratio = fields.take("max_position_embeddings") / trained_length
            factor = parameters.pop("factor", None) or ratio
            # The amplitude that transformers computes where the config names none.
            log_ratio = math.log(factor) / math.log(trained_length) if factor > 1 else 0.0
            scaling = LongRoPEScaling(
                short_factors=tuple(map(float, parameters.pop("short_factor"))),
                long_factors=tuple(map(float, parameters.pop("long_factor"))),
                original_max_length=trained_length,
                amplitude=float(
                    parameters.pop("attention_factor", None) or math.sqrt(1 + log_ratio)
                ),
            )
        case _:
            raise fields.unsupported(where, "the types default, linear, llama3, yarn and longrope")
    # A parameter that no rule has read would change the frequencies silently.
    if unread := [name for name, value in parameters.items() if value is not None]:
        raise fields.unsupported(where, f"type {kind} without {unread[0]}")
    return scaling


def write_scaling(scaling: RopeScaling) -> dict[str, Any] | None:
    """Return the value of `rope_scaling`."""
    match scaling:
        case NoScaling():
            return None
        case LinearScaling():
            return {"rope_type": "linear", "factor": scaling.factor}
        case Llama3Scaling():
            return {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                TRAINED_LENGTH: scaling.original_max_length,
            }
        case YaRNScaling():
            fields = {
                "rope_type": "yarn",
                "factor": scaling.factor,
                TRAINED_LENGTH: scaling.original_max_length,
                "beta_fast": scaling.beta_fast,
                "beta_slow": scaling.beta_slow,
            }
            if scaling.attention_factor:
                fields["attention_factor"] = scaling.attention_factor
            if scaling.mscale:
                fields["mscale"] = scaling.mscale
            if scaling.mscale_all_dim:
                fields["mscale_all_dim"] = scaling.mscale_all_dim
            if not scaling.round_bounds:
                fields["truncate"] = False
            return fields
        case LongRoPEScaling():
            return {
                "rope_type": "longrope",
                "short_factor": list(scaling.short_factors),
                "long_factor": list(scaling.long_factors),
                TRAINED_LENGTH: scaling.original_max_length,
                "attention_factor": scaling.amplitude,
            }
    return {"rope_type": f"unsupported {type(scaling).__name__}"}
