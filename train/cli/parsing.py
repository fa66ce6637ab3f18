"""Arguments through tyro, with errors of one line.

`--optimizer.kind lion`: another kind of a part, before its settings are read.

The new kind has its own defaults; what was set for the old one is forgotten.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from train.config.io import classes_by_kind
from train.errors import UsageError

if TYPE_CHECKING:
    from transformer.precision import Precision


Arguments = TypeVar("Arguments")


def parse(
    arguments_type: type[Arguments],
    arguments: Sequence[str],
    *,
    verb: str,
    default: Arguments | None = None,
    extra_help: str = "",
) -> Arguments:
    """Reads `arguments` into a dataclass, over `default` if there is one.

    `extra_help` is what `--help` says of them beside what the dataclass does.

    Raises:
      UsageError: in one line, for whatever tyro refuses.
    """
    extra: dict[str, Any] = {} if default is None else {"default": default}
    if extra_help:
        extra["description"] = f"{arguments_type.__doc__}\n\n{extra_help}"
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            found = tyro.cli(
                arguments_type,
                prog=f"python -m train {verb}",
                args=list(arguments),
                registry=_registry(),
                config=(tyro.conf.AvoidSubcommands,),
                **extra,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UsageError(flatten_error(errors.getvalue(), verb)) from None
    if dataclasses.fields(cast("Any", arguments_type)):
        from transformer.validation import check_numbers

        with as_usage_errors():
            check_numbers(found)
    return found


@contextlib.contextmanager
def as_usage_errors() -> Iterator[None]:
    """Turns a ValueError of a configuration that is being built into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


def flatten_error(box: str, verb: str) -> str:
    """The words of tyro's framed message, less the frame."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", box)
    lines = [line.strip("│╭╮╰╯─ \t") for line in text.splitlines()]
    # Where the output is no UTF-8, rules are drawn of hyphens.
    words = " ".join(line for line in lines[1:] if line.strip("-"))
    words = re.split(r"For full helptext", words)[0]
    words = words.replace("Perhaps you meant:", "; perhaps you meant")
    words = words.replace("Argument helptext:", "; it is")
    words = re.sub(r"\s+", " ", words).replace(" ;", ";").strip()
    return f"{words or box.strip()}; see python -m train {verb} --help"


def _registry() -> ConstructorRegistry:
    """Precision policies are given by name: `--model.precision bfloat16`."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def precision(info: Any) -> PrimitiveConstructorSpec[Precision] | None:
        if "transformer.precision" not in sys.modules:  # then nothing is one, nor is JAX needed
            return None
        from transformer.precision import Precision

        if info.type is not Precision:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="POLICY",
            instance_from_str=lambda words: Precision.parse(words[0]),
            is_instance=lambda value: isinstance(value, Precision),
            str_from_instance=lambda value: [value.name],
        )

    return registry


def pop_json_flag(arguments: list[str]) -> bool:
    """Takes `--json` out of the arguments, and tells whether it was there."""
    return pop_flag(arguments, "--json")


def pop_flag(arguments: list[str], flag: str) -> bool:
    """Takes a flag out of the arguments, and tells whether it was there."""
    found = flag in arguments
    while flag in arguments:
        arguments.remove(flag)
    return found


def pop_positional(arguments: list[str], name: str, verb: str) -> str:
    """Takes the first argument out, which must be `name` and no option."""
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(f"{verb}: {name} is missing; write python -m train {verb} {name} ...")
    return arguments.pop(0)


Config = TypeVar("Config")


def select_kinds(config: Config, arguments: Sequence[str]) -> tuple[Config, list[str]]:
    """The configuration with the kinds that are asked for, and the arguments that are left.

    Raises:
      UsageError: for a kind that is not known.
    """
    asked = _asked(arguments)
    chosen, used = _chosen(config, None, "", {path: kind for path, (kind, _) in asked.items()})
    taken = {index for path in used for index in asked[path][1]}
    return chosen, [each for index, each in enumerate(arguments) if index not in taken]


def kinds_help(config: Any) -> str:
    """The parts that may be of several kinds, for `--help`."""
    lines = [f"--{path}.kind {{{','.join(known)}}}" for path, known in kind_options(config)]
    return "\n".join(["Another kind brings its own settings:", *lines]) if lines else ""


def kind_options(config: Any) -> Iterator[tuple[str, Mapping[str, type]]]:
    """Every part that may be of several kinds: where it is, and its kinds by name."""
    for name, value, hint in _parts(config):
        if known := classes_by_kind(hint):
            yield name, known
        for inner, known in kind_options(value):
            yield f"{name}.{inner}", known


def _asked(arguments: Sequence[str]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What is given for each `--path.kind`, and at which places of the arguments."""
    asked: dict[str, tuple[str, tuple[int, ...]]] = {}
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if not (name.startswith("--") and name.endswith(".kind")):
            continue
        path = name.removeprefix("--").removesuffix(".kind").replace("-", "_")
        if equals:
            asked[path] = value, (index,)
        elif index + 1 < len(arguments):
            asked[path] = arguments[index + 1], (index, index + 1)
    return asked


def _chosen(config: Any, hint: Any, path: str, asked: dict[str, str]) -> tuple[Any, set[str]]:
    """A part with the kinds that are asked for, of its own and within; and which of those it had.

    Each part is built once, when all within are chosen: kinds that need each other may change both.
    """
    used = set()
    if path in asked and (known := classes_by_kind(hint)):
        kind = asked[path]
        if kind not in known:
            raise UsageError(f"{path}.kind {kind}: is not known; give one of {', '.join(known)}")
        config = config if type(config) is known[kind] else known[kind]()
        used.add(path)
    changed = {}
    for name, value, inner in _parts(config):
        new, within = _chosen(value, inner, f"{path}.{name}" if path else name, asked)
        used |= within
        if new is not value:
            changed[name] = new
    if isinstance(config, tuple) and changed:
        config = tuple(changed.get(str(index), each) for index, each in enumerate(config))
    elif changed:
        config = dataclasses.replace(config, **changed)
    return config, used


def _parts(config: Any) -> Iterator[tuple[str, Any, Any]]:
    """What a part is made of: (name, value, type hint), the entries of a tuple by their numbers."""
    if isinstance(config, tuple):
        yield from ((str(index), each, type(each)) for index, each in enumerate(config))
    elif dataclasses.is_dataclass(config):
        hints = get_type_hints(type(config))
        for field in dataclasses.fields(config):
            yield field.name, getattr(config, field.name), hints[field.name]
