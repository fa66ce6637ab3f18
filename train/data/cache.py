"""Folders that are costly to make: made once, by one process, and whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
from collections.abc import Callable

from train.data.files import expand_path
from train.errors import UsageError, UserError


def cache_folder(setting: str) -> pathlib.Path:
    """The folder of ``data.cache_dir`` or, if that is empty, the user's own.

    Raises UserError if it is remote, or the home folder is not known.
    """
    if not (folder := setting or os.environ.get("TRANSFORMER_CACHE", "")):
        return user_cache_folder()
    path = expand_path(folder)
    if not isinstance(path, pathlib.Path):
        raise UsageError(f"data.cache_dir {folder}: is remote; give a folder of this machine")
    return path


def user_cache_folder() -> pathlib.Path:
    """Return the folder of all that this project keeps for the user, below ~/.cache as a rule.

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
    """A name for what follows from ``parts`` (JSON values): equal where they are equal."""
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def get_or_create(
    folder: pathlib.Path,
    write: Callable[[pathlib.Path], None],
    is_complete: Callable[[pathlib.Path], bool] = pathlib.Path.is_dir,
) -> pathlib.Path:
    """Returns ``folder``, having it written first unless it is there and whole.

    Of several processes one writes and the others wait. What is written appears under its name
    at once and complete, so that a kill or a full disk leaves nothing that could be taken for it.

    Args:
      folder: The folder to make.
      write: Fills an empty folder.
      whole: Whether a folder that is there is what `write` made.

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
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        write(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
