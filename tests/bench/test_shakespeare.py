"""The Shakespeare character benchmark: preparation, error messages and arithmetic."""

import json
import sys
from pathlib import Path

import pytest

from bench import shakespeare
from bench.shakespeare import Options, Run, last_reported, main, prepare, timed
from train.errors import UserError

PREPARE = """
import pathlib
folder = pathlib.Path(__file__).parent
(folder / "val.bin").write_text((folder / "input.txt").read_text().upper())
"""


@pytest.fixture
def options(tmp_path: Path) -> Options:
    checkout = tmp_path / "checkout"
    data = checkout / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    (data / "prepare.py").write_text(PREPARE)
    (checkout / ".git").mkdir()
    text = tmp_path / "text.txt"
    text.write_text("so foul and fair")
    return Options(data=text, nanogpt=checkout, torch_python=Path(sys.executable))


def test_preparation_copies_the_checkout(options: Options, tmp_path: Path) -> None:
    before = sorted(options.nanogpt.rglob("*"))
    copy = prepare(options, tmp_path)
    assert (copy / "data/shakespeare_char/val.bin").read_text() == "SO FOUL AND FAIR"
    assert not (copy / ".git").exists()
    assert sorted(options.nanogpt.rglob("*")) == before


def test_missing_inputs_are_named(options: Options, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    wrong_text = Options(data=nowhere, nanogpt=options.nanogpt)
    with pytest.raises(UserError, match=r"^--data .*nowhere: is not a file"):
        prepare(wrong_text, tmp_path)
    wrong_checkout = Options(data=options.data, nanogpt=nowhere)
    with pytest.raises(UserError, match=r"^--nanogpt .*nowhere: has no data/shakespeare_char"):
        prepare(wrong_checkout, tmp_path)


def test_failed_command_is_named_with_its_last_output(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('a'); sys.exit('no such corpus')"]
    with pytest.raises(UserError, match=r"status 1 \(no such corpus\)"):
        timed(command, tmp_path, tmp_path / "log")


def test_command_is_timed_and_its_output_read(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; print(os.getcwd())"]
    seconds, output = timed(command, tmp_path, tmp_path / "log")
    assert seconds > 0
    assert output == f"{tmp_path}\n"


def test_last_reported_loss_is_parsed() -> None:
    log = "step 0: train loss 4.2, val loss 4.1999\niter 0: loss 4\nstep 9: val loss 1.5"
    assert last_reported(log) == 1.5
    assert last_reported("iter 0: loss 4") is None


def fake_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = iter([Run(10.0, 1.75), Run(20.0, 1.75), Run(30.0, 1.75)])
    theirs = iter([Run(30.0, 1.875, 1.9), Run(40.0, 1.875, 1.9), Run(30.0, 1.875, 1.9)])
    monkeypatch.setattr(shakespeare, "train_ours", lambda *_: next(ours))
    monkeypatch.setattr(shakespeare, "train_nanogpt", lambda *_: next(theirs))


def test_ratios_are_taken_round_by_round(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sides(monkeypatch)
    main(Options(options.data, options.nanogpt, options.torch_python, rounds=3, json=True))
    actual = json.loads(capsys.readouterr().out)
    assert (actual["ratio"], actual["quartiles"]) == (2.0, [1.5, 2.5])
    assert [run["seconds"] for run in actual["runs"]["ours"]] == [10.0, 20.0, 30.0]


def test_table_output(
    options: Options, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_sides(monkeypatch)
    main(Options(options.data, options.nanogpt, options.torch_python, rounds=3))
    lines = capsys.readouterr().out.splitlines()
    cells = [line.replace("│", " ").split() for line in lines]
    assert ["ours", "20.0", "s", "2.00", "1.50-2.50", "1.7500"] in cells
    assert ["nanoGPT", "30.0", "s", "1.00", "1.00-1.00", "1.8750"] in cells
    assert "nanoGPT itself reports 1.9, from 20 batches" in "\n".join(lines)
