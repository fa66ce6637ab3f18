"""A family of architectures, and the rules that several families share.

A family has two tables, each written once and used in both directions: `settings` relates fields of
a config.json to settings of this library, `weights` relates tensors to parameters.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, cast

from transformer.interop.fields import Fields
from transformer.interop.rope import Rotary
from transformer.interop.weight_map import LINEAR, Layout, Weight
from transformer.models.block import BlockConfig
from transformer.models.config import PoolerConfig, TransformerConfig
from transformer.models.heads import Classifier, Pooling
from transformer.models.model import Model

ModelKind = Literal[
    "language_model", "masked_lm", "classifier", "tagger", "question_answering", "encoder_decoder"
]


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


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One class of `transformers`: a body of the family with a head."""

    name: str
    """Name in `architectures` of a config.json."""
    kind: ModelKind
    head: tuple[Weight, ...] = ()
    """Rules of the head's weights, beside those of the family."""
    pooler: Callable[[TransformerConfig], PoolerConfig] | None = None
    """Returns `TransformerConfig.pooler_layer`; None: the model has no pooler."""
    pooling: Pooling | Setting = "first"
    """`Classifier.pooling`, or the field that decides it."""
    head_bias: bool = True
    """`Classifier.head_bias`."""
    has_end_token: bool = False
    """`Classifier.end_token` is `eos_token_id`."""

    def with_pooler(self, config: TransformerConfig) -> TransformerConfig:
        """Return the config with the pooler of the architecture, or without one."""
        if self.pooler is None:
            return dataclasses.replace(config, pooler=False)
        return dataclasses.replace(config, pooler=True, pooler_layer=self.pooler(config))

    def read_pooling(self, fields: Fields) -> Pooling:
        """Return the pooling of a classifier."""
        if isinstance(self.pooling, Setting):
            return cast(Pooling, fields.choose(self.pooling.theirs, self.pooling.choices or {}))
        return self.pooling

    def read_end_token(self, fields: Fields) -> int | None:
        """Return the token whose last state a classifier reads; None: any."""
        if not self.has_end_token:
            return None
        end = int(fields.take("eos_token_id"))
        # What the decoder reads first is the text's last token here.
        if fields.take("decoder_start_token_id") not in (end, None):
            raise fields.unsupported("decoder_start_token_id", f"{end}, the eos_token_id")
        return end

    def write_head(self, model: Model) -> dict[str, Any]:
        """Return the fields of a classifier's head.

        Raises:
          ValueError: The architecture has another pooling, or a bias where the head has none.
        """
        if not isinstance(model, Classifier):
            return {}
        if model.head_bias != self.head_bias:
            raise ValueError(f"head_bias {model.head_bias} (it has {self.head_bias})")
        if (model.end_token is not None) != self.has_end_token:
            raise ValueError(f"end_token {model.end_token}")
        if isinstance(self.pooling, Setting):
            return {self.pooling.theirs: name_of(self.pooling.choices or {}, model.pooling)}
        if model.pooling != self.pooling:
            raise ValueError(f"pooling {model.pooling!r} (it has {self.pooling!r})")
        if self.has_end_token:
            return dict.fromkeys(("eos_token_id", "decoder_start_token_id"), model.end_token)
        return {}


def decoder_classes(name: str, body: str = "") -> tuple[Architecture, Architecture]:
    """Return the language model and the classifier, of the last token, of a decoder."""
    score = Weight("score.weight", "head")
    return (
        Architecture(f"{name}ForCausalLM", "language_model"),
        Architecture(
            f"{body or name}ForSequenceClassification",
            "classifier",
            (score,),
            pooling="last",
            head_bias=False,
        ),
    )


@dataclasses.dataclass(frozen=True)
class QueryKeyNorm:
    """The rule of a field that says whether queries and keys have norms, of the layers' own kind.

    Norms with a gain for each head have no bias.
    """

    theirs: str
    heads: Literal["shared", "separate"] = "shared"
    """`AttentionConfig.qk_norm_heads`."""

    def read(self, fields: Fields, config: TransformerConfig) -> TransformerConfig:
        """Return the config with the norms, if the field says so."""
        if not fields.take(self.theirs):
            return config
        norm: Any = config.layer_pattern[0].norm
        if self.heads == "separate":
            norm = dataclasses.replace(norm, bias=False)
        values = {"qk_norm": norm, "qk_norm_heads": self.heads}
        return with_settings(
            config, {f"layer_pattern.mixer.{name}": x for name, x in values.items()}
        )

    def write(self, config: TransformerConfig) -> dict[str, Any]:
        """Return the field."""
        mixer: Any = config.layer_pattern[0].mixer
        return {self.theirs: getattr(mixer, "qk_norm", None) is not None}


def name_of(choices: Mapping[Any, Any], value: Any) -> Any:
    """Return the first name of a choice, or one that nobody reads."""
    return next((name for name, ours in choices.items() if ours == value), f"unsupported {value}")


def setting_at(part: Any, path: str) -> Any:
    """Return the setting at a path; in a layer pattern, that of the first block that has it."""
    if isinstance(part, tuple):
        for block in part[:-1]:
            with contextlib.suppress(AttributeError):
                return setting_at(block, path)
        part = part[-1]
    name, _, rest = path.partition(".")
    value = getattr(part, name)
    return setting_at(value, rest) if rest else value


Config = TypeVar("Config", TransformerConfig, BlockConfig)


def with_settings(config: Config, values: Mapping[str, Any]) -> Config:
    """Return a config with other values at some paths."""
    changed: Config = _replace(config, values)
    return changed


def _replace(part: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(part, tuple):  # a layer pattern
        return tuple(_replace(block, values) for block in part)
    changes: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if rest:
            below.setdefault(name, {})[rest] = value
        else:
            changes[name] = value
    for name, inner in below.items():
        changes[name] = _replace(getattr(part, name), inner)
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
    settings: tuple[Setting | Rotary, ...]
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
        config = with_settings(self.base, settings)
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


Item = TypeVar("Item")


def shortest_period(items: Sequence[Item]) -> tuple[Item, ...]:
    """Return the shortest sequence whose repetition, cut to length, gives the items."""
    for period in range(1, len(items) + 1):
        if all(items[i] == items[i % period] for i in range(len(items))):
            return tuple(items[:period])
    return tuple(items)
