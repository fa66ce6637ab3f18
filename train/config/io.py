"""Experiments as plain data: saved with every run, read back, and compared on resume.

A field may hold one of several classes: a position embedding, an optimizer, a task, a mixer. In
plain data such a value is a dict whose `kind` names the class. A saved run is data only: `kind`
selects among known classes, and nothing in the file is executed. Users add classes of their own to
mixers, tasks, datasets, optimizers and schedules (`OPEN_PARTS`).
"""

import dataclasses
import functools
import json
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Union, get_args, get_origin

import cattrs
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from train.data.data_config import DataConfig
from train.errors import UserError
from train.experiment import Experiment
from train.optim.optimizer import Optimizer
from train.optim.optimizer_registry import OPTIMIZERS
from train.optim.schedules import SCHEDULES, LearningRateSchedule
from train.tasks.registry import data_configs, task_configs
from train.tasks.task import TaskConfig
from transformer.attention.mixer import MIXERS, MixerConfig, mixer_config_class
from transformer.precision import Precision
from transformer.validation import Mark, field_marks


@functools.cache
def _converter() -> cattrs.Converter:
    """Return the converter between experiments and plain data."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(Precision, lambda precision: precision.name)
    converter.register_structure_hook(Precision, lambda text, _: Precision.parse(text))

    def to_dict(kind: str, value: Any) -> dict[str, Any]:
        return {"kind": kind, **make_dict_unstructure_fn(type(value), converter)(value)}

    def from_dict(data: dict[str, Any], hint: Any) -> Any:
        fields, known = dict(data), classes_by_kind(hint)
        kind = fields.pop("kind")
        if kind not in known:
            raise UserError(
                f"kind {kind}: is not known; it may be {', '.join(known)}, or one of your own from "
                "a module that --import names"
            )
        config = known[kind]
        if has_kind_field(config):  # a shipped schedule
            fields["kind"] = kind
        structure: Any = make_dict_structure_fn(config, converter, _cattrs_forbid_extra_keys=True)
        return structure(fields, config)

    converter.register_unstructure_hook_func(
        _has_kinds, lambda value: None if value is None else to_dict(kind_name(type(value)), value)
    )
    converter.register_structure_hook_func(
        _has_kinds, lambda data, hint: None if data is None else from_dict(data, hint)
    )
    return converter


def _has_kinds(hint: Any) -> bool:
    # Not `classes_by_kind`: cattrs remembers the answer, and classes are registered later.
    return bool(classes_by_kind(hint))


def experiment_to_dict(experiment: Experiment) -> dict[str, Any]:
    """Return nested dicts, lists and scalars, as in JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(_converter().unstructure(experiment)))
    return plain


def experiment_from_dict(data: dict[str, Any], source: str) -> Experiment:
    """Return the experiment that `experiment_to_dict` was given; `source` names the file.

    Raises:
      UserError: the data are not an experiment of this version.
    """
    try:
        return _converter().structure(data, Experiment)
    except (cattrs.BaseValidationError, KeyError, TypeError, ValueError) as error:
        reasons = str(error)
        if isinstance(error, cattrs.BaseValidationError):  # One error for each wrong field.
            reasons = "; ".join(cattrs.transform_error(error, format_exception=_format_error))
        raise UserError(
            f"{source}: does not describe an experiment ({reasons}); "
            "it was damaged or written by another version"
        ) from error


def _format_error(error: BaseException, hint: type | None) -> str:
    """Return a configuration's own message about its field, which cattrs would replace."""
    is_own = isinstance(error, UserError) or type(error) is ValueError
    return str(error) if is_own else cattrs.v.format_exception(error, hint)


def flatten_experiment(experiment: Experiment) -> dict[str, Any]:
    """Return all fields by dotted path, sorted: `model.layer_pattern.0.mixer.num_heads` -> 6."""
    return dict(sorted(flatten_fields(experiment_to_dict(experiment))))


def flatten_fields(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for every scalar and every empty container of plain data."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten_fields(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from flatten_fields(inner, f"{name}.{index}")
    else:
        yield name, value


def experiment_to_text(experiment: Experiment) -> str:
    """Return the experiment as sorted lines of `name = value`, which `diff` can compare."""
    return "".join(
        f"{name} = {json.dumps(value)}\n" for name, value in flatten_experiment(experiment).items()
    )


def diff_experiments(saved: Experiment, requested: Experiment) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two experiments differ, as {name: (saved, requested)}."""
    old, new = flatten_experiment(saved), flatten_experiment(requested)
    names = sorted(old.keys() | new.keys())
    return {n: (old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)}


def non_resumable_fields(experiment: Experiment) -> dict[str, Any]:
    """Return the fields that no resume may change, with their values."""
    resumable = marked_fields(experiment, Mark.RESUMABLE)
    fields = flatten_experiment(experiment)
    return {name: value for name, value in fields.items() if not is_within(name, *resumable)}


def forbidden_changes(
    differences: dict[str, tuple[Any, Any]], requested: Experiment
) -> dict[str, tuple[Any, Any]]:
    """Return those of the differences (saved, requested) that do not allow a run to be resumed."""
    resumable = marked_fields(requested, Mark.RESUMABLE)
    switches = marked_fields(requested, Mark.SWITCHES_STATE)
    return {
        name: (old, new)
        for name, (old, new) in differences.items()
        if not is_within(name, *resumable)
        or (name in switches and bool(old) != bool(new))
        or name == "optimizer.kind"  # each has a state of its own
    }


def marked_fields(settings: Any, mark: Mark, name: str = "") -> set[str]:
    """Return the dotted paths of the settings, and of the parts, that have a mark."""
    if isinstance(settings, tuple):
        parts = [(f"{name}.{index}", part) for index, part in enumerate(settings)]
        return set().union(*(marked_fields(part, mark, inner) for inner, part in parts))
    if not dataclasses.is_dataclass(settings):
        return set()
    found = set()
    for field, marks in field_marks(type(settings)).items():
        inner = f"{name}.{field}" if name else field
        found |= {inner} if mark in marks else set()
        found |= marked_fields(getattr(settings, field), mark, inner)
    return found


def is_within(name: str, *parts: str) -> bool:
    """Return True if a setting is one of these, or in one of these parts."""
    return any(f"{name}.".startswith(f"{part}.") for part in parts)


OPEN_PARTS: tuple[tuple[type, Callable[[], Mapping[str, type]]], ...] = (
    (MixerConfig, lambda: {kind: mixer_config_class(kind) for kind in MIXERS}),
    (TaskConfig, task_configs),
    (DataConfig, data_configs),
    (Optimizer, lambda: OPTIMIZERS),
    (LearningRateSchedule, lambda: SCHEDULES),
)
"""Parts to which users add classes of their own: the base class, and all classes by kind."""


def classes_by_kind(hint: Any) -> Mapping[str, type]:
    """Return the classes that a field with this type hint may hold, by kind.

    Empty if the field has a single class. None in a union is not listed: it has no kind. The kinds
    of the shipped schedules are one class, of which `kind` is a field.
    """
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    classes = [each for each in members if isinstance(each, type)]
    for base, known in OPEN_PARTS:
        if any(issubclass(each, base) for each in classes):
            return known()
    configs = [each for each in classes if dataclasses.is_dataclass(each)]
    return {kind_name(each): each for each in configs} if len(configs) > 1 else {}


def kind_name(config: type) -> str:
    """Return the kind of a configuration class: its attribute `kind`, or the name of the class.

    A class with a *field* called `kind` (a norm, say) goes by its own name.
    """
    kind = None if has_kind_field(config) else getattr(config, "kind", None)
    return kind or config.__name__


def has_kind_field(config: type) -> bool:
    """Return True if `kind` is a setting of the class."""
    return any(field.name == "kind" for field in dataclasses.fields(config))
