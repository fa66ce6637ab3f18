"""Parse the arguments of a verb with tyro.

The flags of an experiment are the settings of its CONFIG. tyro gets them as a `Draft`: the classes
and the values of all parts, before any is built. `--optimizer.kind lion` replaces a part of the
draft by the defaults of another class. Parts are built, and checked, when all flags are known.
"""

import dataclasses
import functools
import itertools
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, cast, get_args, get_type_hints

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from train.cli.main import HELP_FLAGS
from train.config.io import classes_by_kind, is_within
from train.config.shipped import did_you_mean
from train.errors import UsageError, as_usage_errors
from train.experiment import Experiment
from train.runtime.startup import program_name
from train.telemetry.event_log import finite_or_none
from transformer.precision import Precision
from transformer.quantization import Quantization
from transformer.validation import Mark, check_settings, field_marks

Arguments = TypeVar("Arguments")
"""Type variable: the dataclass of a verb's arguments."""

IsShown = Callable[[str, bool], bool]
"""Whether help shows a setting, given its path and whether many people change it."""


Workdir = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="W")]
"""Folder of a run, the first argument of many verbs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonArguments:
    """Base of the arguments of the verbs that print a result."""

    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print one object on standard output."""

    def show(self, record: Mapping[str, Any], text: str) -> None:
        """Print the record with `--json`, or else the text."""
        if self.json:
            print_json(record)
        else:
            print(text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArguments(JsonArguments):
    """Base of the arguments of the verbs that load the weights of a run."""

    workdir: Workdir
    """Folder of the run."""
    step: int | None = None
    """Step of the checkpoint; default: the run's evaluation weights (the newest checkpoint, unless
    the run keeps its best one or averages several)."""
    quantize: Quantization = "none"
    """Hold the matrices of the layers in few bits: int8, or int4 by groups of 64 inputs. none: as
    they are stored."""


def parse(
    arguments_type: type[Arguments],
    arguments: Sequence[str],
    *,
    verb: str,
    experiment: Experiment | None = None,
    extra_help: str = "",
) -> Arguments:
    """Parse arguments into a dataclass.

    `--help` shows the settings that many people change, `--help-all` all, and `--help optimizer`
    those of a part.

    Args:
      arguments_type: The dataclass. The settings of its field `experiment` are flags as well.
      arguments: Arguments of the verb.
      verb: Name of the verb, for messages.
      experiment: Values of the settings of an experiment that are not given.
      extra_help: Text that help shows after the dataclass's docstring.

    Raises:
      UsageError: A setting is not valid.
      SystemExit: tyro refuses an argument with a message of its own, or has shown the help.
    """
    flags = given_flags(arguments)
    draft = Draft.of(arguments_type, {} if experiment is None else {"experiment": experiment})
    draft.select_kinds(flags)
    arguments, is_shown = _requested_help(arguments, draft)
    parsed = tyro.cli(
        cast("type[Arguments]", Draft),
        prog=f"{program_name()} {verb}",
        description="\n\n".join(filter(None, [arguments_type.__doc__, extra_help])),
        args=arguments,
        default=cast("Any", draft),
        registry=_registry(is_shown),
        config=(tyro.conf.AvoidSubcommands,),
    )
    with as_usage_errors():
        check_settings(parsed, "")
    return parsed


def given_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Return the word after each flag, or after its `=`, by the path of its setting."""
    flags = {}
    for flag, following in itertools.pairwise([*arguments, ""]):
        if flag.startswith("--"):
            name, equals, value = flag.removeprefix("--").partition("=")
            flags[name.replace("-", "_")] = value if equals else following
    return flags


# ---- Drafts ----


@dataclasses.dataclass(eq=False)
class Draft:
    """A part of the settings that is not built yet."""

    part_class: type
    """A dataclass, tuple, or NoneType."""
    values: dict[str, Any]
    """Drafts and plain values by name; of a tuple by index."""
    path: str = ""
    """Dotted path from the experiment; empty for it and for the arguments of the verb."""
    kinds: Mapping[str, type] = dataclasses.field(default_factory=dict)
    """Classes that may take its place, by kind."""
    is_common: bool = False
    """The short help shows its kind."""

    @classmethod
    def of(cls, part_class: type, values: Mapping[str, Any], **place: Any) -> "Draft":
        """Return the draft of a dataclass, or of None; values that are not given are defaults."""
        draft = cls(part_class, {}, **place)
        if part_class is types.NoneType:
            return draft
        hints, marks = get_type_hints(part_class), field_marks(part_class)
        for field in dataclasses.fields(part_class):
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            value = values.get(field.name, default)
            if value is dataclasses.MISSING:
                value = tyro.MISSING
            path = "" if field.name == "experiment" else draft.path_of(field.name)
            is_common = Mark.COMMON in marks.get(field.name, ())
            draft.values[field.name] = _drafted(value, hints[field.name], path, is_common)
        return draft

    def path_of(self, name: str) -> str:
        """Return the dotted path of one of its values."""
        return f"{self.path}.{name}".lstrip(".")

    def settings(self) -> Iterator[str]:
        """Yield the dotted path of every setting."""
        if self.has_extra_kind:
            yield self.path_of("kind")
        for name, value in self.values.items():
            if isinstance(value, Draft):
                yield from value.settings()
            else:
                yield self.path_of(name)

    def select_kinds(self, flags: Mapping[str, str]) -> None:
        """Replace the parts for which flags name another kind."""
        for name, part in self.values.items():
            if not isinstance(part, Draft):
                continue
            chosen = part.kinds.get(flags.get(f"{part.path}.kind", ""), part.part_class)
            if chosen is not part.part_class:
                part = Draft.of(
                    chosen, {}, path=part.path, kinds=part.kinds, is_common=part.is_common
                )
                self.values[name] = part
            part.select_kinds(flags)

    def build(self, **values: Any) -> Any:
        """Return the part that the values make."""
        if self.part_class is tuple:
            return tuple(values.values())
        if self.part_class is types.NoneType:
            return None
        if self.has_extra_kind:
            del values["kind"]
        with as_usage_errors():
            return self.part_class(**values)

    @property
    def kind_hint(self) -> Any:
        """Type hint of its kind."""
        return Literal[tuple(self.kinds)]

    @property
    def has_extra_kind(self) -> bool:
        """True if its kind is chosen by a flag that is not a field of its class."""
        return bool(self.kinds) and "kind" not in self.values


def _drafted(value: Any, hint: Any, path: str, is_common: bool = False) -> Any:
    """Return the draft of a part, and a plain value as it is."""
    if isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        parts = {str(i): _drafted(each, None, f"{path}.{i}") for i, each in enumerate(value)}
        return Draft(tuple, parts, path)
    kinds = dict(classes_by_kind(hint))
    if kinds and types.NoneType in get_args(hint):
        kinds["None"] = types.NoneType
    place = {"path": path, "kinds": kinds, "is_common": is_common}
    if value is None and kinds:
        return Draft.of(types.NoneType, {}, **place)
    if not dataclasses.is_dataclass(value) or isinstance(value, Precision):
        return value
    values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return Draft.of(type(value), values, **place)


# ---- What tyro asks ----


def _requested_help(arguments: Sequence[str], draft: Draft) -> tuple[Sequence[str], IsShown]:
    """Return the arguments in tyro's terms, and which settings its help shows."""
    if "--help-all" in arguments:
        return ["--help"], lambda path, is_common: True
    index = next((i for i, each in enumerate(arguments) if each in HELP_FLAGS), None)
    if index is None:
        return arguments, lambda path, is_common: True
    part = "".join(arguments[index + 1 : index + 2]).replace("-", "_")
    if not part or part.startswith("_") or "experiment" not in draft.values:
        return ["--help"], lambda path, is_common: is_common
    known = list(draft.settings())
    if not any(is_within(path, part) for path in known):
        parts = {path.partition(".")[0] for path in known if "." in path}
        raise UsageError(
            f"--help {part}: is no part of the settings{did_you_mean(part, [*parts, *known])}; "
            f"give one of {', '.join(sorted(parts))}"
        )
    return ["--help"], lambda path, is_common: is_within(path, part)


def _registry(is_shown: IsShown) -> ConstructorRegistry:
    """Return tyro's rules, with those for drafts and for precision policies."""
    registry = ConstructorRegistry()

    @registry.struct_rule
    def draft_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        if not isinstance(info.default, Draft):
            return None
        return StructConstructorSpec(info.default.build, tuple(_draft_fields(info, is_shown)))

    @registry.primitive_rule
    def precision_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Precision] | None:
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


def _draft_fields(info: StructTypeInfo, is_shown: IsShown) -> Iterator[StructFieldSpec]:
    """Yield the fields of a draft, with the docstrings that tyro finds in its class."""
    draft: Draft = info.default
    if draft.has_extra_kind:
        kind = next(kind for kind, each in draft.kinds.items() if each is draft.part_class)
        hint = _shown_if(is_shown(draft.path_of("kind"), draft.is_common), draft.kind_hint)
        yield StructFieldSpec("kind", hint, kind, "Class, with settings of its own.")
    if draft.part_class is types.NoneType:
        return
    if draft.part_class is tuple:
        for name, part in draft.values.items():
            yield StructFieldSpec(name, Draft, part, part.part_class.__doc__)
        return
    dataclass_info = dataclasses.replace(info, type=draft.part_class, default=tyro.MISSING)
    spec = ConstructorRegistry.get_struct_spec(dataclass_info)
    assert isinstance(spec, StructConstructorSpec)
    marks = field_marks(draft.part_class)
    # The arguments of the verb itself are few.
    is_top = not draft.path and draft.part_class is not Experiment
    for field in spec.fields:
        value, hint = draft.values[field.name], field.type
        if field.name == "experiment":  # its settings are flags without a prefix
            hint = Annotated[Draft, tyro.conf.arg(name="")]
        elif isinstance(value, Draft):
            hint = Draft
        else:
            is_common = is_top or Mark.COMMON in marks.get(field.name, ())
            hint = draft.kind_hint if field.name == "kind" and draft.kinds else hint
            hint = _shown_if(is_shown(draft.path_of(field.name), is_common), hint)
        text = functools.partial(_one_paragraph, field.helptext)
        yield dataclasses.replace(field, type=hint, default=value, helptext=text)


def _one_paragraph(text: str | Callable[[], str | None] | None) -> str:
    """Return a docstring without its line breaks: help has another width."""
    return " ".join(((text() if callable(text) else text) or "").split())


def _shown_if(is_shown: bool, hint: Any) -> Any:
    """Return a type hint that tyro's help obeys."""
    return hint if is_shown else Annotated[hint, tyro.conf.Suppress]


def print_json(record: Any) -> None:
    """Print the one line of `--json`. JSON has no NaN and no infinities: they become null."""
    print(json.dumps(finite_or_none(record), allow_nan=False), flush=True)
