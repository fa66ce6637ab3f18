"""Random experiments whose settings have the right types."""

import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

from train.cli.parsing import Draft
from train.config.experiment_files import find_experiment
from train.config.io import (
    experiment_from_dict,
    experiment_to_dict,
    flatten_experiment,
    flatten_fields,
)
from train.estimate.describe import describe
from train.experiment import Experiment

BASES = (
    "quickstart",
    "gpt2:small",
    "versus:transformer",
    "llama:3-8b",
    "transformer_base",
    "bert:base",
)
"""Experiments that can be described without data."""

WHOLE = st.sampled_from([-1, 0, 1, 2, 3, 4, 5, 7, 8, 12, 64, 100, 1000])
BROKEN = st.sampled_from([-1.0, 0.0, 1e-9, 0.1, 0.5, 1.0, 2.0, 1e9, float("nan"), float("inf")])


@functools.cache
def words() -> tuple[str, ...]:
    """Return every string value and kind that occurs in some base."""
    texts: set[str] = set()
    for base in BASES:
        experiment = find_experiment(base)
        texts |= {
            value for value in flatten_experiment(experiment).values() if isinstance(value, str)
        }
        texts |= {kind for _, known in kind_options(experiment) for kind in known}
    return tuple(sorted(texts))


def kind_options(experiment: Experiment) -> Iterator[tuple[str, Mapping[str, type]]]:
    """Yield the path of every part that may be of several classes, and these by kind."""
    queue = [Draft.of(Experiment, vars(experiment))]
    for draft in queue:
        if draft.kinds:
            yield draft.path, {kind: each for kind, each in draft.kinds.items() if kind != "None"}
        queue += [part for part in draft.values.values() if isinstance(part, Draft)]


def values(value: Any) -> st.SearchStrategy[Any]:
    """Return other values of the same type, and None."""
    match value:
        case bool():
            return st.booleans()
        case int():
            return WHOLE
        case float():
            return BROKEN
        case str():
            return st.sampled_from(words())
        case _:
            return st.none() | WHOLE | BROKEN | st.booleans()


@st.composite
def experiments(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a base with some kinds and values replaced, in the form of `config.json`."""
    base = find_experiment(draw(st.sampled_from(BASES)))
    plain = experiment_to_dict(base)
    for name, kinds in draw(st.lists(st.sampled_from(list(kind_options(base))), max_size=2)):
        put(plain, name, {"kind": draw(st.sampled_from(sorted(kinds)))})
    present = {name: value for name, value in flatten_fields(plain) if not name.endswith("kind")}
    for name in draw(st.lists(st.sampled_from(sorted(present)), max_size=3)):
        other = draw(values(present[name]) | st.none())
        put(plain, name, other)
    return plain


def put(tree: Any, name: str, value: Any) -> None:
    """Set a value by its path, if the path exists."""
    *path, last = name.split(".")
    for key in path:
        tree = tree[int(key)] if isinstance(tree, list) else tree.get(key)
        if not isinstance(tree, dict | list):
            return
    tree[int(last) if isinstance(tree, list) else last] = value


def use(folder: pathlib.Path, plain: dict[str, Any]) -> None:
    """Describe the experiment: build the model and trace its step."""
    describe(experiment_from_dict(plain, "an experiment"))
