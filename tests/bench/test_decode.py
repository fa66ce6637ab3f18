"""Contenders and options of ``bench/decode.py``."""

import json
import os
import sys
from pathlib import Path

import pytest

from bench import decode
from bench.contender import Contender, Record
from bench.decode import Options, contenders, main
from train.errors import UserError


def test_both_sides_have_the_same_settings() -> None:
    ours, peer = contenders(Options(torch_python=Path(sys.executable)), 8)
    assert ours.settings == peer.settings
    assert ours.settings["batch"] == 8
    assert ours.settings["threads"] == len(os.sched_getaffinity(0))
    assert ours.command == (sys.executable, "-m", "bench.peers.ours_decoding")
    assert peer.command[1:] == ("-m", "bench.peers.huggingface_decoding")
    with pytest.raises(UserError, match="/no/python: is not a program"):
        contenders(Options(torch_python=Path("/no/python")), 8)


def record(name: str, seconds: tuple[float, ...]) -> Record:
    nothing = (None,) * len(seconds)
    return Record(
        name=name,
        versions={},
        facts={},
        build_seconds=1.0,
        seconds=seconds,
        others=nothing,
        losses=nothing,
        peak_memory_bytes=7,
    )


def test_rates_count_the_new_tokens_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def race(sides: list[Contender], **_: int) -> list[Record]:
        seconds = {"ours": (2.0, 4.0, 2.0), "Hugging Face": (4.0, 4.0, 5.0)}
        return [record(side.name, seconds[side.name]) for side in sides]

    monkeypatch.setattr(decode, "race", race)
    main(Options(batch=(1, 3), new_tokens=10, json=True))
    one, three = json.loads(capsys.readouterr().out)["measurements"]
    assert [row["rate"] for row in one["rows"]] == [5.0, 2.5]
    assert [row["rate"] for row in three["rows"]] == [15.0, 7.5]
    assert [row["ratio"] for row in three["rows"]] == [2.0, 1.0]
    main(Options(batch=(3,), new_tokens=10))
    assert "B 3" in capsys.readouterr().out
