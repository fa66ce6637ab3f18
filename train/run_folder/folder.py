"""A run's folder: what is in it and what each thing is called."""

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

# A folder may have these before it has config.json: its run was killed at its very start.
_STEMS = frozenset(
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
    """Where everything that belongs to a run lies, on this machine or remote (``gs://...``).

    Making one touches nothing: `create` prepares the folder for a run to write into, `open_existing`
    finds one that a run has written.
    """

    path: AnyPath

    @classmethod
    def create(cls, workdir: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that begins here or goes on; it is made if it is not there.

        Raises:
          UserError: It is a file, holds other things and no run, or cannot be written.
        """
        folder = cls(_located(workdir))
        with explain_write_errors(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder._refuse_strangers()
            folder._refuse_links()
            folder._try_writing()
        return folder

    @classmethod
    def open_existing(cls, workdir: str | os.PathLike[str]) -> RunFolder:
        """The folder of a run that was begun (UserError: there is none)."""
        folder = cls(_located(workdir))
        with explain_read_errors(folder.path):
            there, begun = folder.path.exists(), folder.config_json.exists()
        if not begun:
            found = f"holds no run (no {folder.config_json.name})" if there else "does not exist"
            raise UserError(f"workdir {workdir}: {found}; give the --workdir that fit was given")
        return folder

    @property
    def config_text(self) -> AnyPath:
        """The resolved experiment as flat sorted text, for people and for diff."""
        return self.path / "config.txt"

    @property
    def config_json(self) -> AnyPath:
        """The resolved experiment, to be read back. A folder that has it holds a run."""
        return self.path / "config.json"

    @property
    def metrics(self) -> AnyPath:
        """See `train.telemetry.metrics_log`."""
        return self.path / "metrics.jsonl"

    @property
    def time_log(self) -> AnyPath:
        """See `train.telemetry.compute_goodput`."""
        return self.path / "time.jsonl"

    @property
    def event_log(self) -> AnyPath:
        """See `train.telemetry.event_log`."""
        return self.path / "logbook.jsonl"

    @property
    def checkpoints(self) -> AnyPath:
        """A folder for each saved step. See `train.checkpoints`."""
        return self.path / "checkpoints"

    @property
    def rollback_record(self) -> AnyPath:
        """What was decided about trouble. See `train.recovery.rollback`."""
        return self.path / "recovery.json"

    @property
    def anomaly_states(self) -> AnyPath:
        """The states that a run was in when there was trouble, a folder for each step."""
        return self.path / "spikes"

    @property
    def lease_folder(self) -> AnyPath:
        """Which process trains here. See `train.run_folder.lock`."""
        return self.path / "owner"

    @property
    def loss_plot(self) -> AnyPath:
        """See `train.telemetry.loss_plot`."""
        return self.path / "loss.png"

    @property
    def tokenizer(self) -> AnyPath:
        """The tokenizer that the run trains with, in the format of the `tokenizers` library."""
        return self.path / "tokenizer.json"

    @property
    def labels(self) -> AnyPath:
        """The names of the classes or tags, by number; not there for tasks without."""
        return self.path / "labels.json"

    @property
    def samples(self) -> AnyPath:
        """What the model wrote on the way."""
        return self.path / "samples.txt"

    @property
    def tensorboard(self) -> AnyPath:
        """TensorBoard's event files, in a folder for each split."""
        return self.path / "tensorboard"

    def _refuse_strangers(self) -> None:
        """Keeps a run out of a folder that is plainly something else, a home folder say."""
        names = sorted(entry.name for entry in self.path.iterdir())
        strangers = [name for name in names if not name.startswith(".")]
        if strangers and not any(name.split(".")[0] in _STEMS for name in names):
            raise UserError(
                f"workdir {self.path}: holds other things ({', '.join(strangers[:3])}) and no run; "
                "give a new or an empty folder"
            )

    def _refuse_links(self) -> None:
        """Keep what a run writes, appends to and removes within its folder."""
        if is_local(self.path):
            for name in self.path.iterdir():
                if name.name.split(".")[0] in _STEMS:
                    check_not_symlink(name)

    def _try_writing(self) -> None:
        probe = self.path / f".writable-{secrets.token_hex(4)}"
        probe.write_bytes(b"")
        probe.unlink()


@contextlib.contextmanager
def explain_write_errors(path: AnyPath) -> Iterator[None]:
    """Turns what writing ``path`` can raise into a UserError that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({os_error_reason(error)}); "
            "make room there, check its permissions, or give another --workdir"
        ) from error


def explain_read_errors(path: AnyPath) -> contextlib.AbstractContextManager[None]:
    """Turns what reading ``path`` can raise into a UserError that names it."""
    return as_user_error(str(path))


def os_error_reason(error: OSError) -> str:
    """What the system says is wrong, in a few words and on one line."""
    return error.strerror or " ".join(str(error).split()) or type(error).__name__


def read_json(path: AnyPath, max_bytes: int = MAX_SETTINGS_BYTES) -> Any:
    """Return what a file of JSON holds.

    Raises UserError if it cannot be read, is damaged, or has more than `max_bytes` bytes.
    """
    with explain_read_errors(path):
        data = read_bytes(path, max_bytes)
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}); put the file back as it was") from error


def write_atomically(path: AnyPath, data: str | bytes) -> None:
    """Writes a whole file (text as UTF-8): at every moment there is the old one or the new one.

    Raises:
      UserError: It cannot be written; what was there is still there.
    """
    with explain_write_errors(path):
        replace_atomically(path, data.encode() if isinstance(data, str) else data)


def replace_atomically(path: AnyPath, data: bytes) -> None:
    """The same for those who have their own words for an OSError."""
    if not isinstance(path, pathlib.Path):
        path.write_bytes(data)  # an object store shows a file only once it is whole
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def set_aside_file(path: AnyPath, suffix: str) -> AnyPath | None:
    """Rename a file to an unused name, `<name>.<ending>`; return it, or None without such a file.

    Raises UserError if it cannot be renamed.
    """
    with explain_write_errors(path):
        if not path.exists():
            return None
        return path.rename(unused_path(path, suffix))


def unused_path(path: AnyPath, suffix: str) -> AnyPath:
    """Return `<path>.<ending>`, with a number if a file of that name exists."""
    candidate = path.with_name(f"{path.name}.{suffix}")
    number = 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{suffix}.{number}")
    return candidate


def _located(workdir: str | os.PathLike[str]) -> AnyPath:
    with as_user_error(f"workdir {workdir}"):
        path = expand_path(os.fspath(workdir))
        _check_characters(path)
        if path.exists() and not path.is_dir():
            raise UserError(f"workdir {workdir}: is a file; give a folder")
    return path


def _check_characters(path: AnyPath) -> None:
    """Raise UserError for a path under which checkpoints cannot be written or read.

    Orbax looks for the arrays' files with glob, which takes these characters for a pattern, and
    TensorStore takes a backslash for a slash.
    """
    whole = str(path.absolute() if isinstance(path, pathlib.Path) else path)
    if found := sorted(set(whole) & set("*?[]\\")):
        raise UserError(
            f"workdir {whole}: has {' and '.join(found)} in its path, where checkpoints cannot be "
            "stored; give a --workdir without any of * ? [ ] \\ in its whole path"
        )
