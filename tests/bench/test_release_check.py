"""The release: contents of its packages, and permission to publish."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bench.release_check import DATA_FILES, ROOT, check_contents


def make_wheel(folder: Path, names: tuple[str, ...]) -> Path:
    path = folder / "package.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def make_sdist(folder: Path, *names: str) -> Path:
    path = folder / "package.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            file = folder / "empty"
            file.write_text("")
            archive.add(file, f"package-1/{name}")
    return path


def test_archives_contain_only_packages_and_data(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, (*DATA_FILES, "package-1.dist-info/RECORD"))
    sdist = make_sdist(tmp_path, "train/loop.py", "README.md")
    check_contents(wheel, sdist)
    names = tuple(name for name in DATA_FILES if not name.endswith("prices.toml"))
    with pytest.raises(SystemExit, match=r"lacks train/estimate/prices\.toml"):
        check_contents(make_wheel(tmp_path, names), sdist)
    with pytest.raises(SystemExit, match=r"holds .*'tests'"):
        check_contents(make_wheel(tmp_path, (*DATA_FILES, "tests/test_x.py")), sdist)
    wheel = make_wheel(tmp_path, DATA_FILES)
    with pytest.raises(SystemExit, match=r"holds \['bench', 'tests'\]"):
        check_contents(wheel, make_sdist(tmp_path, "tests/test_x.py", "bench/x.py"))


def test_data_files_exist() -> None:
    assert [name for name in DATA_FILES if not (ROOT / name).is_file()] == []


@pytest.mark.full
@pytest.mark.skipif(shutil.which("git") is None, reason="clones the repository with git")
def test_package_trains_in_an_empty_environment() -> None:
    """Needs the extra `release` (build and twine), and the network."""
    for module in ("build", "twine"):
        pytest.importorskip(module)
    command = [sys.executable, "-m", "bench.release_check", "--constraints", "constraints.txt"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
