"""Fields of a `config.json`: typed reading, and a refusal of every field that nobody read."""

import math
from collections.abc import Mapping
from typing import Any


class InteropError(ValueError):
    """Problem with a Hugging Face folder or model: the thing, the problem, the remedy, one line."""


# Not None, which is a default like any other.
REQUIRED: Any = object()

WITHOUT_EFFECT = frozenset(
    [
        "architectures",
        "model_type",
        "transformers_version",
        "torch_dtype",
        "dtype",
        "_name_or_path",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "unk_token_id",
        "mask_token_id",
        "decoder_start_token_id",
        "forced_eos_token_id",
        "forced_bos_token_id",
        "initializer_range",
        "initializer_factor",
        "init_std",
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "task_specific_params",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "gradient_checkpointing",
        "pretraining_tp",
        "max_length",
        "min_length",
        "num_beams",
        "do_sample",
        "early_stopping",
        "length_penalty",
        "no_repeat_ngram_size",
        "bad_words_ids",
        "output_past",
        "keys_to_ignore_at_inference",
        "_attn_implementation",
        "attn_implementation",
        "cache_implementation",
        "language",
        "max_position_embeddings",
        "n_ctx",
        "n_positions",
        "classifier_dropout",
        "classif_dropout",
        "seq_classif_dropout",
        "qa_dropout",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
        "use_safetensors",
        "prefix",
        "tokenizer_class",
        "architecture",
    ]
)
"""Fields that do not change what the model computes: names, token ids, generation, training."""


class Fields:
    """Fields of a config, with a record of those that were read."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values, self._source, self._read = dict(values), source, set[str]()

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def set_missing(self, **defaults: Any) -> None:
        """Set fields that the config leaves out. Those that are null there stay null."""
        self._values = defaults | self._values

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """Return a field, or the default if it is missing or null.

        Raises:
          InteropError: It is missing without a default, or of another type than the default.
        """
        self._read.add(name)
        value = self._values.get(name)
        if value is None:
            if default is REQUIRED:
                raise InteropError(f"{self._source}: has no {name}; restore the original file")
            return default
        # JSON has one kind of number: 512.0 is an integer too. Python's True is no number here.
        kind = type(default)
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
        return int(value) if kind is int else value

    def size(self, name: str) -> int:
        """Return a required field that is a positive integer."""
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InteropError(
                f"{self._source}: {name} {value!r} is not a positive integer; "
                "restore the original file"
            )
        return value

    def choose(self, name: str, choices: Mapping[str, Any], default: str = "") -> Any:
        """Return the value that a field's name stands for."""
        value = self.take(name, default) if default else self.take(name)
        if value not in choices:
            raise self.unsupported(name, f"one of {', '.join(choices)}")
        return choices[value]

    def expect(self, name: str, *supported: Any) -> None:
        """Check a field whose other values this library does not compute."""
        self._read.add(name)
        value = self._values.get(name)
        if value is not None and value not in supported:
            raise self.unsupported(name, " or ".join(map(repr, supported)))

    def error(self, text: str) -> InteropError:
        """Return an error about the file."""
        return InteropError(f"{self._source}: {text}")

    def unsupported(self, name: str, supported: str) -> InteropError:
        """Return the error about a field's value."""
        value = self._values.get(name)
        return InteropError(f"{self._source}: {name} {value!r} is not supported; only {supported}")

    def finish(self) -> None:
        """Check that every field was read, or is known to have no effect, or is off."""
        for name, value in self._values.items():
            known = name in self._read or name in WITHOUT_EFFECT
            if not known and value not in (None, False, [], {}, ""):
                raise InteropError(
                    f"{self._source}: {name} {value!r} is not known for this architecture, and may "
                    "change what the model computes; remove it if it does not"
                )
