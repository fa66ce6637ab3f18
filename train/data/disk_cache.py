"""Cache folders: computed once, by one process, and never seen incomplete."""

import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable

from train.data.files import expand_path
from train.errors import UsageError, UserError


def cache_folder(setting: str) -> pathlib.Path:
    """Return the folder of ``data.cache_dir``, or the user's own if it is empty.

    Raises UserError if it is remote, or the home folder is not known.
    """
    if not (folder := setting or os.environ.get("TRANSFORMER_CACHE", "")):
        return user_cache_folder()
    path = expand_path(folder)
    if not isinstance(path, pathlib.Path):
        raise UsageError(f"data.cache_dir {folder}: is remote; give a folder of this machine")
    return path


def user_cache_folder() -> pathlib.Path:
    """Return the user's cache folder of this project, usually below ~/.cache.

    Raises UserError if the home folder is not known.
    """
    if base := os.environ.get("XDG_CACHE_HOME", ""):
        return pathlib.Path(base) / "linen-transformer"
    try:
        return pathlib.Path.home() / ".cache" / "linen-transformer"
    except RuntimeError as error:
        raise UserError(
            "the data cache: the home folder is not known; set HOME or XDG_CACHE_HOME"
        ) from error


def cache_key(*parts: object) -> str:
    """Return a name derived from JSON values: equal for equal values."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def get_or_create(
    folder: pathlib.Path,
    write: Callable[[pathlib.Path], None],
    is_complete: Callable[[pathlib.Path], bool] = pathlib.Path.is_dir,
) -> pathlib.Path:
    """Return ``folder``, after creating it unless it exists and is complete.

    If several processes ask for it, one writes and the others wait. The folder is written under
    another name and renamed, so that a kill or a full disk leaves no incomplete folder.

    Args:
      folder: The folder to create.
      write: Fills an empty folder.
      is_complete: Returns True if an existing folder is what `write` made.

    Raises:
      UserError: The cache cannot be written (a full disk, no permission).
    """
    from filelock import FileLock

    try:
        if is_complete(folder):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f"{folder.name}.lock")):
            if not is_complete(folder):
                _replace(folder, write)
    except OSError as error:
        raise UserError(
            f"the data cache {folder.parent}: {error.strerror or error}; make room there, or set "
            "data.cache_dir or TRANSFORMER_CACHE to another folder"
        ) from error
    return folder


def _replace(folder: pathlib.Path, write: Callable[[pathlib.Path], None]) -> None:
    """Write the folder under a temporary name, then rename it."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        write(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
