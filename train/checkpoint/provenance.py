"""What a checkpoint records of the run around it, so that files of another run are noticed.

A checkpoint means something only with the settings, the tokenizer and the labels of its training,
and these are files of their own. Weights of the right shapes under changed settings give wrong
results without an error.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from typing import Any

from train.config.io import non_resumable_fields
from train.data.library import LIBRARY_PATH
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.experiment import Experiment
from train.run_folder.folder import RunFolder
from train.tasks.vocabulary import Labels

PROVENANCE_KEY = "run"
"""What a checkpoint calls this record."""


def collect_provenance(
    experiment: Experiment, tokenizer: Tokenizer, labels: Labels
) -> dict[str, Any]:
    """Return the record that is saved with each checkpoint, as JSON can hold it.

    It has the settings themselves, not a digest of them: another version of this package may have
    more settings, and an error can name the one that differs.
    """
    return {
        "settings": non_resumable_fields(experiment),
        "tokenizer": tokenizer.digest,
        "labels": _digest(labels),
        "python": platform.python_version(),
    }


def check_provenance(
    metadata: Mapping[str, Any],
    step: int,
    folder: RunFolder,
    experiment: Experiment,
    tokenizer: Tokenizer,
    labels: Labels,
) -> None:
    """Raise UserError if a checkpoint was not trained with what is here.

    Args:
      extra: What was saved with the checkpoint, beside the state.
      step: Its step.
      folder: The run's.
      experiment: The settings, as read from `config.json` or asked for.
      tokenizer: The tokenizer.
      labels: The names of classes or tags.
    """
    record = metadata.get(PROVENANCE_KEY)
    if not isinstance(record, Mapping) or not isinstance(record.get("settings"), Mapping):
        raise UserError(
            f"checkpoint {folder.checkpoints / str(step)}: does not say what run it belongs to; "
            "put back what fit saved"
        )
    here, there = non_resumable_fields(experiment), record["settings"]
    for name in sorted(here.keys() & there.keys()):
        if here[name] != there[name]:
            raise UserError(
                f"{folder.config_json}: {name} is {json.dumps(here[name])}, and checkpoint {step} "
                f"was trained with {json.dumps(there[name])}; put the file back as it was"
            )
    for path, found, kept in (
        (folder.tokenizer, tokenizer.digest, record.get("tokenizer")),
        (folder.labels, _digest(labels), record.get("labels")),
    ):
        if found != kept:
            raise UserError(
                f"{path}: is not the one that checkpoint {step} was trained with; "
                "put the file back as it was"
            )


def explain_library_mismatch(metadata: Mapping[str, Any], path: str) -> str:
    """Return why the text of Python's own library differs; empty if that is not the reason."""
    record = metadata.get(PROVENANCE_KEY)
    trained = record.get("python") if isinstance(record, Mapping) else None
    here = platform.python_version()
    if path != LIBRARY_PATH or trained in (None, here):
        return ""
    return f"it is the library of Python {here}, and was that of Python {trained}"


def _digest(labels: Labels) -> str:
    return hashlib.sha256(json.dumps(labels).encode()).hexdigest()
