"""Paths of a run's files, and safe reading and writing of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
from collections.abc import Iterator
from typing import Any

from train.data.files import AnyPath, as_user_error, expand_path
from train.errors import UserError
from train.run_folder.regular_files import (
    MAX_SETTINGS_BYTES,
    check_not_symlink,
    is_local,
    read_bytes,
)

# Names of a run's files without their endings. A run that was killed at its very start has some
# of them and no config.json yet.
_RUN_FILE_STEMS = frozenset(
    (
        "checkpoints",
        "config",
        "labels",
        "logbook",
        "loss",
        "metrics",
        "owner",
        "recovery",
        "samples",
        "spikes",
        "tensorboard",
        "time",
        "tokenizer",
    )
)


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Folder of a run, local or remote (`gs://...`).

    The constructor touches no files. `create` prepares the folder of a run that writes;
    `open_existing` finds a run that was started before.
    """

    path: AnyPath

    @classmethod
    def create(cls, workdir: str | os.PathLike[str]) -> RunFolder:
        """Return the folder of a new or resumed run; create it if it does not exist.

        Raises:
          UserError: The path is a file, holds files but no run, or cannot be written.
        """
        folder = cls(_resolve_workdir(workdir))
        with explain_write_errors(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder._check_is_run_dir()
            folder._check_no_links()
            folder._check_writable()
        return folder

    @classmethod
    def open_existing(cls, workdir: str | os.PathLike[str]) -> RunFolder:
        """Return the folder of an existing run (UserError: it holds no run)."""
        folder = cls(_resolve_workdir(workdir))
        with explain_read_errors(folder.path):
            exists, has_run = folder.path.exists(), folder.config_json.exists()
        if not has_run:
            found = f"holds no run (no {folder.config_json.name})" if exists else "does not exist"
            raise UserError(f"workdir {workdir}: {found}; give the --workdir that fit was given")
        return folder

    @property
    def config_text(self) -> AnyPath:
        """Resolved experiment as flat sorted text, for people and for `diff`."""
        return self.path / "config.txt"

    @property
    def config_json(self) -> AnyPath:
        """Resolved experiment, to be read back. A folder with this file holds a run."""
        return self.path / "config.json"

    @property
    def metrics(self) -> AnyPath:
        """Metrics by step (`train.telemetry.metrics_log`)."""
        return self.path / "metrics.jsonl"

    @property
    def time_log(self) -> AnyPath:
        """Use of the run's time (`train.telemetry.goodput`)."""
        return self.path / "time.jsonl"

    @property
    def event_log(self) -> AnyPath:
        """Events of the run (`train.telemetry.event_log`)."""
        return self.path / "logbook.jsonl"

    @property
    def checkpoints(self) -> AnyPath:
        """Checkpoints, a folder for each saved step (`train.checkpoint`)."""
        return self.path / "checkpoints"

    @property
    def rollback_record(self) -> AnyPath:
        """Rollbacks of the run (`train.recovery.rollback`)."""
        return self.path / "recovery.json"

    @property
    def anomaly_states(self) -> AnyPath:
        """States at anomalies, saved for inspection, a folder for each step."""
        return self.path / "spikes"

    @property
    def lease_folder(self) -> AnyPath:
        """Lease of the process that trains here (`train.run_folder.lease`)."""
        return self.path / "owner"

    @property
    def loss_plot(self) -> AnyPath:
        """Loss curve (`train.telemetry.loss_plot`)."""
        return self.path / "loss.png"

    @property
    def tokenizer(self) -> AnyPath:
        """Tokenizer of the run, in the format of the `tokenizers` library."""
        return self.path / "tokenizer.json"

    @property
    def labels(self) -> AnyPath:
        """Class or tag names by index; missing for tasks without labels."""
        return self.path / "labels.json"

    @property
    def samples(self) -> AnyPath:
        """Texts that the model generated during training."""
        return self.path / "samples.txt"

    @property
    def tensorboard(self) -> AnyPath:
        """TensorBoard event files, a folder for each split."""
        return self.path / "tensorboard"

    def _check_is_run_dir(self) -> None:
        """Raise UserError for a folder with other files, such as a home folder."""
        names = sorted(entry.name for entry in self.path.iterdir())
        visible = [name for name in names if not name.startswith(".")]
        if visible and not any(name.split(".")[0] in _RUN_FILE_STEMS for name in names):
            raise UserError(
                f"workdir {self.path}: holds other things ({', '.join(visible[:3])}) and no run; "
                "give a new or an empty folder"
            )

    def _check_no_links(self) -> None:
        """Raise UserError if a run's file is a link: the run would write outside its folder."""
        if is_local(self.path):
            for entry in self.path.iterdir():
                if entry.name.split(".")[0] in _RUN_FILE_STEMS:
                    check_not_symlink(entry)

    def _check_writable(self) -> None:
        probe = self.path / f".writable-{secrets.token_hex(4)}"
        probe.write_bytes(b"")
        probe.unlink()


@contextlib.contextmanager
def explain_write_errors(path: AnyPath) -> Iterator[None]:
    """Raise a UserError that names `path` in place of an OSError."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({os_error_reason(error)}); "
            "make room there, check its permissions, or give another --workdir"
        ) from error


def explain_read_errors(path: AnyPath) -> contextlib.AbstractContextManager[None]:
    """Raise a UserError that names `path` in place of the errors of reading it."""
    return as_user_error(str(path))


def os_error_reason(error: OSError) -> str:
    """Return the operating system's description of an error, on one line."""
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


def read_json(path: AnyPath, max_bytes: int = MAX_SETTINGS_BYTES) -> Any:
    """Return the value in a JSON file.

    Raises:
      UserError: The file cannot be read, is damaged, or is larger than `max_bytes`.
    """
    with explain_read_errors(path):
        data = read_bytes(path, max_bytes)
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}); put the file back as it was") from error


def write_atomically(path: AnyPath, data: str | bytes) -> None:
    """Write a whole file (text as UTF-8), so that readers see the old or the new content.

    Raises:
      UserError: The file cannot be written; the old content is intact.
    """
    with explain_write_errors(path):
        replace_atomically(path, data.encode() if isinstance(data, str) else data)


def replace_atomically(path: AnyPath, data: bytes) -> None:
    """Write a whole file as `write_atomically` does, but raise OSError."""
    if not isinstance(path, pathlib.Path):
        path.write_bytes(data)  # an object store shows a file only once it is complete
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            # Without it, a power failure after the rename can leave an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def set_aside_file(path: AnyPath, suffix: str) -> AnyPath | None:
    """Rename a file to an unused name `<name>.<suffix>`.

    Returns:
      The new path; None if the file does not exist.

    Raises:
      UserError: The file cannot be renamed.
    """
    with explain_write_errors(path):
        if not path.exists():
            return None
        return path.rename(unused_path(path, suffix))


def unused_path(path: AnyPath, suffix: str) -> AnyPath:
    """Return `<path>.<suffix>`, with a number appended if it exists."""
    candidate = path.with_name(f"{path.name}.{suffix}")
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{suffix}.{number}")
    return candidate


def _resolve_workdir(workdir: str | os.PathLike[str]) -> AnyPath:
    with as_user_error(f"workdir {workdir}"):
        path = expand_path(os.fspath(workdir))
        _check_characters(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"workdir {workdir}: is a file; give a folder")
    return path


def _check_characters(path: AnyPath) -> None:
    """Raise UserError for a path under which checkpoints cannot be written or read.

    Orbax finds the arrays' files by glob, for which some characters are patterns, and TensorStore
    reads a backslash as a slash.
    """
    whole = str(path.absolute() if isinstance(path, pathlib.Path) else path)
    if found := sorted(set(whole) & set("*?[]\\")):
        raise UserError(
            f"workdir {whole}: has {' and '.join(found)} in its path, where checkpoints cannot be "
            "stored; give a --workdir without any of * ? [ ] \\ in its whole path"
        )
