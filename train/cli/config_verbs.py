"""Verbs that take a CONFIG: `fit`, `describe` and `plan`.

What computes is imported inside the verbs, so that `CONFIG --help` loads no JAX.
"""

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import tyro

from train.cli.parsing import (
    as_usage_errors,
    kinds_help,
    parse,
    pop_flag,
    pop_json_flag,
    pop_positional,
    print_json,
    select_kinds,
)
from train.config.experiment_files import find_experiment
from train.config.resolve import resolve_precision
from train.data.data_config import SourceConfig, TextDataConfig
from train.errors import UsageError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.describe import describe
from train.estimate.plan import PlanOptions, load_prices, make_plan, print_plan
from train.estimate.search import with_best_mesh
from train.estimate.target import local_target, parse_target
from train.experiment import Experiment
from train.runtime.local_hardware import enable_compilation_cache, local_hardware
from transformer.precision import AUTO_POLICY

ASK_COMPILER_HELP = (
    "--ask-compiler also compiles the step and shows the memory that the compiler reserves."
)
"""Help text of `--ask-compiler`."""


MESH_AUTO_HELP = "--mesh auto uses the best mesh for the local devices, as `plan` finds it."
"""Help text of `--mesh auto`."""

INIT_MODEL_HELP = """--init-model uses the model of the --init-from run instead of CONFIG's,
and the token that its decoder begins with. Other flags are applied to these."""
"""Help text of `--init-model`."""

TARGET_HELP = """TARGET is a TPU slice (v4, v5e, v5p, v6e or tpu7x with its chips: v5e:4x4,
v5p:8x8x16), a number of GPUs (t4, l4, a100, a100-80gb, h100, h200, b200, b300, gb200, gb300:
h200:8), or here: the local devices. A --mesh flag turns the search off."""
"""Help text of targets and meshes."""

Arguments = TypeVar("Arguments")
"""Type variable: the dataclass of a verb's arguments, which contains the experiment."""


def parse_config_verb(
    verb: str,
    arguments: list[str],
    with_defaults: Callable[[Experiment], Arguments],
    extra_help: str = "",
    change: Callable[[Experiment], Experiment] = lambda experiment: experiment,
) -> Arguments:
    """Remove CONFIG from the arguments and parse the others.

    Args:
      verb: The verb.
      arguments: Its arguments, without the flags already taken.
      with_defaults: Builds the verb's default arguments from the experiment of CONFIG.
      extra_help: Text that `--help` shows before the kinds of the experiment's parts.
      change: Changes the experiment of CONFIG before the other flags apply to it.
    """
    name = pop_positional(arguments, "CONFIG", verb)
    with as_usage_errors():
        experiment = with_listed_sources(change(find_experiment(name)), arguments)
        experiment, left = select_kinds(experiment, arguments)
        default = with_defaults(with_own_data(experiment, left))
        more = f"{extra_help}\n\n{kinds_help(experiment)}".strip()
        return parse(type(default), left, verb=f"{verb} {name}", default=default, extra_help=more)


def with_listed_sources(experiment: Experiment, arguments: list[str]) -> Experiment:
    """Return the experiment with as many `data.sources` as the flags `--data.sources.N...` name.

    tyro parses the fields of existing sources only. The first sources of an experiment take
    the place of its path.
    """
    data = experiment.data
    matches = (re.match(r"--data[.]sources[.](\d{1,3})[.]", each) for each in arguments)
    count = max((int(each[1]) + 1 for each in matches if each), default=0)
    if not isinstance(data, TextDataConfig) or count <= len(data.sources):
        return experiment
    sources = (*data.sources, *[SourceConfig()] * (count - len(data.sources)))
    if not data.sources:
        data = dataclasses.replace(data, path="", validation_path="", test_path="")
    return dataclasses.replace(experiment, data=dataclasses.replace(data, sources=sources))


def with_own_data(experiment: Experiment, arguments: list[str]) -> Experiment:
    """Return the experiment without the held-out files of other data than `--data.path` names."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("path", "validation_path", "test_path"):
        flags = f"--data.{name}", f"--data.{name.replace('_', '-')}"
        parser.add_argument(*flags, dest=name, nargs="?")  # tyro says that a path is missing
    given = parser.parse_known_args(arguments)[0]
    if given.path in (None, experiment.data.path):
        return experiment
    unused: dict[str, Any] = {
        field.name: getattr(experiment.data, field.name)
        for field in dataclasses.fields(experiment.data)
        if getattr(given, field.name, "not a path") is None
    }
    names = " and ".join(f"data.{name} {path}" for name, path in unused.items() if path)
    if names and given.path and not {"-h", "--help"} & {*arguments}:
        held_out = ", and validation is held out unless the path has files of that split"
        print(
            f"data.path {given.path}: replaces the config's data; {names} are not used"
            f"{held_out if given.validation_path is None else ''}",
            file=sys.stderr,
        )
    data = dataclasses.replace(experiment.data, **dict.fromkeys(unused, ""))
    return dataclasses.replace(experiment, data=data)


@dataclasses.dataclass(frozen=True)
class FitArguments:
    """Train; a folder with checkpoints resumes exactly from the newest one."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    workdir: str = ""
    """Folder of the run, local or remote; default: runs/NAME."""
    init_from: str = ""
    """Folder of a run whose weights and tokenizer this run starts with, or a text file of word
    vectors (word2vec, GloVe, fastText) for its embeddings. Not read on resume."""
    init_only: str = ""
    """With --init-from: take only weights with these tree paths, such as layers or '*/mixer/*'."""
    init_adapter: str = ""
    """With --init-from: folder of a PEFT LoRA adapter to start with, which also sets --lora."""
    from_scratch: bool = False
    """Begin at step 0 if all checkpoints of the folder are damaged or gone, which is an error
    otherwise. A run with an intact checkpoint resumes."""
    quiet: bool = False
    """Print no progress."""


def run_fit(arguments: list[str]) -> int:
    """Train an experiment; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    mesh_auto = pop_flag(arguments, "--mesh=auto") or _pop_mesh_auto(arguments)
    change = pop_init_model(arguments)
    help_text = f"{MESH_AUTO_HELP}\n\n{INIT_MODEL_HELP}"
    options = parse_config_verb("fit", arguments, FitArguments, help_text, change)
    from train.loop import fit
    from train.parallel.distributed import explain_lost_peers, initialize_distributed
    from train.telemetry.goodput import process_start_time

    initialize_distributed()
    experiment = _with_best_mesh(options) if mesh_auto else options.experiment
    with explain_lost_peers():
        quiet = options.quiet or json_wanted
        run = fit(
            experiment,
            options.workdir,
            init_from=options.init_from,
            init_only=options.init_only,
            init_adapter=options.init_adapter,
            from_scratch=options.from_scratch,
            quiet=quiet,
            start_time=process_start_time(),
        )
    if json_wanted:
        print_json({"workdir": str(run.folder.path), "step": run.step, **run.final_metrics})
    return 0


def pop_init_model(arguments: list[str]) -> Callable[[Experiment], Experiment]:
    """Remove `--init-model` from the arguments; return a change of the experiment that obeys it."""
    if not pop_flag(arguments, "--init-model"):
        return lambda experiment: experiment
    pairs = [
        *itertools.pairwise(arguments),
        *(each.split("=", 1) for each in arguments if "=" in each),
    ]
    sources = [value for flag, value in pairs if flag.replace("_", "-") == "--init-from"]
    if not sources:
        raise UsageError("--init-model: needs --init-from W, whose model it takes; give both")

    def change(experiment: Experiment) -> Experiment:
        from train.run import read_experiment
        from train.run_folder.folder import RunFolder
        from train.tasks.task_configs import Translation
        from train.word_vectors import is_word_vector_file

        if is_word_vector_file(sources[0]):
            raise UsageError(
                f"--init-model: {sources[0]} is a file of word vectors, which has no model; leave "
                "it out"
            )
        source = read_experiment(RunFolder.open_existing(sources[0], "init_from"))
        if isinstance(source.task, Translation) and isinstance(experiment.task, Translation):
            task = dataclasses.replace(experiment.task, start_token=source.task.start_token)
            experiment = dataclasses.replace(experiment, task=task)
        # The tokenizer decides the size: an import may have rows without a token.
        model = dataclasses.replace(source.model, vocab_size=0)
        return dataclasses.replace(experiment, model=model)

    return change


def _pop_mesh_auto(arguments: list[str]) -> bool:
    """Remove `--mesh auto` from the arguments; return True if it was given."""
    # `mesh` is a group of flags and takes no value: tyro would reject `--mesh auto`.
    for index, pair in enumerate(itertools.pairwise(arguments)):
        if pair == ("--mesh", "auto"):
            del arguments[index : index + 2]
            return True
    return False


def _with_best_mesh(options: FitArguments) -> Experiment:
    """Return the experiment on the best mesh for the local devices."""
    experiment, candidate = with_best_mesh(options.experiment, local_target())
    if not options.quiet:
        print(f"mesh auto: {candidate.mesh_text()}; {candidate.flags()}", file=sys.stderr)
    return experiment


def run_describe(arguments: list[str]) -> int:
    """Print a description of an experiment; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    with_compiler = pop_flag(arguments, "--ask-compiler")
    experiment = parse_config_verb(
        "describe", arguments, lambda experiment: experiment, ASK_COMPILER_HELP
    )
    # Only these two depend on the devices. Asking for devices starts a backend, which may take
    # seconds, or wait for a chip that another process uses.
    if with_compiler or experiment.model.precision == AUTO_POLICY:
        enable_compilation_cache()
        hardware = local_hardware()
        experiment = resolve_precision(experiment, hardware)
        description = describe(experiment, hardware, with_compiler=with_compiler)
    else:
        description = describe(experiment)
    if json_wanted:
        print_json(description.as_dict())
    else:
        description.print()
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments(PlanOptions):
    """Estimate whether a training step fits some hardware, how fast it is and what it costs."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    target: str = "here"
    """Hardware to plan for."""


def run_plan(arguments: list[str]) -> int:
    """Print a plan of an experiment; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    options = parse_config_verb(
        "plan", arguments, lambda experiment: PlanArguments(experiment=experiment), TARGET_HELP
    )
    if any(argument.startswith("--mesh.") for argument in arguments):
        options = dataclasses.replace(options, search=False)
    load_prices(options.prices)  # before the devices are measured, and all else that takes a while
    target = parse_target(options.target)
    experiment, notes = resolve_sizes(options.experiment)
    plan = make_plan(experiment, target, options, notes)
    if json_wanted:
        print_json(plan.as_dict())
    else:
        print_plan(plan)
    return 0
