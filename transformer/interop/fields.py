"""Fields of a `config.json`: typed reading, and a verdict on the fields that nobody read."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class InteropError(ValueError):
    """Problem with a Hugging Face folder or model: the thing, the problem, the remedy, one line."""


class ConfigFields(NamedTuple):
    """What `transformers` knows of the config.json of one type."""

    defaults: dict[str, Any]
    """Fields with their defaults. None also stands for a default that other fields decide."""
    unread: frozenset[str]
    """Fields that the configuration declares, and that no code reads."""
    aliases: dict[str, str]
    """Other names of fields. A value under the other name wins."""
    classes: frozenset[str]
    """Classes that hold a body of the type."""


# Written by `python -m bench config_fields --write`; not edited by hand.
_TABLE = json.loads(Path(__file__).with_name("config_fields.json").read_text())

GENERATION = frozenset(_TABLE["generation"])
"""Settings of generation, which a config.json of earlier versions may have."""

COMMON = GENERATION | frozenset(_TABLE["common"])
"""Fields of all configurations, and of generation."""

CONFIG_FIELDS = {
    model_type: ConfigFields(
        entry["defaults"],
        frozenset(entry["unread"]),
        entry["aliases"],
        frozenset(entry["classes"]),
    )
    for model_type, entry in _TABLE["types"].items()
}
"""Fields that `transformers` reads, by `model_type`."""

WITHOUT_EFFECT = frozenset(
    [
        # Token ids: rows of embeddings that get no gradient, and where answers begin and end.
        "pad_token_id",
        "eos_token_id",
        "decoder_start_token_id",
        # Heads, their losses and their dropout.
        "id2label",
        "num_labels",
        "problem_type",
        "classifier_dropout",
        "classifier_dropout_prob",
        "seq_classif_dropout",
        "qa_dropout",
        "classifier_pooling",  # read for classifiers
        # Training alone.
        "layerdrop",
        "encoder_layerdrop",
        "decoder_layerdrop",
        "sparse_prediction",
        "sparse_pred_ignore_index",
        # Initial values of Mamba-2's steps.
        "time_step_floor",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
        # How the same numbers are computed and returned.
        "chunk_size",
        "chunk_size_feed_forward",
        "deterministic_flash_attn",
        "dtype",
        "onnx_export",
        "output_hidden_states",
        "output_router_logits",
        "reorder_and_upcast_attn",
        "residual_in_fp32",
        "return_dict",
        "slow_but_exact",
        "use_cache",
        # Kinds of layers, where no layer_types name them: then it is read.
        "sliding_window_pattern",
        # Lengths: of a table of positions, and of scaled RoPE, they are read.
        "max_position_embeddings",
        "max_seq_len",
        "n_positions",
        # Sparse attention, which is not read.
        "block_size",
        "num_random_blocks",
    ]
)
"""Fields that the code of `transformers` reads, and that do not change what a model computes."""


class Fields:
    """Fields of a config, with a record of those that were read."""

    def __init__(self, values: Mapping[str, Any], source: str, model_type: str) -> None:
        self._source, self._model_type = source, model_type
        self._known = CONFIG_FIELDS[model_type]
        self._values = dict(values)
        for alias, name in self._known.aliases.items():
            if alias in self._values:
                self._values[name] = self._values.pop(alias)
        self._read = set[str]()

    def __contains__(self, name: str) -> bool:
        """Return True for a field that the config has, and that is not null."""
        return self._values.get(name) is not None

    def take(self, name: str, null: Any = None) -> Any:
        """Return a field, or the default of `transformers` for the type if it is absent.

        Args:
          name: Name of the field.
          null: What null stands for, in the config or as the default, with the type of the field.
            None: 0, false or empty, after the type of the default.

        Raises:
          InteropError: It is of another type.
        """
        self._read.add(name)
        default = self._known.defaults.get(name)
        value = self._values.get(name, default)
        kind: Any = type(default if null is None else null)
        if value is None:
            return kind() if null is None else null
        # JSON has one kind of number: 512.0 is an integer too. Python's True is no number here.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        right = {
            bool: isinstance(value, bool),
            int: is_number and math.isfinite(value) and value == int(value),
            float: is_number,
            str: isinstance(value, str),
            list: isinstance(value, list),
            dict: isinstance(value, dict),
        }.get(kind, True)
        if not right:
            raise InteropError(
                f"{self._source}: {name} {value!r} is not of type {kind.__name__}; "
                "restore the original file"
            )
        return kind(value) if kind in (int, float) else value

    def size(self, name: str) -> int:
        """Return a field that is a positive integer."""
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InteropError(
                f"{self._source}: {name} {value!r} is not a positive integer; "
                "restore the original file"
            )
        return value

    def inner(self, name: str) -> "Fields":
        """Return the fields of a config within this one, which have no defaults."""
        return Fields(self.take(name, {}), f"{self._source}: {name}", self._model_type)

    def choose(self, name: str, choices: Mapping[Any, Any]) -> Any:
        """Return the value that a field's name stands for."""
        value = self.take(name)
        if value not in choices:
            raise self.unsupported(name, f"one of {', '.join(choices)}")
        return choices[value]

    def expect(self, name: str, *supported: Any) -> None:
        """Check a field whose other values this library does not compute."""
        self._read.add(name)
        value = self._values.get(name)
        if value is not None and value not in supported:
            raise self.unsupported(name, " or ".join(map(repr, supported)))

    def unsupported(self, name: str, supported: str) -> InteropError:
        """Return the error about a field's value."""
        value = self._values.get(name, self._known.defaults.get(name))
        return InteropError(f"{self._source}: {name} {value!r} is not supported; only {supported}")

    def unknown(self) -> list[str]:
        """Return the fields that no code of the type reads.

        Raises:
          InteropError: Code of the type reads a field that is not read here, and its value is not
            the default.
        """
        defaults, unread = self._known.defaults, self._known.unread
        left = self._values.keys() - self._read - WITHOUT_EFFECT
        for name in sorted(left & defaults.keys() - unread):
            value, default = self._values[name], defaults[name]
            is_off = not value and not default  # such as false where null is the default
            if value not in (None, default) and not is_off:
                raise InteropError(
                    f"{self._source}: {name} {value!r} is not supported for this type of model; "
                    f"only {default!r}, its default"
                )
        return sorted(left - defaults.keys() - COMMON)


def is_kept(name: str, model_type: str) -> bool:
    """Return True for a field of an import that is written again with other weights of the type."""
    known = CONFIG_FIELDS[model_type]
    name = known.aliases.get(name, name)
    return name in WITHOUT_EFFECT or name in known.unread or name in COMMON - known.defaults.keys()
