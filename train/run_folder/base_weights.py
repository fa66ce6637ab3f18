"""Base weights of a LoRA run: written once to `base/` in its folder, when the run starts.

The run's checkpoints hold the adapter alone. `base/` makes the folder self-contained: it can be
evaluated, resumed and merged without the run that the weights came from. Each checkpoint records
the digest of the base that it was trained on.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax

from train.checkpoint.manager import CheckpointManager, broadcast_integers
from train.checkpoint.manifest import manifest_path
from train.engines.engine import Engine
from train.errors import UserError
from train.run_folder.folder import RunFolder

BASE_KEY = "base"
"""Key of the digest in a checkpoint's metadata."""

_STEP = 0
"""Step under which the base is saved, as a checkpoint of `params` and `trainable`."""

_START = "trainable"


def load_start(folder: RunFolder, trainable: Any) -> Any:
    """Return the trainable tree before the first step, placed as the given one."""
    with CheckpointManager(folder.base_weights) as checkpoints:
        return checkpoints.restore_subtree(_STEP, _START, jax.tree.map(_abstract, trainable))


def load_base(folder: RunFolder, engine: Engine) -> Any:
    """Return all base weights of a run, placed as the engine places parameters.

    Raises:
      UserError: They are missing or damaged.
    """
    with CheckpointManager(folder.base_weights) as checkpoints:
        if not checkpoints.steps():
            raise UserError(
                f"{folder.base_weights}: holds no base weights of this LoRA run; restore what fit "
                "saved"
            )
        shapes = engine.shapes_as_stored(checkpoints.read_shapes(_STEP, "params"))
        return checkpoints.restore_subtree(_STEP, "params", shapes)


def attach_base(
    engine: Engine, folder: RunFolder, checkpoints: CheckpointManager, step: int
) -> None:
    """Give the engine of a resumed run its frozen weights.

    Raises:
      UserError: They are not those that the checkpoint of `step` was trained on.
    """
    assert engine.lora is not None
    check_base(folder, checkpoints.read_metadata(step), step)
    engine.frozen = engine.lora.freeze(load_base(folder, engine))


def base_metadata(folder: RunFolder, engine: Engine) -> dict[str, str]:
    """Return what a checkpoint records of the base weights; nothing without LoRA."""
    return {} if engine.lora is None else {BASE_KEY: base_digest(folder)}


def base_digest(folder: RunFolder) -> str:
    """Return a digest of the base weights: that of their manifest, which has one of each file."""
    path = CheckpointManager(folder.base_weights).directory
    manifest = manifest_path(path / str(_STEP))
    if not manifest.exists():
        return ""
    return hashlib.sha256(manifest.read_bytes()).hexdigest()


def check_base(folder: RunFolder, metadata: Mapping[str, Any], step: int) -> None:
    """Raise UserError if a checkpoint was trained on other base weights."""
    if metadata.get(BASE_KEY) != base_digest(folder):
        raise UserError(
            f"{folder.base_weights}: are not the weights that checkpoint {step} was trained "
            "on; restore what fit saved"
        )


def save_base(folder: RunFolder, params: Any, trainable: Any) -> None:
    """Write the base weights of a run that starts, and the adapter that it starts with."""
    path = CheckpointManager(folder.base_weights).directory
    # Of a process that was killed before its first checkpoint.
    if jax.process_index() == 0 and path.exists():
        path.rmtree()
    broadcast_integers([])  # a barrier: no process saves before the old files are gone
    with CheckpointManager(folder.base_weights, asynchronous=False) as checkpoints:
        checkpoints.save(_STEP, {"params": params, _START: trainable}, {})


def _abstract(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
