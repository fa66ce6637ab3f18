"""Export of a LoRA run: its adapter alone in PEFT's format, and the weights that it adapts."""

from pathlib import Path
from typing import Any

from train.engine import make_engine
from train.errors import UserError
from train.lora.base_weights import load_base
from train.run import Run, load
from transformer.interop.peft_writer import write_adapter


def export_adapter(run: Run, folder: Path, *, family: str = "", dtype: str = "") -> str:
    """Write the adapter of a LoRA run to an existing folder; return the `model_type` of its base.

    Args:
      run: The run.
      folder: Existing folder.
      family: `model_type` that modules are named after.
      dtype: Dtype of the file; default float32, that of the factors.

    Raises:
      InteropError: PEFT's format has no place for it.
    """
    trainable = load(str(run.folder.path), step=run.step, merged=False).params
    engine = make_engine(run.experiment, run.model.hardware)
    assert engine.lora is not None
    written = write_adapter(
        folder, run.model, engine.lora, trainable, family=family, dtype=dtype or "float32"
    )
    card = (
        "---\nlibrary_name: peft\ntags:\n- lora\n- linen-transformer\n---\n\n"
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
