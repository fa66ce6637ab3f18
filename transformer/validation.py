"""Checks that configurations make of their fields: each raises a ValueError of one line."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

MAX_INTEGER = 2**31 - 1
"""Largest integer of a setting. XLA counts steps, positions and indices in 32 bits; numbers beyond
overflow far from the setting that has them, or fill the memory while a model is built."""


MAX_MODEL_INTEGER = 2**24
"""Largest integer of a model's setting. They are sizes of arrays, of which several are multiplied:
XLA ends the process for an array of more than 2^63 numbers, which no `except` can catch."""


MAX_INTEGER_BY_FIELD = {
    # Python lists, and constants made on the host, have an entry for each.
    "layers": 10_000,
    "depth": 10_000,
    "iterations": 10_000,
    "num_heads": 2**16,
    "num_kv_heads": 2**16,
    "experts": 2**16,
    "beams": 2**16,
    "rounds": 2**10,
    "taps": 2**16,
    # Dimensions of which products are taken.
    "head_dim": 2**20,
    "value_width": 2**20,
    "sequence_length": 2**24,
    "max_length": 2**24,
    "tokens": 2**24,
    "extra_length": 2**24,
    # Patterns that are laid out on the host.
    "span": 2**22,
    "block": 2**16,
    "global_blocks": 2**12,
    "window_blocks": 2**12,
    "random_blocks": 2**12,
    "buckets": 2**16,
    "shapes": 2**16,
    "max_depth": 500,
    "max_arguments": 2**16,
    # Rows of tables, padded to a multiple: their indices are int32.
    "vocab_size": 2**28,
    "vocab_multiple": 2**20,
    "token_types": 2**28,
    "classes": 2**28,
    # A batch's number is an int32 too, and each rollback adds `skip` to it.
    "steps": 10**9,
    "skip": 10**8,
    "back": 10**9,
    # Sizes of files, and seeds that NumPy takes.
    "limit_bytes": 2**63 - 1,
    "training_characters": 2**63 - 1,
    "max_new_tokens": 2**24,
    "ns_steps": 10_000,
    "num_layers": 10_000,
    "kernel_size": 2**16,
    "block_size": 2**16,
    "num_global_blocks": 2**12,
    "num_window_blocks": 2**12,
    "num_random_blocks": 2**12,
    "random_block_span": 2**22,
    "redraw_index": 2**32 - 1,
    "num_buckets": 2**16,
    "num_hashes": 2**10,
    "transition_depth": 10_000,
    "value_head_dim": 2**20,
    "causal_block": 2**16,
    "num_token_types": 2**28,
    "pad_vocab_to_multiple": 2**20,
    "num_classes": 2**28,
    "num_experts": 2**16,
    "num_beams": 2**16,
    "num_labels": 2**28,
    "max_bytes": 2**63 - 1,
    "max_buckets": 2**16,
    "generator_seed": 2**63 - 1,
    "seed": 2**32 - 1,
    "redraw": 2**32 - 1,
    "split_seed": 2**63 - 1,
    "draw_seed": 2**63 - 1,
}
"""Largest integer of settings, by the last part of their names, where it is another."""


MAX_FLOAT = 2.0**127
"""Floats of settings are used in float32, where those beyond become infinite."""


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """The value is one of those known."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} {value}: is not known; give one of {', '.join(choices)}")


def check_number(name: str, value: float) -> None:
    """Raise ValueError for an integer or a float that is too large to compute with, or no number.

    Args:
      name: Dotted name of the setting; its last part decides how large an integer may be.
      value: An integer or a float.
    """
    if isinstance(value, int):
        usual = MAX_MODEL_INTEGER if name.startswith("model.") else MAX_INTEGER
        most = MAX_INTEGER_BY_FIELD.get(name.rpartition(".")[2], usual)
        if abs(value) > most:
            # Python refuses to print integers of more than 4300 digits.
            shown = str(value) if abs(value) < 10**30 else "of so many digits"
            raise ValueError(f"{name} {shown}: is too large; give at most {most}")
    elif not math.isfinite(value):
        raise ValueError(f"{name} {value}: is not a finite number; give one")
    elif abs(value) > MAX_FLOAT:
        raise ValueError(f"{name} {value}: is too large for float32; give less than 1e38")


def check_numbers(config: Any, name: str = "") -> None:
    """Raise ValueError, by `check_number`, for any number in a configuration and its parts.

    Args:
      config: A dataclass, a tuple or a scalar; what is neither is left alone.
      name: Dotted name of the configuration, which those of its fields follow.
    """
    if isinstance(config, bool):
        return
    if isinstance(config, int | float):
        check_number(name, config)
    elif isinstance(config, tuple):
        for index, each in enumerate(config):
            check_numbers(each, f"{name}.{index}")
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        for field in dataclasses.fields(config):
            inner = f"{name}.{field.name}" if name else field.name
            check_numbers(getattr(config, field.name), inner)


def check_at_least(name: str, value: float, minimum: float) -> None:
    """The value is at least so much, finite, and not larger than any may be."""
    if not value >= minimum:
        raise ValueError(f"{name} {value}: give {minimum} or more")
    check_number(name, value)


def check_fraction(name: str, value: float) -> None:
    """The value is a share below one, such as a rate of dropout."""
    if not 0 <= value < 1:
        raise ValueError(f"{name} {value}: give a share in [0, 1)")


def check_seed(seed: int) -> None:
    """Raise ValueError for a seed of which `jax.random.key` would cut off bits: it takes 32."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed {seed}: give one from 0 to 2^32 - 1")
