"""Files of a sweep: what it consists of (`sweep.json`) and what its runs gave (`results.json`).

sweep.json      settings of all runs; another sweep is refused in this folder
results.json    status and metrics of the runs that ended
logs/NAME.log   output of a run's process
NAME/           folder of a run, as `fit` writes it
sweep.png       figure (and, of a scaling sweep, its own files)
"""

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import filelock

from train.config.io import flatten_experiment
from train.errors import UserError, as_damaged
from train.files import expand_path
from train.run_folder.folder import read_json
from train.runtime.writing import explain_write_errors, write_atomically
from train.sweep.grid import NO_WARM_START, SweepRun

Status = Literal["finished", "failed"]


@dataclasses.dataclass(frozen=True)
class RunResult:
    """Result of a run that ended."""

    status: Status
    metric: str = ""
    """Name of the task's selection metric."""
    lower_is_better: bool = True
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Final held-out metrics by name."""
    step: int = 0
    seconds: float = 0.0
    """Wall time over all processes that worked on the run."""
    error: str = ""
    """Reason of a failure, one line."""

    @property
    def value(self) -> float:
        """Value of the selection metric; NaN of a failed run."""
        return float(self.metrics.get(self.metric, math.nan))


class SweepFolder:
    """Folder of a sweep, on a local disk."""

    def __init__(self, workdir: str):
        """Find the folder; nothing is written.

        Raises:
          UserError: The path is remote or a file.
        """
        path = expand_path(workdir)
        if not isinstance(path, pathlib.Path):
            raise UserError(
                f"workdir {workdir}: is remote, and a sweep needs a local disk; give a local "
                "--workdir"
            )
        if path.exists() and not path.is_dir():
            raise UserError(f"workdir {workdir}: is a file; give a folder")
        self.path = path

    @property
    def figure(self) -> pathlib.Path:
        """Figure of the results."""
        return self.path / "sweep.png"

    def run_path(self, name: str) -> pathlib.Path:
        """Return the folder of a run."""
        return self.path / name

    def log_path(self, name: str) -> pathlib.Path:
        """Return the file with the output of a run's process."""
        return self.path / "logs" / f"{name}.log"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Own the folder inside the block; the system releases it when the process dies.

        Raises:
          UserError: Another queue works here, or the folder cannot be written.
        """
        with explain_write_errors(self.path):
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(self.path / "logs" / ".queue.lock")
        try:
            with lock.acquire(timeout=0):
                yield
        except filelock.Timeout:
            raise UserError(
                f"{self.path}: another process works on this sweep; wait for it or stop it first"
            ) from None

    def check_same_sweep(self, runs: Sequence[SweepRun]) -> None:
        """Raise UserError if the folder holds anything but a part of this sweep."""
        file = self.path / "sweep.json"
        if not file.exists():
            found = sorted(each.name for each in self.path.glob("[!.]*") if each.name != "logs")
            if found:
                raise UserError(
                    f"workdir {self.path}: contains other files ({', '.join(found[:3])}) and no "
                    "sweep; give a new or an empty folder"
                )
            return
        requested = {run.name: _described_fields(run) for run in runs}
        with as_damaged(str(file), "the description of a sweep", "restore the original file"):
            described = dict(read_json(file)["runs"])
        if "base" in read_json(file):
            raise UserError(f"{file}: is of an older version; give another --workdir")
        for name, before in described.items():
            if name not in requested:
                self._refuse(f"run {name} belongs to that one and not to this one")
            now = requested[name]
            # A field that only this version of the package has is not a difference.
            for field, old in before.items():
                if field not in now or old != now[field]:
                    new = json.dumps(now[field]) if field in now else "missing"
                    self._refuse(f"{field} is {json.dumps(old)} there and {new} here")

    def _refuse(self, difference: str) -> None:
        raise UserError(
            f"workdir {self.path}: holds another sweep ({difference}); give another --workdir, or "
            "the settings of that sweep, to which values and seeds may be added"
        )

    def write_sweep(self, runs: Sequence[SweepRun]) -> None:
        """Write `sweep.json`: what decides the result of each run."""
        described = {run.name: _described_fields(run) for run in runs}
        text = json.dumps({"runs": described}, indent=1)
        write_atomically(self.path / "sweep.json", text + "\n")

    def read_results(self) -> dict[str, RunResult]:
        """Return the results of the runs that ended, by name, as far as their folders exist."""
        file = self.path / "results.json"
        saved = read_json(file) if file.exists() else {}
        with as_damaged(str(file), "a table of a sweep's results", "delete it to train anew"):
            results = {name: RunResult(**fields) for name, fields in saved.items()}
        return {name: each for name, each in results.items() if self.run_path(name).exists()}

    def write_results(self, results: Mapping[str, RunResult]) -> None:
        """Write `results.json`."""
        plain = {name: dataclasses.asdict(each) for name, each in results.items()}
        write_atomically(self.path / "results.json", json.dumps(plain, indent=1) + "\n")


def _described_fields(run: SweepRun) -> dict[str, Any]:
    """Return what decides the result of a run, by name: its settings and where it starts."""
    fields = {**flatten_experiment(run.experiment), **NO_WARM_START, **run.warm_start}
    plain: dict[str, Any] = json.loads(json.dumps(fields))
    return plain
