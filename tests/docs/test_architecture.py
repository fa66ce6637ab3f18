"""`docs/architecture.md` lists the files that really run."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.docs.reading_paths import ROOT, documented

PATHS = ("forward", "step", "resume")


@pytest.fixture(scope="module")
def measured() -> dict[str, list[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    command = [sys.executable, "-m", "tests.docs.reading_paths"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    paths: Any = json.loads(done.stdout.splitlines()[-1])
    return paths


@pytest.mark.full
@pytest.mark.parametrize("name", PATHS)
def test_reading_paths_list_the_executed_files(measured: dict[str, list[str]], name: str) -> None:
    """If this fails: python -m tests.docs.reading_paths --write."""
    assert sorted(documented(name)) == sorted(measured[name])
