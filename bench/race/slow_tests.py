"""Run tests, and print where their time goes: by file, by test and by compiled program."""

import collections
import subprocess
import sys
import time
from collections.abc import Generator
from typing import Any

import pytest
import tyro

COMPILE = "/jax/core/compile/backend_compile_duration"


class Recorder:
    """pytest plugin that adds up the seconds of files, tests and compiled programs.

    Attributes:
      tables: Of each name in a table: seconds, seconds of XLA's compiler, programs compiled.
    """

    def __init__(self) -> None:
        names = ("file", "test", "program")
        self.tables: dict[str, dict[str, list[Any]]] = {
            each: collections.defaultdict(lambda: [0.0, 0.0, 0]) for each in names
        }
        self._programs: list[tuple[str, float]] = []
        self._listening = False

    def _record(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == COMPILE:
            self._programs.append((str(details.get("fun_name", "")), duration_secs))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if not self._listening:  # not before conftest has set the environment that JAX reads
            import jax

            jax.monitoring.register_event_duration_secs_listener(self._record)
            self._listening = True
        self._programs.clear()
        start = time.perf_counter()
        result = yield
        seconds = time.perf_counter() - start
        compiling = sum(each for _, each in self._programs)
        for table, name in (("file", item.nodeid.split("::")[0]), ("test", item.nodeid)):
            self._add(table, name, seconds, compiling, len(self._programs))
        for name, each in self._programs:
            self._add("program", name, each, each, 1)
        return result

    def _add(self, table: str, name: str, seconds: float, compiling: float, programs: int) -> None:
        row = self.tables[table][name]
        row[0], row[1], row[2] = row[0] + seconds, row[1] + compiling, row[2] + programs

    def pytest_terminal_summary(self) -> None:
        for title, rows in self.tables.items():
            print(f"\n   seconds   compiler   programs  by {title}")
            for name, row in sorted(rows.items(), key=lambda item: -item[1][0])[:40]:
                print("{:10.1f} {:10.1f} {:10}  ".format(*row) + name)


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder."""
    config.pluginmanager.register(Recorder())


def slow_tests(arguments: tyro.conf.Positional[tuple[str, ...]] = ()) -> int:
    """Run pytest in one process, and print where the time goes.

    Args:
      arguments: Of pytest, after `--`.
    """
    # A process of its own: what is imported here cannot be rewritten by pytest.
    command = (sys.executable, "-m", "pytest", "-n0", "-p", "bench.race.slow_tests", *arguments)
    return subprocess.run(command, check=False).returncode
