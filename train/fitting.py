"""Entry of training: `fit` trains a run from step 0, or resumes it from its newest checkpoint.

1. `RunSetup` (`train/run_setup.py`) reads the folder, the data and the settings, and checks that
   they fit together. It writes nothing: a run that cannot start leaves its folder as it was.
2. `TrainingLoop` (`train/loop.py`) trains.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax

from train.assembly import with_python_data
from train.config.experiment_files import find_experiment
from train.config.resolve import resolve_precision
from train.errors import UserError
from train.estimate.remedies import check_minimum_memory, suggest_remedies
from train.experiment import Experiment
from train.loop import TrainingLoop
from train.run import Run
from train.run_folder.folder import RunFolder
from train.run_folder.lock import lock_run_folder
from train.run_setup import RunSetup
from train.runtime.local_hardware import enable_compilation_cache, local_hardware
from train.runtime.oom import explain_oom
from train.runtime.progress import ProgressBar
from train.runtime.stages import show_stages
from train.telemetry.goodput import ActivityTimer
from train.warm_start.sources import WarmStartSource


def fit(
    experiment: Experiment | str,
    workdir: str | os.PathLike[str] = "",
    *,
    data: Any = None,
    validation_data: Any = None,
    params: Mapping[str, Any] | None = None,
    init_from: str | os.PathLike[str] = "",
    init_only: str = "",
    init_adapter: str = "",
    from_scratch: bool = False,
    quiet: bool = False,
    start_time: float | None = None,
) -> Run:
    """Train an experiment. In a folder with checkpoints, resume from the newest, bit for bit.

    Args:
      experiment: What to train: settings, or the name of a config, as `python -m train fit` takes
        it.
      workdir: Folder of the run, local or remote. `runs/<name>` if empty.
      data: Training examples from Python, in place of `experiment.data.path`: strings or arrays of
        token ids for (masked) language modeling, (text, label) pairs for classification, (tokens,
        tags) for tagging, (source, target) for translation; for a task of arrays (`ArrayTask`), a
        dict of arrays by name, with a row for each example. Or a dict of those by split: `train`,
        `validation`, `test`. A run of them resumes with the same data only.
      validation_data: Validation examples. By default some of `data` are held out, as the data
        settings say (`validation_fraction`).
      params: Weights to start with, as nested dicts of arrays, for example `run.params`: all of the
        model or some. The others are initialized from the seed. Ignored when the run resumes.
      init_from: Folder of a run to start with the weights of, as `train.load` reads them. Its
        tokenizer is used too, unless the experiment names one (kind `file` or `byte`). Vocabulary
        tables get the rows of the tokens that both have. Or a file of word vectors (of word2vec,
        GloVe or fastText), with which the embeddings begin. Not read when the run resumes.
      init_only: Pattern of the weights to start with, by tree path: `layers`, `*/mixer/*`.
      init_adapter: Folder of a LoRA adapter in PEFT's format to start with, for the weights of
        `init_from`. It gives `lora.rank`, `lora.alpha` and `lora.targets`.
      from_scratch: Begin at step 0 where a run has lost all its checkpoints, which is an error
        otherwise. A run with an intact checkpoint is resumed all the same.
      quiet: Print nothing.
      start_time: Start of the program, in seconds since the epoch; the time since then counts as
        start-up in the goodput report. Now if None.

    Returns:
      The run, with its final weights and metrics.

    Raises:
      UserError: something the user can correct, for example another process that trains in this
        folder. Files written before are kept.
      PreemptedError: the process was told to stop, and has saved a checkpoint.
    """
    timer, hardware = ActivityTimer(start_time), local_hardware()
    if isinstance(experiment, str):
        experiment = find_experiment(experiment)
    held = None
    if data is not None:
        experiment, held = with_python_data(experiment, data, validation_data)
    elif validation_data is not None:
        raise UserError("validation_data: data is not given; give the training examples as data")
    enable_compilation_cache()
    with (
        RunFolder.created(workdir or f"runs/{experiment.name}") as folder,
        show_stages(quiet=quiet or jax.process_index() != 0),
        lock_run_folder(folder, ProgressBar(1, quiet=quiet).print) as lock,
        explain_oom(lambda: suggest_remedies(resolve_precision(experiment, hardware))),
    ):
        warm_start = WarmStartSource(params, os.fspath(init_from), init_only, init_adapter)
        setup = RunSetup(experiment, folder, hardware, warm_start, from_scratch=from_scratch)
        check_minimum_memory(setup.engine, setup.experiment)
        run = TrainingLoop(setup, timer, lock, quiet).run()
    return dataclasses.replace(run, data=held)
