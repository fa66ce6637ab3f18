"""The folder of a run: the paths of its files, and checks before a run uses it."""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

from train.errors import UserError, as_damaged, as_user_error
from train.files import AnyPath, expand_path
from train.runtime.writing import explain_write_errors


class _Entry:
    """File or folder of a run, an attribute of `RunFolder`."""

    def __init__(self, name: str):
        self.name = name

    def __get__(self, folder: "RunFolder", owner: type["RunFolder"]) -> AnyPath:
        return folder.path / self.name


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Folder of a run, local or remote (`gs://...`).

    The constructor touches no files. `create` prepares the folder of a run that writes;
    `open_existing` finds a run that was started before.
    """

    path: AnyPath

    config_text = _Entry("config.txt")
    """Resolved experiment as flat sorted text, for people and for `diff`."""
    config_json = _Entry("config.json")
    """Resolved experiment, to be read back. A folder with this file holds a run."""
    metrics = _Entry("metrics.jsonl")
    """Metrics by step (`train.telemetry.metrics_log`)."""
    time_log = _Entry("time.jsonl")
    """Use of the run's time (`train.telemetry.goodput`)."""
    event_log = _Entry("logbook.jsonl")
    """Events of the run (`train.telemetry.event_log`)."""
    checkpoints = _Entry("checkpoints")
    """Checkpoints, a folder for each saved step (`train.checkpoint`)."""
    base_weights = _Entry("base")
    """Frozen weights of a LoRA run (`train.run_folder.base_weights`)."""
    pretrained = _Entry("huggingface")
    """Small files of the Hugging Face model that the weights come from, if any."""
    rollback_record = _Entry("recovery.json")
    """Rollbacks of the run (`train.rollback`)."""
    anomaly_states = _Entry("spikes")
    """States at anomalies, saved for inspection, a folder for each step."""
    lock = _Entry("owner.lock")
    """Lock of the process that trains in a local folder (`train.run_folder.lock`)."""
    owner = _Entry("owner.json")
    """Record of the process that trains here."""
    loss_plot = _Entry("loss.png")
    """Loss curve (`train.telemetry.loss_plot`)."""
    tokenizer = _Entry("tokenizer.json")
    """Tokenizer of the run, in the format of the `tokenizers` library."""
    labels = _Entry("labels.json")
    """Class or tag names by index; missing for tasks without labels."""
    samples = _Entry("samples.txt")
    """Texts that the model generated during training."""
    trackers = _Entry("trackers.json")
    """Ids of the run in its experiment trackers (`train.telemetry.trackers`)."""
    profile = _Entry("profile")
    """Traces of training steps (`train.telemetry.profiling`)."""
    tensorboard = _Entry("tensorboard")
    """TensorBoard event files, a folder for each split."""

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
                with contextlib.suppress(OSError):
                    if {*path.iterdir()} <= {folder.lock}:
                        folder.lock.unlink(missing_ok=True)
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
    def model_type(self) -> str:
        """`model_type` of the Hugging Face model that the weights come from; empty if none."""
        path = self.pretrained / "config.json"
        content = read_json(path) if path.exists() else {}
        return str(content.get("model_type", "")) if isinstance(content, dict) else ""

    def _check_is_run_dir(self) -> None:
        """Raise UserError for a folder with other files, such as a home folder."""
        names = sorted(entry.name for entry in self.path.iterdir() if entry.name[0] != ".")
        # A run that was killed at its very start has no settings yet, only other files of its own.
        own = {entry.name for entry in vars(RunFolder).values() if isinstance(entry, _Entry)}
        marks = {"config.json", "owner.lock", "owner.json"}
        if not marks.intersection(names) and not own.issuperset(names):
            raise UserError(
                f"workdir {self.path}: contains other files ({', '.join(names[:3])}) and no "
                "run; give a new or an empty folder"
            )


def read_json(path: AnyPath) -> Any:
    """Return the value in a JSON file (UserError: it cannot be read, or is damaged)."""
    with as_user_error(str(path)):
        data = path.read_bytes()
    with as_damaged(str(path), "JSON", "restore the original file"):
        return json.loads(data.decode())


def _resolve_workdir(workdir: str | os.PathLike[str]) -> AnyPath:
    with as_user_error(f"workdir {workdir}"):
        path = expand_path(os.fspath(workdir))
        full = str(path.absolute() if isinstance(path, pathlib.Path) else path)
        # Orbax finds the arrays' files by glob, for which some characters are patterns, and
        # TensorStore reads a backslash as a slash.
        if invalid := sorted(set(full) & set("*?[]\\")):
            raise UserError(
                f"workdir {full}: has {' and '.join(invalid)} in its path, where checkpoints "
                "cannot be stored; give a --workdir without any of * ? [ ] \\ in its whole path"
            )
        if path.exists() and not path.is_dir():
            raise UserError(f"workdir {workdir}: is a file; give a folder")
    return path
