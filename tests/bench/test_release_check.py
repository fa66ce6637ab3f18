"""The package of a release, as a user installs it."""

import shutil
import subprocess
import sys

import pytest

from bench.race.harness import ROOT


@pytest.mark.full
@pytest.mark.skipif(shutil.which("git") is None, reason="clones the repository with git")
def test_package_trains_in_an_empty_environment() -> None:
    """Needs the extra `release` (build and twine), and the network."""
    for module in ("build", "twine"):
        pytest.importorskip(module)
    command = [sys.executable, "-m", "bench", "release_check", "--constraints", "constraints.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
