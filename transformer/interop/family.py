"""A family of architectures, and the pieces that the maps of several families share."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from transformer.attention.position_config import RoPE
from transformer.attention.rope_scaling import (
    LinearScaling,
    Llama3Scaling,
    LongRoPEScaling,
    NoScaling,
    RopeScaling,
    YaRNScaling,
)
from transformer.config import TransformerConfig
from transformer.interop.fields import Fields
from transformer.interop.weight_map import LINEAR, Layout, Weight

ModelKind = Literal["language_model", "masked_lm", "classifier", "tagger", "encoder_decoder"]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One class of `transformers`: a body of the family with a head."""

    name: str
    """Name in `architectures` of a config.json."""
    kind: ModelKind
    head: tuple[Weight, ...] = ()
    """Rules of the head's weights, beside those of the family."""
    pooler: bool = False
    """`TransformerConfig.pooler` of the model."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Architectures with one `model_type`: how their configs and weights relate to ours."""

    model_type: str
    architectures: tuple[Architecture, ...]
    read_config: Callable[[Fields], TransformerConfig]
    """Config of the fields of a config.json. Dropout rates are read too."""
    write_config: Callable[[TransformerConfig], dict[str, Any]]
    """Fields of a config, as far as the family has them: the caller reads them back to check."""
    weights: tuple[Weight, ...]
    prefix: str = ""
    """Prefix of the body's tensors, which files of the bare body lack."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors without effect in these architectures: buffers, heads of pretraining."""
    zeros: tuple[str, ...] = ()
    """Tensors [1, V] that must be zero (BART's `final_logits_bias`); written as such."""

    def rules(self, architecture: Architecture) -> tuple[Weight, ...]:
        """Return the rules of the weights of an architecture."""
        return (*self.weights, *architecture.head)


def linear(theirs: str, ours: str, layout: Layout = LINEAR) -> tuple[Weight, Weight]:
    """Return the rules of a linear layer: its matrix, and its bias where it has one."""
    return (
        Weight(f"{theirs}.weight", ours, layout),
        Weight(f"{theirs}.bias", f"{ours}_bias"),
    )


def norm(theirs: str, ours: str) -> tuple[Weight, ...]:
    """Return the rules of a norm of any kind."""
    # Rules whose parameter the model lacks are left out: a norm has a gain or an offset, not both.
    return (
        Weight(f"{theirs}.weight", f"{ours}/gain"),
        Weight(f"{theirs}.weight", f"{ours}/offset"),
        Weight(f"{theirs}.bias", f"{ours}/bias"),
    )


def self_attention(
    theirs: str, ours: str, names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
) -> tuple[Weight, ...]:
    """Return the rules of four separate projections."""
    ends = ("query", "key", "value", "output")
    pairs = zip(names, ends, strict=True)
    return tuple(
        rule for name, end in pairs for rule in linear(f"{theirs}.{name}", f"{ours}/{end}")
    )


FRACTION = "partial_rotary_factor"
TRAINED_LENGTH = "original_max_position_embeddings"

ACTIVATION_NAMES: dict[str, Any] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "squared_relu",
}
"""Activations by the names of `transformers`. The first name of each is written."""


def activation_name(activation: str) -> str:
    """Return the name of an activation in a config.json, or one that nobody reads."""
    names = [name for name, ours in ACTIVATION_NAMES.items() if ours == activation]
    return names[0] if names else f"unsupported {activation}"


def read_rope(
    fields: Fields,
    defaults: Mapping[str, Any] | None = None,
    section: Mapping[str, Any] | None = None,
    *,
    partial: bool = False,
) -> RoPE:
    """Read rotary positions, as transformers 5 (`rope_parameters`) or 4 (`rope_theta`) has them.

    Args:
      fields: Fields of the config.
      defaults: Parameters that the config's own replace; default: the fields of transformers 4.
      section: Parameters of one kind of layers, where kinds differ.
      partial: Allow `partial_rotary_factor`. Most families ignore it in `transformers` and rotate
        whole heads.
    """
    if defaults is None:
        fraction = fields.take(FRACTION, 1.0)
        defaults = {"rope_theta": fields.take("rope_theta"), FRACTION: fraction}
    if section is None:
        # Both are taken: a file may have both, and a field that nobody reads is refused.
        old, new = (fields.take(name, {}) for name in ("rope_scaling", "rope_parameters"))
        section = old or new
    parameters = {FRACTION: 1.0, **defaults, **section}
    theta, fraction = (float(parameters.pop(name)) for name in ("rope_theta", FRACTION))
    if fraction != 1 and not partial:
        raise fields.unsupported(FRACTION, "1, which this architecture rotates")
    return RoPE(theta=theta, fraction=fraction, scaling=_read_scaling(parameters, fields))


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
            {"rope_theta": fields.take(name)},
            {**(parameters.get(kind) or {}), **scaling.get(kind, {})},
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
                round_bounds=bool(parameters.pop("truncate", True)),
            )
        case "longrope" | "su":
            ratio = fields.take("max_position_embeddings") / trained_length
            factor = parameters.pop("factor", None) or ratio
            # The factor that transformers computes where the config names none.
            own = math.sqrt(1 + math.log(factor) / math.log(trained_length)) if factor > 1 else 1.0
            scaling = LongRoPEScaling(
                short_factors=tuple(map(float, parameters.pop("short_factor"))),
                long_factors=tuple(map(float, parameters.pop("long_factor"))),
                original_max_length=trained_length,
                amplitude=float(parameters.pop("attention_factor", None) or own),
            )
        case _:
            raise fields.unsupported(where, "the types default, linear, llama3, yarn and longrope")
    # A parameter that no rule has read would change the frequencies silently.
    if left := [name for name, value in parameters.items() if value is not None]:
        raise fields.unsupported(where, f"type {kind} without {left[0]}")
    return scaling


def write_rope(rope: Any) -> dict[str, Any]:
    """Return the fields of rotary positions, in the form that transformers 4 and 5 read."""
    if not isinstance(rope, RoPE):
        return {}
    fields: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": write_scaling(rope.scaling)}
    if rope.fraction != 1:
        fields[FRACTION] = rope.fraction
    return fields


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


Item = TypeVar("Item")


def shortest_period(items: Sequence[Item]) -> tuple[Item, ...]:
    """Return the shortest sequence whose repetition, cut to length, gives the items."""
    for period in range(1, len(items) + 1):
        if all(items[i] == items[i % period] for i in range(len(items))):
            return tuple(items[:period])
    return tuple(items)
