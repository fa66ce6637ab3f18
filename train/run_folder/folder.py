"""The folder of a run: the paths of its files, and checks before a run uses it."""

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
from collections.abc import Iterator
from typing import Any

from train.data.files import AnyPath, expand_path
from train.errors import UserError, as_damaged, as_user_error
from train.run_folder.writing import explain_write_errors

# Names of a run's files without their endings. A run that was killed at its very start has some
# of them and no config.json yet.
_RUN_FILE_STEMS = frozenset(
    (
        "base",
        "chat_template",
        "checkpoints",
        "config",
        "generation_config",
        "huggingface",
        "labels",
        "logbook",
        "loss",
        "metrics",
        "owner",
        "profile",
        "recovery",
        "samples",
        "spikes",
        "tensorboard",
        "time",
        "tokenizer",
        "tokenizer_config",
        "trackers",
        "wandb",
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
    def create(cls, workdir: str | os.PathLike[str]) -> "RunFolder":
        """Return the folder of a new or resumed run; create it if it does not exist.

        Raises:
          UserError: The path is a file, holds files but no run, or cannot be written.
        """
        folder = cls(_resolve_workdir(workdir))
        with explain_write_errors(folder.path):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder._check_is_run_dir()
            folder._check_writable()
        return folder

    @classmethod
    @contextlib.contextmanager
    def created(cls, workdir: str | os.PathLike[str]) -> Iterator["RunFolder"]:
        """Yield the folder as `create` does. If an error ends the block, leave no empty folder."""
        path = _resolve_workdir(workdir)
        existed = path.exists()
        folder = cls.create(workdir)
        try:
            yield folder
        except BaseException:
            if not existed and isinstance(path, pathlib.Path):
                with contextlib.suppress(OSError):  # it has files
                    path.rmdir()
            raise

    @classmethod
    def open_existing(
        cls, workdir: str | os.PathLike[str], setting: str = "workdir"
    ) -> "RunFolder":
        """Return the folder of an existing run (UserError, naming the setting: it holds none)."""
        folder = cls(_resolve_workdir(workdir))
        with as_user_error(str(folder.path)):
            exists, has_run = folder.path.exists(), folder.config_json.exists()
        if not has_run:
            problem = f"holds no run (no {folder.config_json.name})" if exists else "does not exist"
            # The name of a config, whose run `fit` has written to its default folder.
            run = cls(pathlib.Path("runs", os.fspath(workdir).replace(":", "-")))
            remedy = "give the folder of a run (fit writes runs/NAME, or its --workdir)"
            if run.config_json.is_file():
                remedy = f"did you mean {run.path}?"
            raise UserError(f"{setting} {workdir}: {problem}; {remedy}")
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
    def base_weights(self) -> AnyPath:
        """Frozen weights of a LoRA run (`train.run_folder.base_weights`)."""
        return self.path / "base"

    @property
    def pretrained(self) -> AnyPath:
        """Small files of the Hugging Face model that the weights come from, if any."""
        return self.path / "huggingface"

    @property
    def model_type(self) -> str:
        """`model_type` of the Hugging Face model that the weights come from; empty if none."""
        path = self.pretrained / "config.json"
        content = read_json(path) if path.exists() else {}
        return str(content.get("model_type", "")) if isinstance(content, dict) else ""

    @property
    def rollback_record(self) -> AnyPath:
        """Rollbacks of the run (`train.rollback`)."""
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
    def trackers(self) -> AnyPath:
        """Ids of the run in its experiment trackers (`train.telemetry.trackers`)."""
        return self.path / "trackers.json"

    @property
    def profile(self) -> AnyPath:
        """Traces of training steps (`train.telemetry.profiling`)."""
        return self.path / "profile"

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
                f"workdir {self.path}: contains other files ({', '.join(visible[:3])}) and no "
                "run; give a new or an empty folder"
            )

    def _check_writable(self) -> None:
        probe = self.path / f".writable-{secrets.token_hex(4)}"
        probe.write_bytes(b"")
        probe.unlink()


def read_json(path: AnyPath) -> Any:
    """Return the value in a JSON file (UserError: it cannot be read, or is damaged)."""
    with as_user_error(str(path)):
        data = path.read_bytes()
    with as_damaged(str(path), "JSON", "restore the original file"):
        return json.loads(data.decode())


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
    full = str(path.absolute() if isinstance(path, pathlib.Path) else path)
    if invalid := sorted(set(full) & set("*?[]\\")):
        raise UserError(
            f"workdir {full}: has {' and '.join(invalid)} in its path, where checkpoints cannot be "
            "stored; give a --workdir without any of * ? [ ] \\ in its whole path"
        )
