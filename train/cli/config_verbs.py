"""Verbs that take a CONFIG: `fit`, `describe`, `plan` and `data`; and `init`, which writes one."""

import dataclasses
import re
import sys
from typing import Annotated, Any, Literal, TypeVar

import tyro

from train.cli.main import HELP_FLAGS, VERBS
from train.cli.parsing import JsonArguments, given_flags, parse, print_json
from train.config.experiment_files import find_experiment, write_config
from train.config.resolve import resolve_precision
from train.data.data_config import SourceConfig, TextDataConfig
from train.errors import UsageError, as_usage_errors
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.describe import describe
from train.estimate.plan import PlanOptions, load_prices, make_plan, print_plan
from train.estimate.search import with_best_mesh
from train.estimate.target import local_target, parse_target
from train.experiment import Experiment
from train.fitting import fit
from train.parallel.distributed import initialize_distributed
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_experiment
from train.runtime.local_hardware import enable_compilation_cache, local_hardware
from train.runtime.startup import program_name
from train.tasks.translation import Translation
from train.telemetry.goodput import process_start_time
from train.visualization.data_summary import print_summary, summarize_data
from train.warm_start.word_vectors import is_word_vector_file
from transformer.precision import AUTO_POLICY
from transformer.validation import NonNegativeInt

Arguments = TypeVar("Arguments")
"""Type variable: the dataclass of a verb's arguments, which contains the experiment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigArguments(JsonArguments):
    """Base of the arguments of the verbs that take a CONFIG."""

    experiment: Experiment


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartArguments(ConfigArguments):
    """Base of the arguments of the verbs that train."""

    init_from: str = ""
    """Folder of a run whose weights and tokenizer a new run starts with, or a text file of word
    vectors (word2vec, GloVe, fastText) for its embeddings. Not read on resume."""
    init_only: str = ""
    """With --init-from: take only weights with these tree paths, such as layers or '*/mixer/*'."""
    init_adapter: str = ""
    """With --init-from: folder of a PEFT LoRA adapter to start with, which also sets --lora."""
    init_model: bool = False
    """Use the model of the --init-from run instead of CONFIG's, and the token that its decoder
    begins with. Other flags are applied to these."""
    quiet: bool = False
    """Print no progress."""


def parse_config_verb(
    verb: str, arguments: list[str], arguments_type: type[Arguments], extra_help: str = ""
) -> Arguments:
    """Parse CONFIG and the flags that change its experiment, a field of the arguments."""
    if not arguments or arguments[0].startswith("-"):
        usage = f"{program_name()} {verb} {VERBS[verb].arguments}"
        raise UsageError(f"{verb}: CONFIG is missing; write {usage}")
    name, *arguments = arguments
    flags = given_flags(arguments)
    with as_usage_errors():
        experiment = find_experiment(name)
        if "--init-model" in arguments:
            experiment = with_model_of(flags.get("init_from", ""), experiment)
        experiment = with_listed_sources(experiment, flags)
        quiet = not HELP_FLAGS.isdisjoint(arguments)
        experiment = with_own_data(experiment, flags, quiet=quiet)
    more = """--help shows the settings that many people change, --help-all all of them, --help PART
those of a part: --help optimizer, --help model.layer_pattern.0.mixer."""
    return parse(
        arguments_type,
        arguments,
        verb=f"{verb} {name}",
        experiment=experiment,
        extra_help=f"{extra_help}\n\n{more}".strip(),
    )


def with_model_of(source: str, experiment: Experiment) -> Experiment:
    """Return the experiment with the model of a run, whose weights it starts with."""
    if not source:
        raise UsageError("--init-model: needs --init-from W, whose model it takes; give both")
    if is_word_vector_file(source):
        raise UsageError(
            f"--init-model: {source} is a file of word vectors, which has no model; leave it out"
        )
    saved = read_experiment(RunFolder.open_existing(source, "init_from"))
    if isinstance(saved.task, Translation) and isinstance(experiment.task, Translation):
        task = dataclasses.replace(experiment.task, start_token=saved.task.start_token)
        experiment = dataclasses.replace(experiment, task=task)
    # The tokenizer decides the size: an import may have rows without a token.
    model = dataclasses.replace(saved.model, vocab_size=0)
    return dataclasses.replace(experiment, model=model)


def with_listed_sources(experiment: Experiment, flags: dict[str, str]) -> Experiment:
    """Return the experiment with as many `data.sources` as the flags `--data.sources.N...` name.

    The first sources of an experiment take the place of its path.
    """
    data = experiment.data
    matches = (re.match(r"data[.]sources[.](\d{1,3})[.]", each) for each in flags)
    count = max((int(each[1]) + 1 for each in matches if each), default=0)
    if not isinstance(data, TextDataConfig) or count <= len(data.sources):
        return experiment
    sources = (*data.sources, *[SourceConfig()] * (count - len(data.sources)))
    if not data.sources:
        data = dataclasses.replace(data, path="", validation_path="", test_path="")
    return dataclasses.replace(experiment, data=dataclasses.replace(data, sources=sources))


def with_own_data(experiment: Experiment, flags: dict[str, str], *, quiet: bool) -> Experiment:
    """Return the experiment without the held-out files of other data than `--data.path` names."""
    path, data = flags.get("data.path"), experiment.data
    if path in (None, data.path):
        return experiment
    names = {field.name for field in dataclasses.fields(data)} & {"validation_path", "test_path"}
    unused: dict[str, Any] = {
        name: getattr(data, name) for name in sorted(names) if f"data.{name}" not in flags
    }
    replaced = " and ".join(f"data.{name} {value}" for name, value in unused.items() if value)
    if replaced and path and not quiet:
        held_out = ", and validation is held out unless the path has files of that split"
        print(
            f"data.path {path}: replaces the config's data; {replaced} are not used"
            f"{held_out if 'validation_path' in unused else ''}",
            file=sys.stderr,
        )
    return dataclasses.replace(
        experiment, data=dataclasses.replace(data, **dict.fromkeys(unused, ""))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitArguments(StartArguments):
    """Train; a folder with checkpoints resumes exactly from the newest one."""

    workdir: str = ""
    """Folder of the run, local or remote; default: runs/NAME."""
    from_scratch: bool = False
    """Begin at step 0 if all checkpoints of the folder are damaged or gone, which is an error
    otherwise. A run with an intact checkpoint resumes."""
    mesh_choice: Annotated[Literal["given", "auto"], tyro.conf.arg(name="mesh")] = "given"
    """auto: the best mesh for the local devices, as `plan` finds it."""


def run_fit(arguments: list[str]) -> int:
    """Train an experiment; return the exit status."""
    options = parse_config_verb("fit", arguments, FitArguments)
    quiet = options.quiet or options.json
    initialize_distributed()
    experiment = options.experiment
    if options.mesh_choice == "auto":
        experiment, candidate = with_best_mesh(experiment, local_target())
        if not options.quiet:
            print(f"mesh auto: {candidate.mesh_text()}; {candidate.flags()}", file=sys.stderr)
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
    if options.json:
        print_json({"workdir": str(run.folder.path), "step": run.step, **run.final_metrics})
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribeArguments(ConfigArguments):
    """Show parameters, FLOPs and memory of an experiment, before training."""

    ask_compiler: bool = False
    """Compile the step, and show the memory that the compiler reserves."""


def run_describe(arguments: list[str]) -> int:
    """Print a description of an experiment; return the exit status."""
    options = parse_config_verb("describe", arguments, DescribeArguments)
    experiment = options.experiment
    # Only these two depend on the devices. Asking for devices starts a backend, which may take
    # seconds, or wait for a chip that another process uses.
    if options.ask_compiler or experiment.model.precision == AUTO_POLICY:
        enable_compilation_cache()
        hardware = local_hardware()
        experiment = resolve_precision(experiment, hardware)
        description = describe(experiment, hardware, with_compiler=options.ask_compiler)
    else:
        description = describe(experiment)
    if options.json:
        print_json(description.as_dict())
    else:
        description.print()
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanArguments(PlanOptions, ConfigArguments):
    """Estimate whether a training step fits some hardware, how fast it is and what it costs."""

    target: str = "here"
    """A TPU slice (v4, v5e, v5p, v6e or tpu7x with its chips: v5e:4x4, v5p:8x8x16), a number of
    GPUs (t4, l4, a100, a100-80gb, h100, h200, b200, b300, gb200, gb300: h200:8), or here: the local
    devices. A --mesh flag turns the search off."""


def run_plan(arguments: list[str]) -> int:
    """Print a plan of an experiment; return the exit status."""
    options = parse_config_verb("plan", arguments, PlanArguments)
    if any(flag.startswith("mesh.") for flag in given_flags(arguments)):
        options = dataclasses.replace(options, search=False)
    load_prices(options.prices)  # before the devices are measured, and all else that takes a while
    target = parse_target(options.target)
    experiment, notes = resolve_sizes(options.experiment)
    plan = make_plan(experiment, target, options, notes)
    if options.json:
        print_json(plan.as_dict())
    else:
        print_plan(plan)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class InitArguments(JsonArguments):
    """Write a commented config of your own, a language model on text, to change and to train."""

    file: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Name of the file, ending with .py."""

    data: str = ""
    """File, folder or pattern of text; default: the text that ships with Python."""


def run_init(arguments: list[str]) -> int:
    """Write a config file; return the exit status."""
    options = parse(InitArguments, arguments, verb="init")
    write_config(options.file, options.data)
    text = f"wrote {options.file}; read it, then {program_name()} fit {options.file}"
    options.show({"file": options.file}, text)
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataArguments(ConfigArguments):
    """Show a config's data as the model reads them: sizes, lengths, and what the loss counts."""

    examples: NonNegativeInt = 3
    """Training examples to show."""


DATA_HELP = """Splits are read, and tokenizers trained, as `fit` does it. In the examples, text in
[[double brackets]] has no part in the loss; where only few tokens have one, each is followed by
its target."""
"""Help text of `data`."""


def run_data(arguments: list[str]) -> int:
    """Print a summary of a config's data; return the exit status."""
    options = parse_config_verb("data", arguments, DataArguments, DATA_HELP)
    summary = summarize_data(options.experiment, options.examples)
    if options.json:
        print_json(summary)
    else:
        print_summary(summary)
    return 0
