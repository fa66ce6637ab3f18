"""The names of a run's classes or tags, by number."""

from __future__ import annotations

from train.errors import UserError
from train.regular_files import VOCABULARY_BYTES
from train.runfolder import RunFolder, read_json, reading

Labels = tuple[str, ...]


def read_labels(folder: RunFolder) -> Labels:
    """The names of a run's classes or tags; none of a run that has no such."""
    with reading(folder.labels):
        try:
            folder.labels.stat()  # not `exists`, which takes a loop of links for no file
        except FileNotFoundError:
            return ()
    names = read_json(folder.labels, VOCABULARY_BYTES)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{folder.labels}: is no list of names; put the file back as it was")
    return tuple(names)
