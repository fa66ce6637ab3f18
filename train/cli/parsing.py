"""Arguments through tyro, with errors of one line."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

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
        from transformer.checks import check_numbers  # loads JAX, which help and goodput need not

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
