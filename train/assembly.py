"""Assembly of the parts of an experiment: its task, and the compiled step for some devices."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from train.data.arrays import ArrayDataConfig
from train.data.held_data import PythonData
from train.data.python_data import hold_data
from train.engines.compiled_step import EngineConfig
from train.engines.engine import Engine
from train.errors import UserError, as_usage_errors
from train.experiment import Experiment
from train.parallel.context_parallel import check_context_parallelism
from train.parallel.mesh import make_mesh
from train.runtime.backend_probes import mark_broken_kernels
from train.tasks.array_task import ArrayTask
from train.tasks.registry import TASKS
from train.tasks.task import Task, TrainingOptions
from transformer.hardware import Hardware


def make_task(experiment: Experiment) -> Task:
    """Return the task that an experiment trains."""
    entry = TASKS[type(experiment.task).__name__]
    return entry.make(experiment.task, experiment.model, experiment.data)


def training_options(experiment: Experiment) -> TrainingOptions:
    """Return what the training batches of an experiment depend on, beside the data."""
    return TrainingOptions(experiment.batch_size, experiment.seed, experiment.steps)


def engine_config(experiment: Experiment) -> EngineConfig:
    """Return the settings of an experiment's engine."""
    return EngineConfig(
        optimizer=experiment.optimizer,
        schedule=experiment.schedule,
        steps=experiment.steps,
        grad_accum_steps=experiment.grad_accum_steps,
        loss_scale=experiment.loss_scale,
        ema=experiment.ema,
        recovery=experiment.recovery,
        lora=experiment.lora,
        mesh=experiment.mesh,
        seed=experiment.seed,
        debug_checks=experiment.debug_checks,
        compile=experiment.compile,
    )


def make_engine(experiment: Experiment, hardware: Hardware) -> Engine:
    """Return the engine of an experiment over the first `hardware.count` devices.

    Raises:
      UsageError: The mesh or the model cannot be built.
    """
    mesh = make_mesh(experiment.mesh, jax.devices()[: hardware.count])
    with as_usage_errors():
        return make_engine_on(mesh, experiment, hardware)


def make_engine_on(mesh: Mesh, experiment: Experiment, hardware: Hardware) -> Engine:
    """Return the engine of an experiment over a mesh, whose devices may not be here.

    Raises:
      UsageError: The batches or the optimizer cannot be placed on the mesh.
      ValueError: The model cannot be built.
    """
    # First of all: what this check refuses would otherwise fail deep inside a trace.
    check_context_parallelism(experiment.model, experiment.data, mesh, hardware)
    task = make_task(experiment)
    return Engine(engine_config(experiment), mesh, hardware, task.make_model, task.make_loss_fn)


def with_broken_kernels(hardware: Hardware, experiment: Experiment) -> Hardware:
    """Return the hardware with the attention kernels marked that cannot be compiled here."""
    return mark_broken_kernels(
        experiment.model,
        experiment.sequence_length,
        hardware,
        segments=experiment.has_segments,
        on_mesh=experiment.compile == "jit" and hardware.count > 1,
    )


def with_task(experiment: Experiment, task: Task) -> Experiment:
    """Return the experiment with the settings of a task that its data have completed."""
    return dataclasses.replace(experiment, task=task.config, model=task.model_config)


def with_python_data(
    experiment: Experiment, data: Any, validation_data: Any = None
) -> tuple[Experiment, PythonData]:
    """Return the experiment with `data.path` naming data given from Python, and the data.

    The data can be read while the second value is alive. See `train.fit` for their form.

    Raises:
      UserError: The data are empty, or are not examples of the task.
    """
    task = make_task(experiment)
    if isinstance(experiment.data, ArrayDataConfig) and not isinstance(task, ArrayTask):
        raise UserError(
            f"data: the task {type(experiment.task).__name__} reads its own; derive its class from "
            "ArrayTask to give it arrays"
        )
    config, held = hold_data(experiment.data, data, validation_data)
    return dataclasses.replace(experiment, data=config), held
