"""Alternating measurements, and their statistics."""

import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.contender import Contender, Record
from bench.side_by_side import compare, race, spread, table
from train.errors import UserError

# Writes its name and the steps of every turn to the log.
SCRIBE = """
from bench.protocol import Work, serve

def build(settings):
    def run(steps):
        with open(settings["log"], "a") as log:
            log.write(f"{settings['name']} {steps}\\n")
    return Work(run)

serve(build)
"""


def scribes(log: Path, names: str) -> list[Contender]:
    command = (sys.executable, "-c", SCRIBE)
    return [Contender(name, command, {"name": name, "log": str(log)}) for name in names]


def record(
    name: str,
    seconds: tuple[float, ...],
    others: tuple[float | None, ...] = (None,),
    loss: float | None = None,
) -> Record:
    return Record(
        name,
        versions={"jax": "1.2"},
        facts={"parameters": 1234},
        build_seconds=1.5,
        seconds=seconds,
        others=others,
        losses=(loss,) * len(seconds),
        peak_memory_bytes=3 << 20,
    )


def test_rounds_have_one_turn_each_in_random_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    records = race(scribes(log, "abc"), rounds=5, steps=7, warmup=2, seed=1)
    lines = log.read_text().split("\n")
    assert lines[:3] == ["a 2", "b 2", "c 2"]
    turns = [lines[start : start + 3] for start in range(3, 18, 3)]
    assert [sorted(turn) for turn in turns] == [["a 7", "b 7", "c 7"]] * 5
    assert len({tuple(turn) for turn in turns}) > 1
    assert [record.name for record in records] == ["a", "b", "c"]
    assert all(record.losses == (None,) * 5 for record in records)


def test_order_depends_on_the_seed(tmp_path: Path) -> None:
    logs = [tmp_path / "first", tmp_path / "second"]
    for log in logs:
        race(scribes(log, "ab"), rounds=5, steps=1, warmup=1, seed=3)
    assert logs[0].read_text() == logs[1].read_text()


@pytest.mark.parametrize("wrong", [{"rounds": 0}, {"steps": 0}, {"warmup": 0}], ids=str)
def test_race_without_turns_raises(wrong: dict[str, int]) -> None:
    turns: Any = {"rounds": 1, "steps": 1, "warmup": 1, **wrong}
    with pytest.raises(UserError, match="give at least 1"):
        race([], **turns)


def test_ratios_are_taken_round_by_round() -> None:
    # Both slow down by 10 in the last round, which changes the rates but not the ratios.
    base = record("peer", (2.0, 2.0, 2.0, 2.0, 20.0))
    own = record("ours", (1.0, 2.0, 4.0, 0.5, 10.0))
    ours, peer = compare([own, base], "peer", work=120.0)
    assert (ours.rate, ours.ratio, ours.ratio_quartiles) == (60.0, 2.0, (1.0, 2.0))
    assert (peer.rate, peer.ratio, peer.ratio_quartiles) == (60.0, 1.0, (1.0, 1.0))


def test_other_load_is_reported_if_known() -> None:
    reported = record("told", (1.0, 1.0, 1.0), others=(0.5, 0.0, 0.25))
    untold = record("untold", (1.0, 1.0, 1.0), others=(None, None, None))
    assert [row.others for row in compare([reported, untold], "told", work=1.0)] == [0.25, None]


def test_quartiles_are_interpolated() -> None:
    assert spread([4.0, 1.0, 3.0, 2.0]) == (2.5, (1.75, 3.25))
    assert spread([7.0]) == (7.0, (7.0, 7.0))


def test_table_shows_the_results() -> None:
    own = record("ours", (0.5,), others=(0.25,), loss=4.25)
    rows = compare([own, record("peer", (1.0,))], "peer", work=1000)
    screen = StringIO()
    Console(width=90, file=screen).print(table("a step", rows, "peer", "tokens"))
    lines = screen.getvalue().splitlines()
    actual = next(line for line in lines if "ours" in line).replace("│", " ").split()
    assert actual == ["ours", "2,000", "2.00", "2.00-2.00", "25%", "3", "1.5", "s", "4.250"]
    assert any("ours: jax 1.2, parameters 1,234" in line for line in lines)
