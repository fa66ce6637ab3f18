"""A family of architectures, and the rules that several families share.

A family has two tables, each written once and used in both directions: `settings` relates fields of
a config.json to settings of this library, `weights` relates tensors to parameters.
"""

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
from transformer.config import BlockConfig, TransformerConfig
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
class Setting:
    """One rule: a field of config.json, and the settings of this library that have its value."""

    theirs: str
    ours: str | tuple[str, ...]
    """Paths below the model's config. One through a layer pattern stands for all of its blocks."""
    null: Any = None
    """Value that null stands for. None: 0, false or empty."""
    choices: Mapping[Any, Any] | None = None
    """Settings by the names of `transformers`. The first name of each is written."""
    is_size: bool = False
    """The value is a positive integer."""
    offset: int = 0
    """What their number is larger by."""
    older: str = ""
    """Name of the field in the first files, which wins."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the settings."""
        return (self.ours,) if isinstance(self.ours, str) else self.ours

    def read(self, fields: Fields) -> dict[str, Any]:
        """Return the settings by path."""
        if self.choices is not None:
            value = fields.choose(self.theirs, self.choices)
        elif self.is_size:
            older = fields.take(self.older, 0) if self.older else 0
            value = (older or fields.size(self.theirs)) - self.offset
        else:
            value = fields.take(self.theirs, self.null)
        return dict.fromkeys(self.paths, value)

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the field, or nothing if the model has no such setting."""
        try:
            value = setting_at(config, self.paths[0])
        except AttributeError:
            return {}
        if self.choices is not None:
            value = name_of(self.choices, value)
        elif self.is_size:
            value += self.offset
        elif self.null is not None and value == self.null:
            value = None
        return {self.theirs: value}


def name_of(choices: Mapping[Any, Any], value: Any) -> Any:
    """Return the first name of a choice, or one that nobody reads."""
    return next((name for name, ours in choices.items() if ours == value), f"unsupported {value}")


def setting_at(part: Any, path: str) -> Any:
    """Return the setting at a path; in a layer pattern, that of the first block."""
    for name in path.split("."):
        part = getattr(part[0] if isinstance(part, tuple) else part, name)
    return part


def with_settings(part: Any, values: Mapping[str, Any]) -> Any:
    """Return a part of a config with other values at some paths."""
    if isinstance(part, tuple):
        return tuple(with_settings(block, values) for block in part)
    changes: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            changes[name] = value
    for name, inner in below.items():
        changes[name] = with_settings(getattr(part, name), inner)
    return dataclasses.replace(part, **changes)


def with_blocks(config: TransformerConfig, blocks: Sequence[BlockConfig]) -> TransformerConfig:
    """Return the config with these layers, as the shortest pattern."""
    return dataclasses.replace(config, layer_pattern=shortest_period(blocks))


def all_blocks(config: TransformerConfig) -> list[BlockConfig]:
    """Return the block of each layer."""
    pattern = config.layer_pattern
    return [pattern[layer % len(pattern)] for layer in range(config.num_layers)]


@dataclasses.dataclass(frozen=True)
class Family:
    """Architectures with one `model_type`: how their configs and weights relate to ours."""

    model_type: str
    architectures: tuple[Architecture, ...]
    base: TransformerConfig
    """What all models of the family have in common."""
    settings: tuple["Setting | Rotary", ...]
    weights: tuple[Weight, ...]
    expected: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    """Fields whose other values this library does not compute, with those that it does."""
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields that are written."""
    read_rest: Callable[[Fields, TransformerConfig], TransformerConfig] | None = None
    """Adds what `settings` do not say to a config, such as the kinds of its layers."""
    write_rest: Callable[[TransformerConfig], dict[str, Any]] | None = None
    """Fields that `settings` do not say."""
    prefix: str = ""
    """Prefix of the body's tensors, which files of the bare body lack."""
    ignored: tuple[str, ...] = ()
    """Patterns of tensors without effect in these architectures: buffers, heads of pretraining."""
    zeros: tuple[str, ...] = ()
    """Tensors [1, V] that must be zero (BART's `final_logits_bias`); written as such."""

    def rules(self, architecture: Architecture) -> tuple[Weight, ...]:
        """Return the rules of the weights of an architecture."""
        return (*self.weights, *architecture.head)

    def read_config(self, fields: Fields) -> TransformerConfig:
        """Return the config of the fields of a config.json. Dropout rates are read too."""
        for name, values in self.expected.items():
            fields.expect(name, *values)
        settings: dict[str, Any] = {}
        for setting in self.settings:
            settings |= setting.read(fields)
        config: TransformerConfig = with_settings(self.base, settings)
        return config if self.read_rest is None else self.read_rest(fields, config)

    def write_config(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the fields of a config, as far as the family has them.

        Args:
          config: Config with the defaults that depend on its width filled in.
        """
        fields: dict[str, Any] = {}
        for setting in self.settings:
            fields |= setting.write(config)
        rest = {} if self.write_rest is None else self.write_rest(config)
        return fields | dict(self.constants) | rest


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

D_FF = "layer_pattern.feed_forward.d_ff"
ACTIVATION = "layer_pattern.feed_forward.activation"

COMMON = (
    Setting("vocab_size", "vocab_size", is_size=True),
    Setting("tie_word_embeddings", "tie_embeddings"),
)


def sizes(d_model: str, num_layers: str, num_heads: str) -> tuple[Setting, ...]:
    """Return the rules of the sizes of a stack of layers."""
    return (
        Setting(d_model, "d_model", is_size=True),
        Setting(num_layers, "num_layers", is_size=True),
        Setting(num_heads, "layer_pattern.mixer.num_heads", is_size=True),
    )


# Rotary positions.

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
        return {"layer_pattern.mixer.position": rope}

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the fields in the form that transformers 4 and 5 read."""
        rope = getattr(config.layer_pattern[0].mixer, "position", None)
        if not isinstance(rope, RoPE):
            return {}
        fields = {self.theta: rope.theta, "rope_scaling": write_scaling(rope.scaling)}
        if rope.fraction != 1 or self.fraction != FRACTION:
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
