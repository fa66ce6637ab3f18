import io
import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import NoReturn

import jax
import pytest
from packaging.requirements import Requirement
from rich.console import Console

from train.cli import doctor
from train.cli.doctor import (
    Report,
    check_devices,
    check_disk,
    check_machine,
    check_package,
    check_python,
    check_versions,
    run_checks,
)
from train.runtime.accelerators import Finding

JAX = Requirement("jax>=0.10,<0.13")


def test_report_counts_and_prints() -> None:
    report = Report(
        (
            Finding("cores", "ok", "2"),
            Finding("disk", "warning", "full [almost]", "make room"),
            Finding("jax", "problem", "is not installed", "pip install jax"),
        )
    )
    assert not report.ok
    assert Report(report.findings[:2]).ok
    full = {"name": "disk", "level": "warning", "detail": "full [almost]", "remedy": "make room"}
    assert json.loads(json.dumps(report.as_dict()))["findings"][1] == full
    text = io.StringIO()
    report.print(Console(file=text, width=80))
    for words in ("full [almost]", "-> pip install jax", "Problems: 1. Warnings: 1."):
        assert words in text.getvalue()


def test_this_machine() -> None:
    report = run_checks()
    assert [each for each in report.findings if each.level == "problem"] == []
    result = {each.name: each.detail for each in report.findings}
    assert result["devices"] == f"{len(jax.devices())} × CPU"
    assert result["jax"].startswith(jax.__version__)
    assert {"python", "jaxlib", "flax", "accelerator", "memory", "disk"} <= result.keys()


@pytest.mark.parametrize(
    ("version", "level"),
    [("0.12.0.1", "ok"), ("0.9.2", "problem"), ("0.13.0", "warning"), (None, "problem")],
)
def test_versions_of_packages(version: str | None, level: str) -> None:
    finding = check_package(JAX, version)
    remedies = {
        "ok": "",
        "problem": 'pip install "jax<0.13,>=0.10"',
        "warning": 'if something breaks: pip install "jax<0.13,>=0.10"',
    }
    assert (finding.level, finding.remedy) == (level, remedies[level])


def test_requirements_come_from_the_installed_project(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "linen_transformer-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: linen-transformer\nVersion: 9.9\nRequires-Python: >=3.7\n"
        "Requires-Dist: rich>=1\nRequires-Dist: no-such-package>=2\n"
        "Requires-Dist: not-wanted>=3; extra == 'tpu'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    levels = {each.name: each.level for each in check_versions()}
    assert levels == {
        "python": "ok",
        "jaxlib": "ok",
        "no-such-package": "problem",
        "packages": "ok",
    }
    assert check_python("3.13.0", ">=3.11") == Finding("python", "ok", "3.13.0 (>=3.11)")
    assert check_python("3.10.4", ">=3.11").level == "problem"


def test_versions_without_installed_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PROJECT", "no-such-package")
    first, *rest = check_versions()
    assert (first.name, first.level) == ("no-such-package", "warning")
    assert Finding("jax", "ok", jax.__version__) in rest


@pytest.mark.parametrize(
    ("error", "asked", "detail"),
    [
        (AssertionError(), "cuda", "none with JAX_PLATFORMS=cuda"),
        (RuntimeError("no tpu\nat all"), "tpu", "none with JAX_PLATFORMS=tpu: no tpu"),
        (RuntimeError("the TPU is in use"), "", "jax cannot start: the TPU is in use"),
    ],
)
def test_jax_without_devices(
    monkeypatch: pytest.MonkeyPatch, error: Exception, asked: str, detail: str
) -> None:
    def fail() -> NoReturn:
        raise error

    monkeypatch.setattr(jax, "local_devices", fail)
    monkeypatch.setenv("JAX_PLATFORMS", asked)
    [finding] = check_devices()
    assert (finding.level, finding.detail) == ("problem", detail)


def test_devices_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    device = namedtuple("device", "platform device_kind memory_stats")
    one = device("gpu", "NVIDIA H200", lambda: {"bytes_limit": 105 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [one, one])
    first, second = check_devices()
    assert first.detail == "2 × NVIDIA H200 (gpu), 105.0 GiB each for JAX"
    assert second == Finding("accelerator", "ok", "in use (gpu)")


def test_container_limits_and_slow_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = tmp_path / "sys/fs/cgroup"
    limits.mkdir(parents=True)
    (limits / "memory.max").write_text(f"{2**30}\n")
    (limits / "cpu.max").write_text("100000 100000\n")
    monkeypatch.setenv("JAX_DISABLE_JIT", "1")
    monkeypatch.setenv("JAX_ENABLE_X64", "false")
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    found = {each.name: (each.level, each.detail) for each in check_machine(tmp_path)}
    assert found["cores"] == ("ok", "1, in Kaggle")
    assert found["memory"] == ("warning", "1.0 GiB")
    assert found["JAX_DISABLE_JIT"][0] == "warning"
    assert set(found) == {"cores", "memory", "disk", "JAX_DISABLE_JIT"}
    (limits / "memory.max").write_text("max\n")
    (limits / "cpu.max").write_text("max 100000\n")
    assert next(iter(check_machine(tmp_path))).detail.removesuffix(", in Kaggle").isdecimal()


def test_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "free")
    for free, level in ((3 * 2**29, "warning"), (2**31, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: usage(free))
        assert check_disk(tmp_path).level == level
    monkeypatch.setattr(os, "access", lambda folder, mode: False)
    assert check_disk(tmp_path).detail == f"{tmp_path} is not writable"


def test_broken_jax_is_a_finding(tmp_path: Path) -> None:
    """Importing a jax whose jaxlib does not belong to it raises, and nothing else works."""
    (tmp_path / "jax.py").write_text("raise RuntimeError('jaxlib is too old\\nmore')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "train", "doctor", "--json"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (1, "")
    [problem] = [x for x in json.loads(result.stdout)["findings"] if x["level"] == "problem"]
    assert problem["detail"] == "jax cannot be imported: jaxlib is too old"
