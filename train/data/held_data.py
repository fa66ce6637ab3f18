"""Examples that `train.fit` was given from Python, by the path that settings name them with.

They stay in this process, for as long as the run that `fit` returned.
"""

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from train.errors import UserError

PYTHON_DATA_PREFIX = "python:data/"
"""Start of `data.path` of data given from Python."""


@dataclasses.dataclass(frozen=True, eq=False)
class PythonData:
    """Examples of each split, checked, in the form that `DataConfig.read_split` returns."""

    splits: Mapping[str, Any]
    """A list of examples for each split; for `ArrayDataConfig`, a dict of arrays."""
    path: str
    """Value of `data.path`."""

    @property
    def has_token_arrays(self) -> bool:
        """True if the examples are arrays of token ids, and not texts."""
        examples = self.splits["train"]
        return isinstance(examples, list) and isinstance(examples[0], np.ndarray)


HELD_DATA: weakref.WeakValueDictionary[str, PythonData] = weakref.WeakValueDictionary()
"""Data by path. Settings are plain values, so they can only name the data."""


def held_data(path: str) -> PythonData:
    """Return the data that a path names. Raises UserError if they are not in this process."""
    if path not in HELD_DATA:
        raise UserError(
            f"data.path {path}: names data given from Python, which this process does not have; "
            "in Python, train.load(W).evaluate(data=...) takes them, and so does train.fit"
        )
    return HELD_DATA[path]
