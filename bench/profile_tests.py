"""Profile a test run: seconds by test file, by test and by compiled program.

    python -m bench.profile_tests [PYTEST ARGUMENTS]
    python -m bench.profile_tests -n 2 --dist loadfile tests/train

Runs pytest with a plugin that listens to `jax.monitoring`, and prints three tables at the end.
`--read FOLDER` prints the tables of an earlier run again, whose folder was printed at its end.
"""

import collections
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = "TEST_PROFILE_FOLDER"
TRACE = "/jax/core/compile/jaxpr_trace_duration"
LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
COMPILE = "/jax/core/compile/backend_compile_duration"


class Recorder:
    """pytest plugin that writes one line of JSON for each test: seconds, and programs compiled."""

    def __init__(self, folder: Path) -> None:
        name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.file = (folder / f"{name}.jsonl").open("a")
        self.events: list[tuple[str, str, float]] = []
        self.listening = False

    def listen(self) -> None:
        """Subscribe to JAX's events, after conftest has set the environment that JAX reads."""
        import jax

        def record(event: str, duration_secs: float, **details: str | int) -> None:
            self.events.append((event, str(details.get("fun_name", "")), duration_secs))

        jax.monitoring.register_event_duration_secs_listener(record)
        self.listening = True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        if not self.listening:
            self.listen()
        self.events.clear()
        start = time.perf_counter()
        result = yield
        sums: dict[str, float] = collections.defaultdict(float)
        for event, _, seconds in self.events:
            sums[event] += seconds
        line = {
            "test": item.nodeid,
            "seconds": time.perf_counter() - start,
            "trace": sums[TRACE],
            "lower": sums[LOWER],
            "compile": sums[COMPILE],
            "programs": [
                (name, seconds) for event, name, seconds in self.events if event == COMPILE
            ],
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        return result


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder in a process that runs tests (with xdist: in each worker)."""
    if hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Recorder(Path(os.environ[FOLDER])))


def _table(title: str, rows: list[tuple[str, list[float]]], columns: list[str], limit: int) -> None:
    print(f"\n{title}\n" + "".join(f"{column:>10}" for column in columns))
    for name, values in sorted(rows, key=lambda row: -row[1][0])[:limit]:
        print("".join(f"{value:10.1f}" for value in values) + f"  {name}")


def report(folder: Path, limit: int = 40) -> None:
    """Print seconds by file, by test and by program of the run recorded in `folder`."""
    lines = [
        json.loads(line)
        for file in folder.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    columns = ["seconds", "trace", "lower", "compile", "programs"]

    def figures(line: dict[str, Any]) -> list[float]:
        return [*(line[column] for column in columns[:4]), len(line["programs"])]

    files: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 6)
    programs: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 2)
    for line in lines:
        name = line["test"].split("::")[0]
        files[name] = [a + b for a, b in zip(files[name], [*figures(line), 1], strict=True)]
        for program, seconds in line["programs"]:
            programs[program] = [programs[program][0] + seconds, programs[program][1] + 1]
    total = [sum(column) for column in zip(*files.values(), strict=True)]
    _table("in all", [("", total)], [*columns, "tests"], 1)
    _table("by file", list(files.items()), [*columns, "tests"], limit)
    _table("by test", [(line["test"], figures(line)) for line in lines], columns, limit)
    _table("by program", list(programs.items()), ["compile", "times"], limit)


def main() -> int:
    """Run pytest under the recorder, or read what it wrote."""
    if sys.argv[1:2] == ["--read"]:
        report(Path(sys.argv[2]), 100)
        return 0
    folder = Path(tempfile.mkdtemp(prefix="test-profile-"))
    os.environ[FOLDER] = str(folder)
    status = pytest.main(["-p", "bench.profile_tests", *sys.argv[1:]])
    report(folder)
    print(f"\npython -m bench.profile_tests --read {folder} prints these tables again")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
