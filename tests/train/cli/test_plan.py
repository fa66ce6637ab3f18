import json
from pathlib import Path

import pytest

from tests.train.support import command, write_config
from tests.train.support import light_compiler as light_compiler

COUNTED_DEVICES = 8

Capture = pytest.CaptureFixture[str]

CONTRACT = {"fits", "mesh", "memory_bytes_per_chip", "step_seconds", "tokens_per_second", "mfu"}


@pytest.mark.full
def test_plan_without_compiler(capsys: Capture) -> None:
    line = ("plan", "gpt2:small", "--target", "v5e:2x2", "--compile-best", "0", "--no-precisions")
    result = command(capsys, *line, "--json")
    assert (result.status, result.error) == (0, "")
    plain = json.loads(result.output)
    assert plain.keys() >= CONTRACT
    assert plain["fits"]
    assert plain["chips"] == 4
    shown = command(capsys, *line)
    assert plain["flags"] in shown.output


@pytest.mark.full
def test_given_mesh_is_not_searched(capsys: Capture) -> None:
    line = ("plan", "gpt2:small", "--target", "v5e:2x2", "--compile-best", "0", "--json")
    plain = json.loads(command(capsys, *line, "--mesh.data", "1", "--mesh.fsdp", "4").output)
    assert plain["candidates"] == 1
    assert plain["mesh"]["fsdp"] == 4
    assert plain["precision"] == "bfloat16"
    assert plain["precisions"]["pure_bfloat16"]["fits"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("gpt2 --target v9:1", "target v9:1: is not known; give one of"),
        ("gpt2:xl --target h100:8 --mesh.tensor 8", "does not divide into 8 parts"),
        ("gpt2 --target v5e:2x2 --mesh.fsdp 3", "does not divide 4 devices"),
        ("gpt2 --target v5e:2x2 --prices none.toml --compile-best 0", "none.toml: No such file"),
    ],
)
def test_plan_errors(capsys: Capture, arguments: str, message: str) -> None:
    result = command(capsys, "plan", *arguments.split())
    assert result.status in (1, 2)
    assert result.output == ""
    assert result.error.count("\n") == 1
    assert message in result.error


@pytest.mark.full
def test_fit_uses_the_planned_mesh(capsys: Capture, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = ("fit", write_config(tmp_path), "--workdir", str(run), "--steps", "1", "--mesh", "auto")
    result = command(capsys, *line)
    assert result.status == 0, result.error
    assert "mesh auto: " in result.error
    logged = json.loads((run / "logbook.jsonl").read_text().splitlines()[0])
    sizes = logged["mesh"]
    assert sizes["data"] * sizes["fsdp"] * sizes["tensor"] * sizes["context"] == 8
