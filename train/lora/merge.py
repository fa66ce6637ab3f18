"""Merge a LoRA run: an ordinary run folder with W + s A B in place of each adapted matrix."""

import dataclasses

import jax

from train.checkpoint.manager import CheckpointManager
from train.checkpoint.provenance import PROVENANCE_KEY, collect_provenance
from train.engine import make_engine
from train.errors import UserError
from train.lora.config import LoRAConfig
from train.run import Run, for_local_devices, load
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import write_run_files

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
    experiment = dataclasses.replace(run.experiment, lora=LoRAConfig())
    engine = make_engine(for_local_devices(experiment), run.model.hardware)
    with CheckpointManager(run.folder.checkpoints, read_only=True) as checkpoints:
        corpus = checkpoints.read_metadata(run.step).get("corpus")
    metadata = {
        PROVENANCE_KEY: collect_provenance(experiment, run.tokenizer, run.labels),
        "corpus": corpus,
        "best": {},
    }
    state = engine.init().replace(params=run.params)
    if state.ema is not None:
        state = state.replace(
            ema=jax.tree.map(lambda e, p: p.astype(e.dtype), state.ema, run.params)
        )
    with CheckpointManager(folder.checkpoints, asynchronous=False) as checkpoints:
        if folder.config_json.exists() or checkpoints.steps():
            raise UserError(f"workdir {target}: holds a run already; give a new folder")
        checkpoints.save(_STEP, state, metadata)
    write_run_files(
        folder,
        experiment,
        run.tokenizer,
        run.labels,
        auto_choices=engine.auto_choices(),
        hardware=run.model.hardware,
    )
    return load(target)
