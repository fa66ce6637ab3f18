import dataclasses
import io
import json
from collections import namedtuple
from pathlib import Path
from typing import Any, NoReturn

import jax
import pytest
from packaging.requirements import Requirement
from rich.console import Console

from train.doctor.accelerator import (
    check_accelerator,
    check_bfloat16,
    check_speed,
    feed_forward_flops,
    report_devices,
    start_backend,
)
from train.doctor.environment import (
    Finding,
    Machine,
    check_compilation_cache,
    check_environment,
    inspect_machine,
)
from train.doctor.report import Report, accelerator_warnings, run_checks
from train.doctor.versions import check_package, check_plugin, check_project, check_python

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


def test_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))  # the tests have their own
    report = run_checks()
    assert [each for each in report.findings if each.level == "problem"] == []
    result = {each.name: each.detail for each in report.findings}
    assert result["devices"] == f"{len(jax.devices())} × CPU"
    assert result["jax"].startswith(jax.__version__)
    assert {"python", "jaxlib", "flax", "accelerator", "bfloat16", "speed", "disk"} <= result.keys()
    assert result["compilation cache"] == jax.config.values["jax_compilation_cache_dir"]


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
    levels = {each.name: each.level for each in check_project()}
    assert levels == {"python": "ok", "rich": "ok", "no-such-package": "problem"}
    assert check_python("3.13.0", ">=3.11") == Finding("python", "ok", "3.13.0 (>=3.11)")
    assert check_python("3.10.4", ">=3.11").level == "problem"


def test_versions_without_installed_project(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("train.doctor.versions.PROJECT", "no-such-package")
    first, *rest = check_project()
    assert (first.name, first.level) == ("no-such-package", "warning")
    assert Finding("jax", "ok", jax.__version__) in rest


def test_plugin_of_another_version() -> None:
    cuda = Requirement("jax-cuda13-plugin<=0.12.0,>=0.12.0")
    assert check_plugin("jax-cuda13-plugin", "0.12.0", cuda, "0.12.0").level == "ok"
    stale = check_plugin("jax-cuda13-plugin", "0.11.2", cuda, "0.12.0")
    remedy = 'pip install --upgrade "jax[cuda13]==0.12.0"'
    assert (stale.level, stale.remedy) == ("warning", remedy)
    # pip would install another libtpu than the one that Colab's or Kaggle's runtime was built for.
    tpu = Requirement("libtpu==0.0.23")
    for version, start in (("0.0.21.1", "leave it"), ("0.0.17", "leave it"), ("0.0.20", "pip")):
        found = check_plugin("libtpu", version, tpu, "0.7.2")
        assert found.level == "warning"
        assert found.remedy.startswith(start)


def test_accelerator_warnings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("train.doctor.report.inspect_machine", lambda: GPU)
    monkeypatch.setattr("train.doctor.versions.installed_plugins", lambda: ())
    [line] = accelerator_warnings("cpu")
    assert line.startswith("accelerator: a GPU is present (/dev/nvidia0), but JAX uses the CPU")
    stale = Finding("libtpu", "warning", "1 is not ==2, which jax 3 asks for", "pip install it")
    monkeypatch.setattr("train.doctor.versions.check_plugins", lambda: iter([stale]))
    assert accelerator_warnings("tpu") == [f"libtpu: {stale.detail}; {stale.remedy}"]
    monkeypatch.setattr("train.doctor.report.inspect_machine", Machine)
    assert accelerator_warnings("cpu") == []


GPU = Machine(gpu="/dev/nvidia0")
TPU = Machine(tpu="/dev/accel0")
HIDDEN = dataclasses.replace(GPU, environment={"JAX_PLATFORMS": "cpu"})
CUDA = ("jax-cuda13-plugin",)


@pytest.mark.parametrize(
    ("platform", "machine", "plugins", "level", "words"),
    [
        ("cpu", Machine(), (), "ok", "none found"),
        ("cpu", GPU, (), "problem", "pip install -e '.[cuda13]'"),
        ("cpu", GPU, CUDA, "problem", "jax-cuda13-plugin did not start: "),
        ("gpu", GPU, CUDA, "ok", "in use (gpu)"),
        ("cpu", TPU, (), "problem", "pip install -e '.[tpu]'"),
        ("cpu", TPU, ("libtpu",), "problem", "libtpu did not start: "),
        ("tpu", TPU, ("libtpu",), "ok", "in use (tpu)"),
        ("cpu", Machine(notebook="Colab"), (), "warning", "Change runtime type"),
        ("cpu", Machine(notebook="Jupyter"), (), "ok", "none found"),
        ("cpu", HIDDEN, CUDA, "warning", "unset JAX_PLATFORMS"),
    ],
)
def test_unused_accelerator(
    platform: str, machine: Machine, plugins: tuple[str, ...], level: str, words: str
) -> None:
    finding = check_accelerator(platform, machine, plugins)
    assert finding.level == level
    assert words in f"{finding.detail}; {finding.remedy}"


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
    finding = start_backend({"JAX_PLATFORMS": asked})
    assert isinstance(finding, Finding)
    assert (finding.level, finding.detail) == ("problem", detail)


def test_devices_with_memory() -> None:
    device = namedtuple("device", "platform device_kind memory_stats")
    one = device("gpu", "NVIDIA H200", lambda: {"bytes_limit": 105 * 2**30})
    assert report_devices([one, one]).detail == "2 × NVIDIA H200 (gpu), 105.0 GiB each for JAX"


def test_environment() -> None:
    poor = Machine(
        num_cores=3,
        memory_bytes=2**30,
        working_dir="/here",
        free_disk_bytes=3 * 2**29,
        notebook="Kaggle",
        environment={"JAX_DISABLE_JIT": "1", "JAX_ENABLE_X64": "false"},
    )
    actual = {each.name: (each.level, each.detail) for each in check_environment(poor)}
    slow = actual.pop("JAX_DISABLE_JIT")
    assert slow[0] == "warning"
    assert actual == {
        "cores": ("ok", "3"),
        "memory": ("warning", "1.0 GiB"),
        "disk": ("warning", "1.5 GiB free in /here"),
        "notebook": ("ok", "Kaggle"),
    }
    enough = dataclasses.replace(poor, memory_bytes=2**31, free_disk_bytes=2**31, environment={})
    assert all(each.level == "ok" for each in check_environment(enough))
    locked = dataclasses.replace(enough, writable=False)
    assert [each.name for each in check_environment(locked) if each.level != "ok"] == ["disk"]


def test_compilation_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_compilation_cache(None).level == "ok"
    assert check_compilation_cache("gs://bucket/cache").level == "ok"
    assert check_compilation_cache(str(tmp_path / "new" / "folder")).level == "ok"
    assert check_compilation_cache(str(tmp_path / "file" / "folder")).level == "warning"


@pytest.mark.parametrize(
    ("file", "gpu", "tpu"),
    [
        ("dev/nvidia0", "/dev/nvidia0", ""),
        ("dev/dxg", "/dev/dxg", ""),
        ("dev/accel0", "", "/dev/accel0"),
        ("dev/vfio/0", "", "/dev/vfio/0"),
        ("dev/vfio/vfio", "", ""),
    ],
)
def test_device_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str, gpu: str, tpu: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    for status in (9, 0):  # of nvidia-smi, which counts where no device file is
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\necho NVIDIA H200\nexit {status}\n")
        tool.chmod(0o755)
        machine = inspect_machine(tmp_path)
        assert (machine.gpu, machine.tpu) == (gpu or ("" if status else "NVIDIA H200"), tpu)


def test_container_limits(tmp_path: Path) -> None:
    limits = tmp_path / "sys/fs/cgroup"
    limits.mkdir(parents=True)
    (limits / "memory.max").write_text("1048583\n")
    (limits / "cpu.max").write_text("100000 100000\n")
    machine = inspect_machine(tmp_path)
    assert (machine.memory_bytes, machine.num_cores) == (1048583, 1)
    (limits / "memory.max").write_text("max\n")
    assert inspect_machine(tmp_path).memory_bytes > 1048583


@pytest.mark.parametrize(
    ("setting", "notebook"), [("COLAB_RELEASE_TAG", "Colab"), ("KAGGLE_KERNEL_RUN_TYPE", "Kaggle")]
)
def test_notebooks(monkeypatch: pytest.MonkeyPatch, setting: str, notebook: str) -> None:
    monkeypatch.setenv(setting, "1")
    assert inspect_machine().notebook == notebook


def test_inaccurate_or_failing_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_bfloat16().level == "ok"
    monkeypatch.setattr("train.doctor.accelerator.bfloat16_error", lambda: 0.25)
    assert check_bfloat16().level == "problem"

    def fail() -> NoReturn:
        raise jax.errors.JaxRuntimeError("UNIMPLEMENTED: BF16 x BF16 = F32\nmore")

    monkeypatch.setattr("train.doctor.accelerator.bfloat16_error", fail)
    assert "UNIMPLEMENTED: BF16 x BF16 = F32" in check_bfloat16().detail


def test_speed_is_flops_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def seconds(*arguments: Any) -> float:
        called.append(arguments)
        return 0.5

    monkeypatch.setattr("train.doctor.accelerator.time_feed_forward", seconds)
    assert feed_forward_flops(2, 3, 5) == 5 * (2 * 2 * 3 * 5)
    speed = check_speed("cpu").detail
    assert speed.startswith(f"{5 * 2 * 1024 * 512 * 2048 / 0.5 / 1e9:.0f} GFLOP/s in float32")
    assert check_speed("gpu").detail.startswith("11.0 TFLOP/s in bfloat16")
    assert called == [(1024, 512, 2048, "float32"), (8192, 4096, 16384, "bfloat16")]
