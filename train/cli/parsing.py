"""Parse arguments with tyro into config dataclasses, with one-line errors.

A config part may be one of several classes (mixer, optimizer, task, ...). `--optimizer.kind lion`
selects another class before its settings are parsed; the new class starts from its own defaults.
"""

import contextlib
import dataclasses
import io
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from train.cli.main import HELP_FLAGS
from train.config.io import classes_by_kind, has_kind_field
from train.errors import UsageError
from train.runtime.startup import program_name
from train.telemetry.event_log import finite_or_none

if TYPE_CHECKING:
    from transformer.precision import Precision


Arguments = TypeVar("Arguments")
"""Type variable: the dataclass of a verb's arguments."""


def parse(
    arguments_type: type[Arguments],
    arguments: Sequence[str],
    *,
    verb: str,
    default: Arguments | None = None,
    extra_help: str = "",
) -> Arguments:
    """Parse arguments into a dataclass.

    Args:
      arguments_type: The dataclass.
      arguments: Arguments of the verb, without those already taken.
      verb: Name of the verb, for messages.
      default: Values of the settings that are not given.
      extra_help: Text that `--help` shows after the dataclass's docstring.

    Raises:
      UsageError: tyro or a config rejects an argument.
    """
    extra: dict[str, Any] = {} if default is None else {"default": default}
    parts = (arguments_type.__doc__, "--json prints one object on standard output.", extra_help)
    extra["description"] = "\n".join(part for part in parts if part)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parsed = tyro.cli(
                arguments_type,
                prog=f"{program_name()} {verb}",
                args=normalize_switches(arguments, default),
                registry=_registry(),
                config=(tyro.conf.AvoidSubcommands,),
                **extra,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        names = {field.name for field in dataclasses.fields(cast("Any", arguments_type))}
        names.update(path for path, _ in _settings(default))
        settings = {name.replace("_", "-") for name in names}
        raise UsageError(flatten_error(errors.getvalue(), verb, settings)) from None
    if dataclasses.fields(cast("Any", arguments_type)):
        from transformer.validation import check_nested_settings

        with as_usage_errors():
            check_nested_settings(parsed, "")
    return parsed


def normalize_switches(arguments: Sequence[str], default: Any) -> list[str]:
    """Return the arguments with `--x.y False` as `--x.no-y`, and `--x.y True` as `--x.y`.

    tyro's switches take no value, but `config.txt`, the errors and `sweep --set` show one.
    """
    switches = {path.replace("_", "-") for path, hint in _settings(default) if hint is bool}
    normalized: list[str] = []
    for argument in arguments:
        last = (
            normalized[-1].removeprefix("--")
            if normalized and normalized[-1].startswith("--")
            else ""
        )
        value = argument.lower()
        if last.replace("_", "-") not in switches or value not in ("true", "false"):
            normalized.append(argument)
        elif value == "false":
            parent, dot, name = last.rpartition(".")
            normalized[-1] = f"--{parent}{dot}no-{name}"
    return normalized


def _settings(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and type of each setting of a config; those of `experiment` have no prefix."""
    for name, value, hint in _config_parts(config):
        yield name, hint
        for inner, inner_hint in _settings(value):
            yield (inner if name == "experiment" else f"{name}.{inner}"), inner_hint


@contextlib.contextmanager
def as_usage_errors() -> Iterator[None]:
    """Turn a config's ValueError into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


OTHER_NAMES = {
    "batch-size": "bs train-batch-size per-device-train-batch-size",
    "beams": "num-beams",
    "checkpoint.every": "save-steps save-interval save-every",
    "data.path": "data dataset data-dir data-path train-file",
    "data.sequence-length": "seq-len seq-length block-size context-length max-seq-len",
    "evaluation.every": "eval-steps eval-interval eval-every",
    "grad-accum-steps": "gradient-accumulation-steps accumulate-grad-batches",
    "log-every": "log-interval logging-steps",
    "max-new-tokens": "max-tokens max-length",
    "model.d-model": "d-model hidden-size n-embd",
    "model.num-layers": "layers n-layer num-hidden-layers",
    "model.precision": "bf16 fp16 dtype",
    "optimizer.max-grad-norm": "grad-clip gradient-clip-val max-grad-norm",
    "optimizer.weight-decay": "wd weight-decay",
    "schedule.learning-rate": "lr learning-rate",
    "schedule.warmup-steps": "warmup warmup-iters num-warmup-steps",
    "steps": "epochs num-epochs num-train-epochs max-steps max-iters num-steps train-steps",
    "workdir": "output-dir out-dir output save-dir",
}
"""Names that other trainers give to settings. tyro itself goes by the spelling."""


def flatten_error(box: str, verb: str, settings: Collection[str]) -> str:
    """Return tyro's framed message as one line.

    Args:
      box: The message.
      verb: Verb and its first argument.
      settings: Names of all settings that the verb has.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│╭╮╰╯─ \t") for line in text.splitlines()]
    # tyro draws rules with hyphens if the output is not UTF-8.
    text = " ".join(line for line in lines[1:] if line.strip("-"))
    text = re.split(r"For full helptext", text)[0]
    see = f"see {program_name()} {verb} --help"
    unknown, _, similar = text.partition("Perhaps you meant:")
    if found := re.match(r"Unrecognized options: (.*)", unknown):
        words = found[1].strip().split(", ")
        flags = [word.partition("=")[0] for word in words if word.startswith("--")] or words
        names = [
            setting
            for flag in flags
            for setting, others in OTHER_NAMES.items()
            if flag.lstrip("-").replace("_", "-") in others.split() and setting in settings
        ]
        known = [f"--{name}" for name in names] or re.findall(r"(?<!\S)--[\w.-]+", similar)
        meant = f"perhaps you meant {' or '.join(known)}; " if known else ""
        return f"{', '.join(flags)}: no such setting; {meant}{see}"
    text = text.replace("Argument helptext:", "; it is")
    text = re.sub(r"\s+", " ", text).replace(" ;", ";").strip()
    # An invalid part is named by its own message; a flag comes first, as in other messages.
    text = re.sub(r"^Error parsing (?:experiment[\w.]*: |(?=--))", "", text)
    text = re.sub(
        r"invalid literal for int\(\) with base 10: ('.*?')", r"\1 is not an integer", text
    )
    text = re.sub(r"could not convert string to float: ('.*?')", r"\1 is not a number", text)
    return f"{text or box.strip()}; {see}"


def _registry() -> ConstructorRegistry:
    """Return tyro's rules plus one: precision policies by name, `--model.precision bfloat16`."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def precision(info: Any) -> "PrimitiveConstructorSpec[Precision] | None":
        if (
            "transformer.precision" not in sys.modules
        ):  # no field has this type, and JAX is not loaded
            return None
        from transformer.precision import Precision

        if info.type is not Precision:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="POLICY",
            instance_from_str=lambda values: Precision.parse(values[0]),
            is_instance=lambda value: isinstance(value, Precision),
            str_from_instance=lambda value: [value.name],
        )

    return registry


def pop_json_flag(arguments: list[str]) -> bool:
    """Remove `--json` from the arguments; return True if it was given."""
    return pop_flag(arguments, "--json")


def print_json(record: Any) -> None:
    """Print the one line of `--json`. JSON has no NaN and no infinities: they become null."""
    print(json.dumps(finite_or_none(record), allow_nan=False), flush=True)


def pop_flag(arguments: list[str], flag: str) -> bool:
    """Remove a flag from the arguments; return True if it was given."""
    is_present = flag in arguments
    while flag in arguments:
        arguments.remove(flag)
    return is_present


def pop_positional(arguments: list[str], name: str, verb: str) -> str:
    """Remove and return the first argument, or its name if help is asked for without it.

    Raises:
      UsageError: The argument is missing, or an option.
    """
    if arguments and arguments[0] in HELP_FLAGS:
        return name
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(f"{verb}: {name} is missing; write {program_name()} {verb} {name} ...")
    return arguments.pop(0)


Config = TypeVar("Config")
"""Type variable: a config dataclass."""


def select_kinds(config: Config, arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """Return the config with the classes that `--path.kind` selects, and the other arguments.

    Raises:
      UsageError: A kind is unknown.
    """
    requested = _requested_kinds(arguments)
    # tyro parses fields of the classes in `default`: the classes must be right before it runs.
    selected, used = _with_kinds(
        config, None, "", {path: kind for path, (kind, _) in requested.items()}
    )
    consumed = {index for path in used for index in requested[path][1]}
    return selected, [each for index, each in enumerate(arguments) if index not in consumed]


def kinds_help(config: Any) -> str:
    """Return the parts that can be of several classes, for `--help`."""
    lines = [
        f"--{path.replace('_', '-')}.kind {{{','.join(known)}}}"
        for path, known in kind_options(config)
    ]
    return "\n".join(["Other kinds, each with its own settings:", *lines]) if lines else ""


def kind_options(config: Any) -> Iterator[tuple[str, Mapping[str, type]]]:
    """Yield every part that can be of several classes: its path, and the classes by kind."""
    for name, value, hint in _config_parts(config):
        if known := classes_by_kind(hint):
            yield name, known
        for inner, known in kind_options(value):
            yield f"{name}.{inner}", known


def _requested_kinds(arguments: Sequence[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the kind given for each `--path.kind`, and the positions of its arguments."""
    requested: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not (name.startswith("--") and name.endswith(".kind")):
            continue
        path = name.removeprefix("--").removesuffix(".kind").replace("-", "_")
        if equals:
            requested[path] = value, (index,)
        elif index + 1 < len(arguments):
            requested[path] = arguments[index + 1], (index, index + 1)
    return requested


def _with_kinds(
    config: Any, hint: Any, path: str, requested: dict[str, str]
) -> tuple[Any, set[str]]:
    """Return a part with the selected classes, its own and nested, and the paths that were used.

    Parts are not validated here: their kinds may depend on each other, and on flags that tyro reads
    later (`--data.kind` of a class whose default length is beyond the model's). tyro builds every
    part anew, by its constructor.
    """
    used = set()
    if path in requested and (known := classes_by_kind(hint)):
        kind = requested[path]
        if kind not in known:
            raise UsageError(f"{path}.kind {kind}: is unknown; give one of {', '.join(known)}")
        config = config if type(config) is known[kind] else _unvalidated(known[kind])
        # Where `kind` is also a setting of the class (a shipped schedule), tyro parses it.
        if not has_kind_field(known[kind]):
            used.add(path)
    changed = {}
    for name, value, inner in _config_parts(config):
        new, nested = _with_kinds(value, inner, f"{path}.{name}" if path else name, requested)
        used |= nested
        if new is not value:
            changed[name] = new
    if isinstance(config, tuple) and changed:
        config = tuple(changed.get(str(index), each) for index, each in enumerate(config))
    elif changed:
        config = _unvalidated(type(config), {**vars(config), **changed})
    return config, used


def _unvalidated(config_class: type, values: Mapping[str, Any] | None = None) -> Any:
    """Return a dataclass with these values, or its defaults, without running `__post_init__`."""
    config: Any = object.__new__(config_class)
    for field in dataclasses.fields(config_class):
        if values is not None:
            value = values[field.name]
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = field.default
        object.__setattr__(config, field.name, value)
    return config


def _config_parts(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, value, type hint) of each field of a dataclass or entry of a tuple."""
    if isinstance(config, tuple):
        yield from ((str(index), each, type(each)) for index, each in enumerate(config))
    elif dataclasses.is_dataclass(config):
        hints = get_type_hints(type(config))
        for field in dataclasses.fields(config):
            yield field.name, getattr(config, field.name), hints[field.name]
