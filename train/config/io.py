"""Experiments as plain data: saved with every run, compared when it is resumed, read back.

Nothing of a saved run is executed: a name in the file chooses among the classes known here.

Settings that may be one of several classes, which `kind` names.

They are the unions of configurations (positions, optimizers, tasks, ...), and the mixers, to which
users add their own.
"""

import dataclasses
import functools
import json
import types
from collections.abc import Iterator, Mapping
from typing import Any, Union, get_args, get_origin

import cattrs
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn

from train.data.config import DataConfig
from train.errors import UserError
from train.experiment import Experiment
from train.tasks.config import TaskConfig
from train.tasks.registry import data_configs, task_configs
from transformer.attention.config import MixerConfig
from transformer.precision import Precision
from transformer.registry import MixerConfigRegistry

RESUMABLE_FIELDS = (
    "name",
    "steps",
    "log_every",
    "evaluation.",
    "sample.",
    "checkpoint.",
    "early_stopping.",
    "recovery.threshold",
    "recovery.warmup",
    "recovery.loss_rise_tolerance",
    "recovery.patience",
    "recovery.rollback_steps",
    "recovery.skip_batches",
    "recovery.max_rollbacks",
    "recovery.lr_factor",
    "mesh.",
    "compile",
    "grad_accum_steps",
    "data.path",
    "data.validation_path",
    "data.test_path",
    "data.cache_dir",
    "model.layer_loop",
    "model.remat",
    "optimizer.",
    "schedule.",
    "loss_scale.growth_interval",
    "loss_scale.max_scale",
    "ema.decay",
)
"""Settings that may differ when a run is resumed: what is asked for holds from there on, whatever
was asked for when the checkpoint was saved. What the data are is told by their digest."""


RESUMABLE_MIXER_FIELDS = (".redraw_index",)
"""What the names of those end with that a mixer may have: its random features are drawn anew."""


STATE_SHAPE_FIELDS = ("optimizer.kind", "optimizer.momentum", "ema.decay")
"""Those of them that decide what the state holds: a kind may not differ, a number not be 0 in one
place alone."""


@functools.cache
def _converter() -> cattrs.Converter:
    """Where a setting may be one of several classes, `kind` says which."""
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_unstructure_hook(Precision, lambda precision: precision.name)
    converter.register_structure_hook(Precision, lambda text, _: Precision.parse(text))

    def out(kind: str, value: Any) -> dict[str, Any]:
        return {"kind": kind, **make_dict_unstructure_fn(type(value), converter)(value)}

    def back(data: dict[str, Any], hint: Any) -> Any:
        rest, known = dict(data), classes_by_kind(hint)
        kind = rest.pop("kind")
        if kind not in known:
            raise UserError(f"kind {kind}: is not known; it may be {', '.join(known)}")
        found = known[kind]
        structure: Any = make_dict_structure_fn(found, converter, _cattrs_forbid_extra_keys=True)
        return structure(rest, found)

    converter.register_unstructure_hook_func(
        _has_kinds, lambda value: None if value is None else out(kind_name(type(value)), value)
    )
    converter.register_structure_hook_func(
        _has_kinds, lambda data, hint: None if data is None else back(data, hint)
    )
    return converter


def _has_kinds(hint: Any) -> bool:
    return bool(classes_by_kind(hint))


def experiment_to_dict(experiment: Experiment) -> dict[str, Any]:
    """Nested dicts, lists and scalars, as JSON has them."""
    plain: dict[str, Any] = json.loads(json.dumps(_converter().unstructure(experiment)))
    return plain


def experiment_from_dict(data: dict[str, Any], source: str) -> Experiment:
    """The experiment again. Raises UserError, naming `source`, for anything that is not one."""
    try:
        return _converter().structure(data, Experiment)
    except (cattrs.BaseValidationError, KeyError, TypeError, ValueError) as error:
        reasons = str(error)
        if _is_group(error):
            reasons = "; ".join(cattrs.transform_error(error, format_exception=_said))
        raise UserError(
            f"{source}: does not describe an experiment ({reasons}); "
            "it was damaged or written by another version"
        ) from error


def _said(error: BaseException, hint: type | None) -> str:
    """What a configuration says of its field; cattrs would say `invalid value`."""
    own = isinstance(error, UserError) or type(error) is ValueError
    return str(error) if own else cattrs.v.format_exception(error, hint)


def _is_group(error: BaseException) -> bool:
    return isinstance(error, cattrs.BaseValidationError)


def flatten_experiment(experiment: Experiment) -> dict[str, Any]:
    """`model.layer_pattern.0.mixer.num_heads` -> 6, and so on, sorted by name."""
    return dict(sorted(flatten_fields(experiment_to_dict(experiment))))


def flatten_fields(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """What `to_plain` gives, as pairs of a path and what is no container there, or an empty one."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flatten_fields(inner, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from flatten_fields(inner, f"{name}.{index}")
    else:
        yield name, value


def experiment_to_text(experiment: Experiment) -> str:
    """The experiment as lines of `name = value`, sorted: two of them can be compared by eye."""
    return "".join(
        f"{name} = {json.dumps(value)}\n" for name, value in flatten_experiment(experiment).items()
    )


def diff_experiments(saved: Experiment, requested: Experiment) -> dict[str, tuple[Any, Any]]:
    """The settings in which two experiments differ: (saved, asked) by name."""
    old, new = flatten_experiment(saved), flatten_experiment(requested)
    names = sorted(old.keys() | new.keys())
    return {n: (old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)}


def non_resumable_fields(experiment: Experiment) -> dict[str, Any]:
    """Return the settings that no resume may change, by name."""
    free = (*RESUMABLE_FIELDS, *STATE_SHAPE_FIELDS)
    return {
        name: value
        for name, value in flatten_experiment(experiment).items()
        if not name.startswith(free) and not name.endswith(RESUMABLE_MIXER_FIELDS)
    }


def forbidden_changes(differences: dict[str, tuple[Any, Any]]) -> dict[str, tuple[Any, Any]]:
    """Those of the changes that a run cannot be resumed with."""
    return {name: pair for name, pair in differences.items() if not _may_differ(name, *pair)}


def _may_differ(name: str, old: Any, new: Any) -> bool:
    if name in STATE_SHAPE_FIELDS and (isinstance(old, str) or bool(old) != bool(new)):
        return False
    return name.startswith(RESUMABLE_FIELDS) or name.endswith(RESUMABLE_MIXER_FIELDS)


def classes_by_kind(hint: Any) -> Mapping[str, type]:
    """The classes that a setting with this type hint may be, by name; none if there is no choice.

    A union with None, or a mixer with None, has the same: None has no name.
    """
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    classes = [each for each in members if isinstance(each, type)]
    if any(issubclass(each, MixerConfig) for each in classes):
        return MixerConfigRegistry()
    if any(issubclass(each, TaskConfig) for each in classes):
        return task_configs()
    if any(issubclass(each, DataConfig) for each in classes):
        return data_configs()
    configs = [each for each in classes if dataclasses.is_dataclass(each)]
    return {kind_name(each): each for each in configs} if len(configs) > 1 else {}


def kind_name(config: type) -> str:
    """What a class is called: its `kind`, or its own name."""
    settings = {field.name for field in dataclasses.fields(config)}
    named = None if "kind" in settings else getattr(config, "kind", None)
    return named or config.__name__
