"""Record in each checkpoint which settings, tokenizer and labels it was trained with.

These are files of their own, beside the checkpoints. Weights of the right shapes under changed
settings give wrong results without an error, so resume and `load` compare them with this record.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from typing import Any

from train.config.io import non_resumable_fields
from train.data.text_files import LIBRARY_PATH
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.experiment import Experiment
from train.run_folder.folder import RunFolder
from train.tasks.vocabulary import Labels

PROVENANCE_KEY = "run"
"""Key of the record in a checkpoint's metadata."""


def collect_provenance(
    experiment: Experiment, tokenizer: Tokenizer | None, labels: Labels
) -> dict[str, Any]:
    """Return the record to save with each checkpoint, as JSON values.

    The settings are stored themselves, not as a digest. Another version of this package may have
    more settings, and an error can name the one that differs.
    """
    return {
        "settings": non_resumable_fields(experiment),
        "tokenizer": None if tokenizer is None else tokenizer.digest,
        "labels": _digest(labels),
        "python": platform.python_version(),
    }


def check_provenance(
    metadata: Mapping[str, Any],
    step: int,
    folder: RunFolder,
    current: Mapping[str, Any],
) -> None:
    """Raise UserError if a checkpoint was trained with other settings or files.

    `current` is `collect_provenance` of the settings, tokenizer and labels in use.
    """
    record = metadata.get(PROVENANCE_KEY)
    if not isinstance(record, Mapping) or not isinstance(record.get("settings"), Mapping):
        raise UserError(
            f"checkpoint {folder.checkpoints / str(step)}: does not name the run it belongs "
            "to; restore what fit saved"
        )
    requested, trained = current["settings"], record["settings"]
    # Only settings that both versions of the package know can be compared.
    for name in sorted(requested.keys() & trained.keys()):
        if requested[name] != trained[name]:
            raise UserError(
                f"{folder.config_json}: {name} is {json.dumps(requested[name])}, and checkpoint "
                f"{step} was trained with {json.dumps(trained[name])}; restore the original file"
            )
    for name in ("tokenizer", "labels"):
        if current[name] != record.get(name):
            path = folder.tokenizer if name == "tokenizer" else folder.labels
            raise UserError(
                f"{path}: is not the one that checkpoint {step} was trained with; "
                "restore the original file"
            )


def explain_library_mismatch(metadata: Mapping[str, Any], path: str) -> str:
    """Explain a changed corpus by a changed Python version; empty if that is not the reason.

    The default corpus is the text of Python's own standard library.
    """
    record = metadata.get(PROVENANCE_KEY)
    trained = record.get("python") if isinstance(record, Mapping) else None
    current = platform.python_version()
    if path != LIBRARY_PATH or trained in (None, current):
        return ""
    return f"it is the library of Python {current}, and was that of Python {trained}"


def _digest(labels: Labels) -> str:
    return hashlib.sha256(json.dumps(labels).encode()).hexdigest()
