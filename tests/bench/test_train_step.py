"""Contenders and options of ``bench/train_step.py``."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import train_step
from bench.contender import ROOT, Contender, Record
from bench.train_step import SHAPES, Options, contenders, main
from train.errors import UserError

HF = Options(against="hf", torch_python=Path(sys.executable))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "model.py").touch()
    return tmp_path


def test_shapes_have_published_sizes() -> None:
    def parameters(name: str) -> int:
        s = SHAPES[name]
        block = 12 * s.width**2 + 13 * s.width
        return (s.vocabulary + s.context) * s.width + s.layers * block + 2 * s.width

    assert {name: parameters(name) for name in SHAPES} == {
        "small": 10_770_816,
        "gpt2": 124_082_688,
        "gpt2-1k": 124_475_904,
        "medium-1k": 354_871_296,
    }


def test_both_sides_have_the_same_settings(checkout: Path) -> None:
    options = replace(HF, against="nanogpt", nanogpt=checkout)
    ours, peer = contenders(options, SHAPES["gpt2"])
    own = {"compile": False, "checkout": str(checkout)}
    assert peer.settings == {**ours.settings, **own}
    assert ours.settings["vocabulary"] == 50_304
    assert ours.settings["threads"] == len(os.sched_getaffinity(0))
    assert (ours.command[-1], peer.command[-1]) == ("bench.peers.ours", "bench.peers.nanogpt")


@pytest.mark.parametrize(
    ("options", "gelu"),
    [(Options("nanogpt"), "erf"), (HF, "tanh"), (replace(HF, gelu="erf"), "erf")],
    ids=["nanogpt", "hf", "asked"],
)
def test_both_sides_use_the_peers_gelu_by_default(
    options: Options, gelu: str, checkout: Path
) -> None:
    sides = contenders(replace(options, nanogpt=checkout), SHAPES["small"])
    assert [side.settings["gelu"] for side in sides] == [gelu, gelu]


def test_batch_size_replaces_that_of_the_shape() -> None:
    sides = contenders(replace(HF, batch=7), SHAPES["small"])
    assert [side.settings["batch"] for side in sides] == [7, 7]


def test_compiled_peer_is_labeled() -> None:
    _, peer = contenders(replace(HF, compile=True), SHAPES["small"])
    assert peer.name == "Hugging Face, compiled"
    assert peer.settings["compile"] is True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options("nanogpt"), "--nanogpt: not given;"),
        (Options("nanogpt", nanogpt=Path("nowhere")), "--nanogpt nowhere: has no model.py;"),
        (replace(HF, torch_python=Path("no/python")), "no/python: is not a program;"),
    ],
    ids=["no checkout", "not a checkout", "no interpreter"],
)
def test_missing_options_are_named(options: Options, words: str) -> None:
    with pytest.raises(UserError) as caught:
        contenders(options, SHAPES["small"])
    assert str(caught.value).startswith(words)


def test_error_is_one_line_with_status_1(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "bench/train_step.py"), "--against", "nanogpt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("error: --nanogpt: not given;")
    assert len(done.stderr.splitlines()) == 1


def fake_race(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the race: ours takes half the seconds of its peer. Return the requested steps."""
    recorded_steps = []

    def race(sides: list[Contender], *, rounds: int, steps: int, **_: int) -> list[Record]:
        recorded_steps.append(steps)
        return [
            Record(
                side.name, {}, {}, 1.0, (seconds,) * rounds, (0.0,) * rounds, (None,) * rounds, 1
            )
            for side, seconds in zip(sides, (0.5, 1.0), strict=True)
        ]

    monkeypatch.setattr(train_step, "race", race)
    return recorded_steps


def test_one_json_object_holds_every_shape(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded_steps = fake_race(monkeypatch)
    main(replace(HF, json=True, rounds=3))
    actual = json.loads(capsys.readouterr().out)
    assert recorded_steps == [5, 5]
    assert actual["machine"]["cores"] >= 1
    small, gpt2 = actual["measurements"]
    assert (small["shape"], gpt2["shape"]) == ("small", "gpt2")
    assert small["reference"] == "Hugging Face"
    ours, peer = small["rows"]
    assert ours["rate"] == 5 * 12 * 256 / 0.5
    assert gpt2["rows"][1]["rate"] == 5 * 2 * 512 / 1.0
    assert (ours["ratio"], peer["ratio"]) == (2.0, 1.0)
    assert ours["record"]["seconds"] == [0.5] * 3


def test_table_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    recorded_steps = fake_race(monkeypatch)
    main(replace(HF, shapes=("small",), steps=2, rounds=3))
    shown = capsys.readouterr().out
    assert recorded_steps == [2]
    assert "6 x 384, 6 heads, T 256, B 12, V 65, float32, 3 rounds" in shown
    assert "12,288" in shown  # 2 x 12 x 256 tokens in half a second
    assert "2.00" in shown
