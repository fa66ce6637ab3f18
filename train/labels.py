"""The names of a run's classes or tags, by number."""

from __future__ import annotations

import json

from train.errors import UserError
from train.runfolder import RunFolder, reading

Labels = tuple[str, ...]


def saved_labels(folder: RunFolder) -> Labels:
    """The names of a run's classes or tags; none of a run that has no such."""
    with reading(folder.labels):
        if not folder.labels.exists():
            return ()
        data = folder.labels.read_bytes()
    try:
        names = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{folder.labels}: is not JSON ({error}); put the file back as it was"
        ) from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder.labels}: is no list of names; put the file back as it was")
    return tuple(names)
