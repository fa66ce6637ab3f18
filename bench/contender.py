"""Parent's side of a contender process; it speaks ``bench.protocol``."""

import json
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from bench.machine import Neighbours
from train.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def interpreter(path: Path) -> str:
    """Return an interpreter's absolute path. Links are not followed: they would leave the venv.

    Raises UserError if neither the path nor the search path has an executable of that name.
    """
    executable = shutil.which(path)
    if executable is None:
        raise UserError(f"{path}: is not a program; give the path of a Python interpreter")
    return str(Path(executable).absolute())


@dataclass(frozen=True)
class Contender:
    """Command to start from the root of the repository, and its settings.

    settings: JSON-compatible settings of the contender's model.
    """

    name: str
    command: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """Measurements of one contender.

    seconds, losses: of its turn in every round; the loss is the last one.
    others: fraction of the machine's cores used by other processes in each turn, 0 to 1.
    """

    name: str
    versions: Mapping[str, str]
    facts: Mapping[str, int | float | str]
    build_seconds: float
    seconds: tuple[float, ...]
    others: tuple[float | None, ...]
    losses: tuple[float | None, ...]
    peak_memory_bytes: int


class Runner:
    """Contender's process.

    Every method raises UserError if the process has exited early.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], errors: TextIO) -> None:
        self.name = name
        self._process = process
        self._errors = errors
        self._turns: list[dict[str, Any]] = []
        self._ready: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        """Wait until the contender is built and warmed up."""
        self._ready = self._listen()["ready"]

    def turn(self, steps: int) -> None:
        """Run ``steps`` steps in the contender."""
        neighbours = Neighbours()
        turn = self._ask({"command": "run", "steps": steps})
        self._turns.append({**turn, "others": neighbours.share(turn["cpu_seconds"])})

    def finish(self) -> Record:
        """Stop the contender and collect its record."""
        peak = self._ask({"command": "quit"})["peak_memory_bytes"]
        return Record(
            name=self.name,
            versions=self._ready["versions"],
            facts=self._ready["facts"],
            build_seconds=self._ready["build_seconds"],
            seconds=tuple(turn["seconds"] for turn in self._turns),
            others=tuple(turn["others"] for turn in self._turns),
            losses=tuple(turn["loss"] for turn in self._turns),
            peak_memory_bytes=peak,
        )

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise self._ended_early() from error
        return self._listen()

    def _listen(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended_early()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended_early(self) -> UserError:
        status = self._process.wait()
        self._errors.seek(0)
        last_output = (self._errors.read().strip().splitlines() or ["no message"])[-1]
        command: Any = self._process.args
        return UserError(
            f"{self.name}: ended early with status {status} ({last_output}); "
            f"to see all of it run {shlex.join(command)}"
        )


@contextmanager
def running(contender: Contender, warmup: int) -> Iterator[Runner]:
    """Start a contender, which builds its work and warms up, and end it on exit."""
    settings = json.dumps({**contender.settings, "warmup": warmup})
    with (
        # A file, not a pipe: nobody reads during a turn, and a full pipe would block the contender.
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            [*contender.command, settings],
            cwd=ROOT,
            # Contenders share an accelerator: none may reserve most of its memory.
            env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield Runner(contender.name, process, errors)
        finally:
            process.kill()
            process.communicate()  # closes the pipes, even with a request that was never read
