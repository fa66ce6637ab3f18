"""A run read from its folder, with the weights that it is judged by."""

from __future__ import annotations

import dataclasses
from typing import Any

from train.checkpoints import Checkpoints
from train.data import Tokenizer
from train.engines import make_engine
from train.experiment import Experiment
from train.hardware import local_hardware
from train.kernels import mark_broken_kernels
from train.labels import read_labels
from train.provenance import check_provenance
from train.run import Run, read_experiment
from train.runfolder import RunFolder
from train.served import serve
from train.sharding import MeshConfig
from train.tasks.vocabulary import check_vocab_size


def load(workdir: str, *, step: int | None = None, average_checkpoints: int | None = None) -> Run:
    """Reads a run, with the weights that it is judged by.

    Args:
      workdir: The run's folder.
      step: Which checkpoint. If not given: what the run's settings say, the newest unless they ask
        for the best one or for a mean.
      average: The mean of so many checkpoints, `step` or the newest and those before it.

    Raises:
      UserError: there is no run, no such checkpoint, or it does not fit the run's model.
    """
    folder = RunFolder.existing(workdir)
    hardware = local_hardware()
    saved = read_experiment(folder)
    experiment = for_local_devices(saved)
    tokenizer, labels = Tokenizer.load(folder.tokenizer), read_labels(folder)
    check_vocab_size(experiment, tokenizer, str(folder.tokenizer))
    engine = make_engine(experiment, mark_broken_kernels(experiment, hardware))
    verify = experiment.checkpoint.verify

    def check(step: int, extra: dict[str, Any]) -> None:
        check_provenance(extra, step, folder, saved, tokenizer, labels)

    with Checkpoints(folder.checkpoints, read_only=True, verify=verify) as checkpoints:
        params, steps = serve(
            checkpoints, engine, experiment, step=step, average=average_checkpoints, check=check
        )
    return Run(experiment, folder, engine.model, params, tokenizer, steps[-1], labels=labels)


def for_local_devices(experiment: Experiment) -> Experiment:
    """The experiment on whatever devices are here: a run is often looked at elsewhere."""
    model = experiment.model
    if model.remat == "offload":  # a CPU has no other memory, and nothing is differentiated here
        model = dataclasses.replace(model, remat="none")
    return dataclasses.replace(
        experiment,
        model=model,
        mesh=MeshConfig(),
        compile="jit",
        grad_accum_steps=1,
    )
