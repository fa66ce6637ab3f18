"""The command line `python -m train VERB ...`: dispatch, errors and exit statuses.

A verb's module is imported when the verb runs: `--help`, `configs`, `completion` and the refusal of
an unknown verb answer at once, without JAX.
"""

import contextlib
import importlib.metadata
import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from train.config.shipped import did_you_mean
from train.errors import UsageError, UserError, printable
from train.runtime.startup import SCRIPT, program_name


class Verb(NamedTuple):
    """One verb of the command line."""

    arguments: str
    summary: str
    module: str
    """Module in `train.cli` whose function `run_VERB` runs it, with _ for -."""


VERBS = {
    "fit": Verb(
        "CONFIG [--workdir W] [--a.b.c VALUE ...]",
        "train; resumes where a run stopped",
        "config_verbs",
    ),
    "evaluate": Verb("W [--split S]", "metrics of a run on held-out data", "run_verbs"),
    "sample": Verb(
        "W --prompt TEXT ... | W --chat",
        "generate, translate, classify, tag or chat with a run's model",
        "generation_verbs",
    ),
    "score": Verb(
        "W --text TEXT ... [--context C]",
        "log-likelihoods of texts, alone or after a context",
        "generation_verbs",
    ),
    "embed": Verb(
        "W --text TEXT ... | --input FILE [--output FILE.npy]",
        "vectors of texts, for search and comparison",
        "generation_verbs",
    ),
    "serve": Verb(
        "W [--port N]",
        "answer an OpenAI-compatible HTTP API with a run's language model",
        "generation_verbs",
    ),
    "attention": Verb(
        "W --text TEXT [--target TEXT] --output FILE.html",
        "an interactive page of every attention head over a text, or a figure (.png)",
        "run_verbs",
    ),
    "report": Verb(
        "W [W2 ...] --output FILE.html",
        "one page of a run, or of several compared: curves, events, samples, time, settings",
        "run_verbs",
    ),
    "merge": Verb(
        "W --workdir W2",
        "write the merged weights of a LoRA run as an ordinary run",
        "interop_verbs",
    ),
    "reference": Verb(
        "W --pairs FILE --output FILE",
        "add a run's log-likelihoods to pairs of answers, for DPO of all weights",
        "interop_verbs",
    ),
    "goodput": Verb("W", "how a run's time was spent, over all its processes", "run_verbs"),
    "describe": Verb(
        "CONFIG [--a.b.c VALUE ...]",
        "parameters, FLOPs and memory, before training",
        "config_verbs",
    ),
    "plan": Verb(
        "CONFIG --target T [--a.b.c VALUE ...]",
        "memory, time and cost on any hardware, and the best mesh",
        "config_verbs",
    ),
    "sweep": Verb(
        "CONFIG --set FIELD=A,B [--seeds N] [--workdir DIR] [--a.b.c VALUE ...]",
        "train a grid of settings, one table and one figure; resumable",
        "sweep_verbs",
    ),
    "scaling": Verb(
        "CONFIG --sizes N,... --tokens D,... [--budget FLOPS] [--workdir DIR], or --from-csv FILE",
        "a sweep over model and data sizes, scaling laws, the compute-optimal model of a budget",
        "sweep_verbs",
    ),
    "import": Verb(
        "SOURCE --workdir W [--data PATH] [--precision P] [--adapter DIR]",
        "make a run of a Hugging Face model: a local folder, or a name on the hub",
        "interop_verbs",
    ),
    "export": Verb(
        "W --output DIR [--dtype D] [--family F] [--weights merged|adapter|base]",
        "write a run as a folder that Hugging Face transformers opens",
        "interop_verbs",
    ),
    "lm-eval": Verb(
        "W --tasks T,... [any option of lm-eval run]",
        "evaluate a run on tasks of EleutherAI's lm-evaluation-harness",
        "interop_verbs",
    ),
    "data": Verb(
        "CONFIG [--examples N] [--a.b.c VALUE ...]",
        "documents, tokens and lengths of a config's data, and what the loss counts",
        "config_verbs",
    ),
    "configs": Verb("", "list the shipped configs, a line each", "listing_verbs"),
    "init": Verb(
        "FILE [--data PATH]",
        "write a commented config of your own, which fit FILE trains",
        "config_verbs",
    ),
    "completion": Verb(
        "SHELL", "print a script that completes verbs in bash or zsh", "listing_verbs"
    ),
    "doctor": Verb(
        "", "this machine's hardware and versions, and problems with them", "listing_verbs"
    ),
}
"""All verbs, in the order of the help text."""


MODEL_VERBS = frozenset(
    {"fit", "evaluate", "sample", "score", "embed", "serve", "attention", "lm-eval"}
)
"""Verbs that run a model, for which Python may restart with huge pages."""


PLUGIN_VERBS = frozenset(VERBS) - {"goodput", "report", "configs", "init", "completion", "doctor"}
"""Verbs that read experiments, which may need code of the user: they accept `--import`."""


OWN_HELP_VERBS = frozenset(
    verb
    for verb, each in VERBS.items()
    if each.arguments.startswith("CONFIG") or each.module == "listing_verbs"
)
"""Verbs whose help is not tyro's: settings are those of a CONFIG, and the others load no JAX."""

HELP_FLAGS = frozenset({"-h", "--help"})
"""Flags that print help."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a verb and exit: 0 success, 1 error, 2 usage error, 75 preempted after a checkpoint.

    130: interrupted.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [each for each in arguments if each != "--debug"]
    try:
        status = run(arguments)
        sys.stdout.flush()  # a failed write is reported like other errors
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 (shown with its traceback)
        known = isinstance(error, (UserError, KeyboardInterrupt, OSError)) or is_mixer_error(error)
        if debug or not known:
            traceback.print_exc()
        exit_process(print_error(error) if known else 1)
    sys.exit(status)


def run(arguments: list[str]) -> int | str | None:
    """Run what the arguments say and return the exit status."""
    if arguments == ["--version"]:
        print(version())
        return 0
    if arguments[:1] == ["help"]:  # `help VERB` is `VERB --help`
        arguments = [*arguments[1:2], "--help"]
    if not arguments or arguments[0] in HELP_FLAGS:
        print(usage())
        return 0 if arguments else 2
    try:
        return dispatch(arguments[0], arguments[1:])
    except SystemExit as stop:  # of tyro, which has shown help or refused an argument
        if isinstance(stop.__context__, BrokenPipeError):  # rich makes it an exit with status 1
            raise stop.__context__ from None
        return stop.code


def is_mixer_error(error: BaseException) -> bool:
    """Return True for an error of a mixer's own code, without loading JAX to know its class."""
    mixer = sys.modules.get("transformer.attention.mixer")
    return mixer is not None and isinstance(error, mixer.MixerError)


def dispatch(verb: str, arguments: list[str]) -> int:
    """Run one verb and return the exit status."""
    if verb not in VERBS:
        raise UsageError(
            f"verb {verb}: is not known{did_you_mean(verb, VERBS)}; "
            f"choose one of {', '.join(VERBS)}"
        )
    modules = pop_imports(arguments) if verb in PLUGIN_VERBS else []
    options = itertools.takewhile(lambda each: each.startswith("-"), arguments)
    if verb in OWN_HELP_VERBS and not HELP_FLAGS.isdisjoint(options):
        print(verb_usage(verb))
        return 0
    from train.runtime.signals import PREEMPTED_EXIT_STATUS, PreemptedError, exit_on_stop_signal
    from train.runtime.stages import show_stages

    # `fit` opens a display of its own, since notebooks call it too.
    quiet = verb == "fit" or not {"--json", "--quiet"}.isdisjoint(arguments)
    stops = exit_on_stop_signal() if verb == "fit" else contextlib.nullcontext()
    try:
        with stops, show_stages(quiet=quiet):
            if verb in PLUGIN_VERBS:
                from train.config.plugins import import_installed_plugins, import_modules

                import_installed_plugins()
                import_modules(modules, "--import")
            module = importlib.import_module(f"train.cli.{VERBS[verb].module}")
            status: int = getattr(module, f"run_{verb.replace('-', '_')}")(arguments)
    except PreemptedError as stop:
        print(printable(str(stop)), file=sys.stderr)
        return PREEMPTED_EXIT_STATUS
    return status


def pop_imports(arguments: list[str]) -> list[str]:
    """Remove every `--import NAME` from the arguments, and return the names in order."""
    names, left = [], iter(arguments[:])
    arguments.clear()
    for each in left:
        name = each.removeprefix("--import=")
        if each == "--import":
            name = next(left, "")
        elif name == each:
            arguments.append(each)
            continue
        if not name or name.startswith("-"):
            raise UsageError("--import: names no module; give mypackage.module or a .py file")
        names.append(name)
    return names


def exit_process(status: int) -> NoReturn:
    """End the process. One of several processes ends without waiting for the others."""
    # Without this module there is one process, and JAX need not be loaded.
    if "train.parallel.distributed" in sys.modules:
        from train.parallel.distributed import exit_process as leave_hosts

        leave_hosts(status)
    sys.exit(status)


def print_error(error: BaseException) -> int:
    """Print an error as one line on standard error and return the exit status."""
    if isinstance(error, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130
    discard_output()
    if isinstance(error, BrokenPipeError):  # the reader, such as `head`, closed the pipe
        return 0
    text = " ".join(str(error).split())
    if isinstance(error, OSError):
        text = f"{text}; check the path, its permissions and the free disk space"
    with contextlib.suppress(OSError):  # the exit status reports it too
        print(f"error: {printable(text)}", file=sys.stderr)
    return 2 if isinstance(error, UsageError) else 1


def discard_output() -> None:
    """Flush standard output; if that fails, redirect it to /dev/null: Python flushes at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def version() -> str:
    """Return the text of `--version`."""
    try:
        return f"{SCRIPT} {importlib.metadata.version(SCRIPT)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{SCRIPT}, not installed: started in its source tree"


def verb_usage(verb: str) -> str:
    """Return the help of one of `OWN_HELP_VERBS`, without a CONFIG."""
    signature, summary, _ = VERBS[verb]
    lines = [f"usage: {program_name()} {verb} {signature}".rstrip(), "", summary]
    if signature.startswith("CONFIG"):
        lines += [
            "",
            "Every config has --steps, --batch-size, --seed, --data.path, --log-every and",
            "--checkpoint.every; the learning rate is --schedule.learning-rate.",
            f"{program_name()} {verb} CONFIG --help shows the settings that many people change,",
            "--help-all all of them, and --help PART those of a part, such as --help optimizer.",
            f"{program_name()} configs lists what to give for CONFIG.",
            "--json prints one object on standard output.",
        ]
    return "\n".join(lines)


def usage() -> str:
    """Return the text of `--help`."""
    width = max(len(verb) for verb in VERBS)
    lines = [f"usage: {program_name()} VERB ...", "", "verbs:"]
    for verb, (signature, summary, _) in VERBS.items():
        lines.append(f"  {verb:<{width}}  {summary}")
        lines.append(f"  {'':<{width}}    {program_name()} {verb} {signature}".rstrip())
    lines += [
        "",
        "CONFIG is a file in configs/, with one of its experiments if it holds several (gpt2,",
        "gpt2:medium), or the path of a .py file. W is the folder of a run.",
        f"{program_name()} VERB --help (or help VERB) lists a verb's settings; --version prints",
        "the version, --debug tracebacks, --json one object on standard output. --import",
        "mypackage.module (or file.py) imports code of your own first. linen-transformer VERB ...",
        "is the installed command.",
    ]
    return "\n".join(lines)
