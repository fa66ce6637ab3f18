"""The command line: `python -m train VERB ...`.

Each verb has its module, imported only when it is called. Help loads no JAX, that of a CONFIG
neither: settings are defined apart from what computes.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

from train.errors import UsageError, UserError
from train.runtime.signals import reliable_keyboard_interrupt

VERBS = {
    "fit": ("CONFIG [--workdir W] [--a.b.c VALUE ...]", "train; goes on where a run stopped"),
    "evaluate": ("W [--split S]", "the held-out metrics of a run"),
    "sample": ("W --prompt TEXT ...", "let a run's model write, translate, classify or tag"),
    "goodput": ("W", "what a run's time has gone into, over all its lives"),
    "describe": ("CONFIG [--a.b.c VALUE ...]", "parameters, FLOPs and memory, before training"),
    "plan": ("CONFIG --target T [--a.b.c VALUE ...]", "will it fit, how fast, at what cost"),
    "doctor": ("", "what hardware and versions are here, and what is wrong with them"),
}


MODEL_VERBS = frozenset({"fit", "evaluate", "sample"})
"""Verbs that run a model."""


HELP_FLAGS = frozenset({"-h", "--help"})


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a verb and exits: 0; 1 for what went wrong, 2 for a usage error, 75 for preemption."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [each for each in arguments if each != "--debug"]
    try:
        with reliable_keyboard_interrupt(), flush_on_exit():
            if not arguments or arguments[0] in HELP_FLAGS:
                print(usage())
                sys.exit(0 if arguments else 2)
            sys.exit(dispatch(arguments[0], arguments[1:]))
    except (UserError, KeyboardInterrupt, BrokenPipeError, OSError) as error:
        if debug:
            raise
        exit_process(print_error(error), error)


@contextlib.contextmanager
def flush_on_exit() -> Iterator[None]:
    """Flush standard output where an error can still be explained, and not as Python exits."""
    try:
        yield
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich makes it an exit with status 1
            raise stop.__context__ from None
        try:
            sys.stdout.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from error
        raise


def dispatch(verb: str, arguments: list[str]) -> int:
    """Runs one verb. Returns the exit status."""
    if verb not in VERBS:
        raise UsageError(f"verb {verb}: is not known; choose one of {', '.join(VERBS)}")
    options = itertools.takewhile(lambda each: each.startswith("-"), arguments)
    if not HELP_FLAGS.isdisjoint(options):
        print(verb_usage(verb))
        return 0
    from train.runtime.signals import PREEMPTED_EXIT_STATUS, PreemptedError, exit_on_stop_signal

    try:
        with exit_on_stop_signal() if verb == "fit" else contextlib.nullcontext():
            module = importlib.import_module(f"train.cli.{verb}")
            status: int = module.main(arguments)
    except PreemptedError as stop:
        print(stop, file=sys.stderr)
        return PREEMPTED_EXIT_STATUS
    return status


def exit_process(status: int, error: BaseException) -> NoReturn:
    """Ends the process; one of several, without waiting for the others."""
    if (
        "train.parallel.distributed" in sys.modules
    ):  # else there are none, and JAX need not be loaded
        from train.parallel.distributed import exit_process as leave_hosts

        leave_hosts(status, " ".join(str(error).split()) or type(error).__name__)
    sys.exit(status)


def print_error(error: BaseException) -> int:
    """One line on standard error. Returns the exit status."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    discard_output()
    if isinstance(error, BrokenPipeError):  # whoever read our output has seen enough
        return 0
    text = " ".join(str(error).split())
    if not isinstance(error, UserError):
        text = f"{text}; check the path, its permissions and the room on its disk"
    with contextlib.suppress(OSError):  # the exit status says so too
        print(f"error: {text}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1


def discard_output() -> None:
    """Flush standard output, and write what cannot be written to nowhere: Python tries at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def verb_usage(verb: str) -> str:
    """Return the text of `VERB --help`."""
    signature, what = VERBS[verb]
    lines = [f"usage: python -m train {verb} {signature}".rstrip(), "", what]
    if signature:
        name = signature.split()[0]
        lines.append(f"give {name} before --help to see its settings and their values")
    lines.append("--json prints one object on standard output")
    return "\n".join(lines)


def usage() -> str:
    """Return the text of `--help`."""
    width = max(len(verb) for verb in VERBS)
    lines = ["usage: python -m train VERB ...", "", "verbs:"]
    for verb, (signature, what) in VERBS.items():
        lines.append(f"  {verb:<{width}}  {what}")
        lines.append(f"  {'':<{width}}    python -m train {verb} {signature}".rstrip())
    lines += [
        "",
        "CONFIG is a file in configs/, with one of its experiments if it holds several (gpt2,",
        "gpt2:medium), or the path of a .py file. W is the folder of a run.",
        "python -m train VERB --help tells all of a verb's settings; --debug shows tracebacks;",
        "--json prints one object on standard output.",
    ]
    return "\n".join(lines)
