"""Data given from Python: `train.fit(experiment, data=[...])`.

The settings of a run name them by their digest, `data.path = python:data/<digest>`. The examples
stay in this process, for as long as the run that `fit` returned.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from train.data.arrays import ArrayDataConfig, check_arrays, digest_arrays
from train.data.bitext import BitextDataConfig
from train.data.data_config import DataConfig, StreamingConfig, TextDataConfig
from train.data.files import SPLITS
from train.data.held_data import HELD_DATA, PYTHON_DATA_PREFIX, PythonData
from train.data.text_files import check_unicode
from train.data.text_labels import ClassificationDataConfig
from train.data.token_labels import TokenLabelDataConfig
from train.errors import UserError


def hold_data(
    config: DataConfig, data: Any, validation_data: Any = None
) -> tuple[DataConfig, PythonData]:
    """Return the settings with `path` naming the data, and the data.

    The data can be read while the second value is alive.

    Args:
      config: They decide what an example is; their paths are replaced.
      data: Training examples, or a dict of splits: train, validation, test. For `ArrayDataConfig`,
        the examples are a dict of arrays by name.
      validation_data: Validation examples.

    Raises:
      UserError: The data are empty, or are not examples of the task.
    """
    splits = dict(data) if is_by_split(config, data) else {"train": data}
    if validation_data is not None:
        if "validation" in splits:
            raise UserError("validation_data: data has a validation split too; give one of them")
        splits["validation"] = validation_data
    if unknown := [name for name in splits if name not in SPLITS]:
        raise UserError(f"data: split {unknown[0]!r} is not known; name {', '.join(SPLITS)}")
    if "train" not in splits:
        raise UserError(f"data: has no split train (it has {', '.join(splits) or 'none'}); add it")
    ordered = {name: splits[name] for name in SPLITS if name in splits}
    if isinstance(config, ArrayDataConfig):
        arrays = {split: _check_arrays(split, each) for split, each in ordered.items()}
        python_data = PythonData(arrays, PYTHON_DATA_PREFIX + digest_arrays(arrays)[:16])
    else:
        check = _example_check(config)
        examples = {split: _check_split(split, each, check) for split, each in ordered.items()}
        kinds = {type(example) for each in examples.values() for example in each}
        if np.ndarray in kinds and len(kinds) > 1:
            raise UserError("data: mixes texts and arrays of token ids; give only one of them")
        python_data = PythonData(examples, PYTHON_DATA_PREFIX + _digest(examples))
    # Equal data have one path and are held once: the first object stays, because the runs that name
    # it keep only that one alive.
    python_data = HELD_DATA.setdefault(python_data.path, python_data)
    paths: dict[str, Any] = {"path": python_data.path}
    if not isinstance(config, ArrayDataConfig):
        paths |= {"validation_path": "", "test_path": ""}
    if isinstance(config, TextDataConfig):
        paths |= {"sources": (), "streaming": StreamingConfig()}
    return dataclasses.replace(config, **paths), python_data


def is_by_split(config: DataConfig, data: Any) -> bool:
    """Return True for a dict of splits; False for the examples of one, which may be a dict too."""
    if not isinstance(data, Mapping):
        return False
    is_arrays = isinstance(config, ArrayDataConfig)
    return not is_arrays or any(isinstance(each, Mapping) for each in data.values())


def check_same_data(workdir: object, saved_path: str, path: str) -> None:
    """Raise UserError if a run that was trained on data from Python is resumed with other data."""
    if saved_path == path or not saved_path.startswith(PYTHON_DATA_PREFIX):
        return
    now = path if path.startswith(PYTHON_DATA_PREFIX) else "none"
    raise UserError(
        f"{workdir}: its run was trained on data given from Python, {saved_path}, and now {now} "
        "are given; call train.fit with the same data, or with another workdir"
    )


def _check_arrays(split: str, arrays: Any) -> dict[str, np.ndarray]:
    """Return arrays by name. They are copies: the caller may change its own in place."""
    if not isinstance(arrays, Mapping):
        raise UserError(
            f"data, split {split}: is a {type(arrays).__name__}; give a dict of the arrays "
            "that the task's loss reads, with one row for each example"
        )
    copies = {}
    for name, values in arrays.items():
        try:
            copies[str(name)] = np.array(values)
        except ValueError as error:  # rows of several lengths
            raise UserError(
                f"data, split {split}: array {name} has rows of several lengths; pad them to one"
            ) from error
    return check_arrays(split, copies)


_PAIRS: dict[type[DataConfig], tuple[str, str]] = {
    ClassificationDataConfig: ("text", "label"),
    BitextDataConfig: ("source", "target"),
    TokenLabelDataConfig: ("tokens", "tags"),
}
"""What the examples of data are pairs of."""


def _example_check(config: DataConfig) -> Callable[[str, Any], Any]:
    """Return the function that checks and converts an example, given its location for errors."""
    if type(config).read_split is DataConfig.read_split:
        if isinstance(config, TextDataConfig):
            return _check_text
        for kind, names in _PAIRS.items():
            if isinstance(config, kind):
                return functools.partial(_check_pair, names)
    pairs = ", ".join(kind.__name__ for kind in _PAIRS)
    known = f"{TextDataConfig.__name__}, {pairs}, {ArrayDataConfig.__name__}"
    raise UserError(
        f"data: {type(config).__name__} reads no examples from Python; set "
        f"Experiment.data to one of {known}"
    )


def _check_split(
    split: str, examples: Iterable[Any], check: Callable[[str, Any], Any]
) -> list[Any]:
    where = f"data, split {split}"
    if isinstance(examples, str | bytes) or not isinstance(examples, Iterable):
        raise UserError(f"{where}: is a {type(examples).__name__}; give a list of examples")
    if getattr(examples, "ndim", 2) == 1 and np.asarray(examples).dtype.kind in "iu":
        examples = [examples]  # one long array of token ids
    checked = [check(f"{where}, example {index}", each) for index, each in enumerate(examples)]
    if not any(len(each) for each in checked):
        raise UserError(f"{where}: is empty; give some examples")
    return checked


def _check_text(where: str, example: Any) -> Any:
    if isinstance(example, str):
        check_unicode(where, "the text", example)
        return example
    try:
        array = np.asarray(None if isinstance(example, Mapping) else example)
    except ValueError:  # a list of lists of different lengths
        array = np.asarray(None)
    if array.ndim == 1 and array.dtype.kind in "iu" and array.size:
        if array.min() < 0:
            raise UserError(f"{where}: has the token id {array.min()}; give ids of 0 or more")
        return array.astype(np.int64)
    raise UserError(f"{where}: is a {type(example).__name__}; give strings, or arrays of token ids")


def _check_pair(names: tuple[str, str], where: str, example: Any) -> Any:
    """Return a pair of texts, or a list of words with their tags."""
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise UserError(f"{where}: is a {type(example).__name__}; give pairs ({', '.join(names)})")
    first, second = example
    if names != ("tokens", "tags"):
        check_second = _check_name if names[1] == "label" else _check_string
        return _check_string(where, names[0], first), check_second(where, names[1], second)
    if isinstance(first, str) or isinstance(second, str) or len(first) != len(second):
        raise UserError(f"{where}: has no tag for each token; give (tokens, tags) of one length")
    if not len(first):
        raise UserError(f"{where}: has no tokens; leave it out")
    return [
        (_check_string(where, "token", token), _check_name(where, "tag", tag))
        for token, tag in zip(first, second, strict=True)
    ]


def _check_string(where: str, noun: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: its {noun} is a {type(value).__name__}; give a string")
    check_unicode(where, f"its {noun}", value)
    return value


def _check_name(where: str, noun: str, value: Any) -> str:
    """Return the name of a label. Integers are taken as names."""
    if isinstance(value, int | np.integer) or (isinstance(value, str) and value):
        return str(value)
    raise UserError(f"{where}: its {noun} is {value!r}; give a string or an integer")


def _digest(splits: Mapping[str, list[Any]]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name, examples in splits.items():
        digest.update(f"{name} {len(examples)}\n".encode())
        for example in examples:
            if isinstance(example, np.ndarray):
                digest.update(f"{example.size} ".encode() + example.tobytes())
            else:
                digest.update(json.dumps(example).encode() + b"\n")
    return digest.hexdigest()
