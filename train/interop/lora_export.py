"""Export of a LoRA run: its adapter in PEFT's format, its base weights, or both merged."""

import dataclasses
from pathlib import Path
from typing import Any

import jax

from train.assembly import make_engine
from train.checkpoint.manager import CheckpointManager
from train.config.resolve import resolve_auto
from train.engines.lora import LoRAConfig
from train.errors import UserError
from train.run import Run, for_local_devices, load
from train.run_folder.base_weights import load_base
from train.run_folder.folder import RunFolder
from train.run_folder.provenance import PROVENANCE_KEY, collect_provenance
from train.run_folder.run_config import read_experiment, write_run_files
from train.telemetry.event_log import EventLog
from train.warm_start.sources import copy_as, copy_pretrained_files
from transformer.interop.peft import write_adapter
from transformer.layers.low_rank import merge_weights


def export_adapter(run: Run, folder: Path, *, family: str = "", dtype: str = "") -> str:
    """Write the adapter of a LoRA run to an existing folder; return the `model_type` of its base.

    Args:
      run: The run, as `load` returns it by default.
      folder: Existing folder.
      family: `model_type` that modules are named after.
      dtype: Dtype of the file; default float32, that of the factors.

    Raises:
      InteropError: PEFT's format has no place for it.
    """
    # The run's choice of checkpoints, as for its merged weights: a step would mean that one alone.
    trainable = load(str(run.folder.path), merged=False).params
    engine = make_engine(run.experiment, run.model.hardware)
    assert engine.lora is not None
    written = write_adapter(
        folder, run.model, engine.lora, trainable, family=family, dtype=dtype or "float32"
    )
    card = (
        "---\nlibrary_name: peft\ntags:\n- lora\n- linen-transformer\n"
        "# base_model and license: its author has to name them\n---\n\n"
        f"# {run.experiment.name}\n\nA LoRA adapter of rank {engine.lora.rank} for a "
        f"`{written.model_type}` model, exported by linen-transformer at step {run.step}.\n"
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    return written.model_type


def base_params(run: Run) -> Any:
    """Return the weights that a LoRA run started from."""
    return load_base(run.folder, make_engine(run.experiment, run.model.hardware))


def check_is_lora(run: Run, weights: str) -> None:
    """Raise UserError for a run that has no adapter."""
    if not run.experiment.lora.rank:
        raise UserError(
            f"weights {weights}: {run.folder.path} was not trained with LoRA; leave it out"
        )


_STEP = 0


def merge_run(workdir: str, target: str, *, step: int | None = None) -> Run:
    """Write the merged weights of a LoRA run to a new run folder, at step 0.

    The new run has the same settings without LoRA, and a fresh optimizer: it can be sampled,
    evaluated, trained on, or start another run.

    Args:
      workdir: Folder of the LoRA run.
      target: Folder of the new run.
      step: Step of the checkpoint; default: the run's evaluation weights.

    Raises:
      UserError: The run was not trained with LoRA, or the new folder has a run.
    """
    run = load(workdir, step=step)
    if not run.experiment.lora.rank:
        raise UserError(f"workdir {workdir}: was not trained with LoRA; there is nothing to merge")
    folder = RunFolder.create(target)
    # Not those of `run`, which have the mesh and the accumulation of this machine.
    experiment = dataclasses.replace(read_experiment(run.folder), lora=LoRAConfig())
    engine = make_engine(for_local_devices(experiment), run.model.hardware)
    with CheckpointManager(run.folder.checkpoints) as checkpoints:
        corpus = checkpoints.read_metadata(run.step).get("corpus")
    metadata = {
        PROVENANCE_KEY: collect_provenance(experiment, run.tokenizer, run.labels),
        "corpus": corpus,
        "best": {},
    }
    params = merge_weights(run.params)
    state = engine.init(jax.tree.map(copy_as, params, engine.abstract_state().params))
    with CheckpointManager(folder.checkpoints, asynchronous=False) as checkpoints:
        if folder.config_json.exists() or checkpoints.steps():
            raise UserError(f"workdir {target}: holds a run already; give a new folder")
        checkpoints.save(_STEP, state, metadata)
    copy_pretrained_files(run.folder, folder)
    write_run_files(
        folder,
        experiment,
        run.tokenizer,
        run.labels,
        auto_choices=resolve_auto(for_local_devices(experiment), run.model.hardware),
        hardware=run.model.hardware,
    )
    EventLog(folder.event_log).write("saved", step=_STEP)
    return load(target)
