import os
import re
from importlib import resources

import pytest

from train.errors import UsageError, UserError
from train.estimate.chips import CHIPS
from train.estimate.target import ABSENT_HARDWARE_ENVIRONMENT, parse_target, target_devices

COUNTED_DEVICES = 8


@pytest.mark.parametrize(
    ("name", "count", "platform"),
    [
        ("v5e:1x1", 1, "tpu"),
        ("v5e:4x4", 16, "tpu"),
        ("v4:2x2x4", 16, "tpu"),
        ("v5p:8x8x16", 1024, "tpu"),
        ("V5P:16x16x24", 6144, "tpu"),
        ("v6e:16x16", 256, "tpu"),
        ("h200:8", 8, "gpu"),
        ("h100:3", 3, "gpu"),
        ("tpu7x:2x2x1", 4, "tpu"),
        ("b200:64", 64, "gpu"),
        ("gb200:72", 72, "gpu"),
    ],
)
def test_targets(name: str, count: int, platform: str) -> None:
    target = parse_target(name)
    assert target.num_chips == count
    assert target.hardware.platform == platform
    # A chip of tpu7x is two devices.
    assert target.hardware.count == count * (2 if name.startswith("tpu7x") else 1)
    assert 0 < target.memory_bytes <= target.chip.memory_bytes


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v9:2x2", "is not known; give one of v4, v5e, .*, or here"),
        ("v5e", "has no size; give one as in v5e:4x4, v5p:8x8x16 or h200:8"),
        ("v5e:4by4", "has no size"),
        ("v5e:3x3", "is not a slice of TPU v5 lite; give one of 1x1, .*16x16"),
        ("v5e:16x16*2", "several slices, .* not supported"),
        ("v5p:16x8x8", "is not a slice .*non-decreasing"),
        ("v5p:32x32x32", "is not a slice"),
        ("v4:0x4x4", "is not a slice"),
        ("h100:12", "give up to 8 GPUs, or a multiple of 8"),
        ("h100:0", "give up to 8 GPUs"),
    ],
)
def test_unknown_targets(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=f"^target {re.escape(name)}: {message}"):
        parse_target(name)


@pytest.mark.parametrize(("name", "extra"), [("v5e:2x2", "tpu"), ("h200:8", "cuda13")])
def test_missing_compiler(monkeypatch: pytest.MonkeyPatch, name: str, extra: str) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"^target {name}: needs the compiler .*'jax\[{extra}\]'"):
        target_devices(parse_target(name))


@pytest.mark.parametrize(
    ("name", "platforms", "told"),
    [
        ("v5e:2x2", "cpu", ABSENT_HARDWARE_ENVIRONMENT["tpu"]),
        ("v5e:2x2", "tpu", {}),
        ("h200:8", "cpu", ABSENT_HARDWARE_ENVIRONMENT["gpu"]),
        ("h200:8", "cuda", {}),
    ],
)
def test_environment_for_absent_hardware(
    monkeypatch: pytest.MonkeyPatch, name: str, platforms: str, told: dict[str, str]
) -> None:
    own = {"TPU_WORKER_HOSTNAMES": "own"}
    for variable, value in {"JAX_PLATFORMS": platforms, **own}.items():
        monkeypatch.setenv(variable, value)
    variables = {
        variable for each in ABSENT_HARDWARE_ENVIRONMENT.values() for variable in each
    } - own.keys()
    for variable in variables:
        monkeypatch.setenv(variable, "")  # so that what was there before comes back
        monkeypatch.delenv(variable)
    parse_target(name)
    actual = {each: os.environ[each] for each in (*variables, *own) if each in os.environ}
    assert actual == {**told, **own}


def test_local_target_is_measured() -> None:
    target = parse_target("here")
    assert target.is_local
    assert target.num_chips == 8  # of this test process
    assert target.chip.platform == "cpu"
    # A core does at least a billion operations a second and no chip a quintillion.
    assert 1e8 < target.chip.bf16_flops_per_second < 1e18
    assert 1e7 < target.chip.memory_bandwidth < 1e15
    assert target.memory_bytes > 2**24


def test_gpu_descriptions() -> None:
    for chip in CHIPS.values():
        if chip.platform == "gpu":
            folder = resources.files("train.estimate") / "targets"
            text = (folder / f"{chip.name}.txtpb").read_text()
            assert f"device_memory_size: {chip.memory_bytes}" in text
            assert f'device_description_str: "{chip.device_kind}"' in text
