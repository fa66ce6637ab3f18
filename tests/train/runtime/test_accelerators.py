from pathlib import Path

import pytest
from packaging.requirements import Requirement

from train.runtime import accelerators
from train.runtime.accelerators import (
    Finding,
    accelerator_warnings,
    check_accelerator,
    check_plugin,
    find_gpu,
    find_tpu,
)

CUDA = ["jax-cuda13-plugin"]


@pytest.mark.parametrize(
    ("platform", "file", "plugins", "variables", "level", "words"),
    [
        ("cpu", "", [], {}, "ok", "none found"),
        ("cpu", "nvidia0", [], {}, "problem", "pip install -e '.[cuda13]'"),
        ("cpu", "nvidia0", CUDA, {}, "problem", "jax-cuda13-plugin did not start: "),
        ("gpu", "nvidia0", CUDA, {}, "ok", "in use (gpu)"),
        ("cpu", "accel0", [], {}, "problem", "pip install -e '.[tpu]'"),
        ("cpu", "accel0", ["libtpu"], {}, "problem", "libtpu did not start: "),
        ("tpu", "accel0", ["libtpu"], {}, "ok", "in use (tpu)"),
        ("cpu", "", [], {"COLAB_RELEASE_TAG": "1"}, "warning", "Change runtime type"),
        ("cpu", "", [], {"KAGGLE_KERNEL_RUN_TYPE": "1"}, "warning", "choose Settings"),
        ("cpu", "nvidia0", CUDA, {"JAX_PLATFORMS": "cpu"}, "warning", "unset JAX_PLATFORMS"),
    ],
)
def test_unused_accelerator(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    platform: str,
    file: str,
    plugins: list[str],
    variables: dict[str, str],
    level: str,
    words: str,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAX_PLATFORMS", "")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(accelerators, "installed_plugins", lambda: plugins)
    if file:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev" / file).touch()
    finding = check_accelerator(platform, tmp_path)
    assert finding.level == level
    assert words in f"{finding.detail}; {finding.remedy}"


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
        assert find_gpu(tmp_path) == (gpu or ("" if status else "NVIDIA H200"))
        assert find_tpu(tmp_path) == tpu


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


def test_warnings_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(accelerators, "find_gpu", lambda root: "/dev/nvidia0")
    monkeypatch.setattr(accelerators, "installed_plugins", list)
    [line] = accelerator_warnings("cpu")
    assert line.startswith("accelerator: a GPU is present (/dev/nvidia0), but JAX uses the CPU")
    stale = Finding("libtpu", "warning", "1 is not ==2, which jax 3 asks for", "pip install it")
    monkeypatch.setattr(accelerators, "check_plugins", lambda: [stale])
    assert accelerator_warnings("tpu") == [f"libtpu: {stale.detail}; {stale.remedy}"]
