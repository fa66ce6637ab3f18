"""The verbs over many runs, `scaling` and `sweep`, from the command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.train.support import command, losses, write_config
from train.scaling.analysis import format_csv
from train.scaling.laws import ParametricLaw, Runs

Capture = pytest.CaptureFixture[str]

LAW = ParametricLaw(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)


@pytest.fixture
def csv(tmp_path: Path) -> str:
    """Return a file of twelve runs, without noise."""
    parameters, tokens = np.repeat([1e6, 8e6, 6.4e7], 4), np.tile([1e8, 8e8, 6.4e9, 5e10], 3)
    file = tmp_path / "runs.csv"
    file.write_text(format_csv(Runs(parameters, tokens, LAW(parameters, tokens))))
    return str(file)


def test_fits_of_a_csv_as_json(capsys: Capture, csv: str) -> None:
    words = ["scaling", "--from-csv", csv, "--budget", "1e19", "--bootstrap-samples", "4", "--json"]
    result = command(capsys, *words)
    assert (result.status, result.error) == (0, "")
    answer = json.loads(result.output)
    constants = {name: answer["chinchilla"][name] for name in ("E", "A", "B", "alpha", "beta")}
    assert constants == pytest.approx(vars(LAW), rel=1e-3)
    assert set(answer["chinchilla"]["intervals"]) == set(constants)
    [optimum] = answer["optimum"]
    assert optimum["parameters"] == pytest.approx(262e6, rel=0.01)
    assert optimum["tokens_per_parameter"] == pytest.approx(24.2, abs=0.2)
    assert answer["held_out"]["max_relative_error"] < 1e-3


def test_fits_of_a_csv_as_tables_and_files(capsys: Capture, csv: str, tmp_path: Path) -> None:
    words = ["scaling", f"--from-csv={csv}", "--bootstrap-samples", "2"]
    result = command(capsys, *words, "--workdir", str(tmp_path / "fits"))
    assert (result.status, result.error) == (0, "")
    assert "L(N, D) = E + A / N^alpha + B / D^beta" in result.output
    files = sorted(each.name for each in (tmp_path / "fits").iterdir())
    assert files == ["scaling.json", "scaling.png"]  # the runs are in the file that was read


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("scaling --from-csv CSV --budget lots", 2, "--budget lots: is not a positive number"),
        ("scaling --from-csv CSV --bootstrap-samples 1", 2, "bootstrap_samples 1: give 2 or more"),
        ("scaling --from-csv /no/such.csv", 1, "/no/such.csv: No such file"),
        ("scaling --from-csv SAME", 1, "parameters: all runs have 1,000,000"),
        ("scaling", 2, "CONFIG is missing; write python -m train scaling CONFIG --sizes N,... --t"),
        ("scaling quickstart", 2, "give either --sizes or --widths"),
        ("scaling quickstart --sizes 1M --widths 64", 2, "give either --sizes or --widths"),
        ("scaling quickstart --sizes 1M", 2, "--tokens is missing"),
        (
            "scaling quickstart --sizes tiny --tokens 1M",
            2,
            "--sizes tiny: is not a positive number",
        ),
        ("scaling quickstart --widths 65 --tokens 1M", 2, "is not a multiple of 64"),
        ("scaling quickstart --widths 64 --tokens 1M", 2, "cannot identify a law"),
        ("scaling quickstart --widths 64 --tokens 1M --seeds 0", 2, "seeds 0: give 1 or more"),
        ("sweep quickstart", 2, "--set is missing; write --set FIELD=A,B, or --seeds N"),
        ("sweep quickstart --set steps=1,0", 2, "steps 0: give 1 or more"),
        ("sweep quickstart --set steps=1,2 --processes 0", 2, "processes 0: give 1 or more"),
        ("sweep quickstart --set steps=1,2 --minutes -1", 2, "minutes -1.0: give 0 or more"),
    ],
)
def test_errors(
    capsys: Capture, csv: str, tmp_path: Path, line: str, status: int, message: str
) -> None:
    same = tmp_path / "same.csv"
    same.write_text(format_csv(Runs(np.full(6, 1e6), np.arange(1, 7) * 1e6, np.full(6, 3.0))))
    files = {"CSV": csv, "SAME": str(same)}
    result = command(capsys, *(files.get(word, word) for word in line.split()))
    assert (result.status, result.output) == (status, "")
    assert result.error.startswith("error: ")
    assert result.error.count("\n") == 1
    assert message in result.error


@pytest.mark.parametrize("values", ["", " steps=1,many"])
def test_values_that_tyro_refuses(capsys: Capture, values: str) -> None:
    result = command(capsys, *f"sweep quickstart --set{values}".split())
    assert (result.status, result.output) == (2, "")
    assert ("--steps" if values else "--set") in result.error


@pytest.mark.nightly
def test_scaling_trains_and_fits(capsys: Capture, tmp_path: Path) -> None:
    config, workdir = write_config(tmp_path), tmp_path / "laws"
    words = ["scaling", config, "--widths", "8,16", "--tokens", "64,128,192", "--min-steps", "1"]
    words += ["--batch-size", "2", "--workdir", str(workdir), "--bootstrap-samples", "2", "--json"]
    words += ["--model.layer-pattern.0.mixer.num-heads", "2"]
    result = command(capsys, *words)
    assert (result.status, result.error) == (0, "")
    answer = json.loads(result.output)
    assert set(answer["chinchilla"]) == {"E", "A", "B", "alpha", "beta", "intervals"}
    assert len(answer["runs"]) == 6
    assert answer["held_out"]["runs"]
    assert answer["lr_rule"] == "mup"
    for row in answer["sweep"]:
        assert row["status"] == "finished"
        assert len(losses(workdir / row["name"])) == row["steps"] == row["tokens"] // 32
    names = {each.name for each in workdir.iterdir()}
    assert {"runs.csv", "scaling.json", "scaling.png"} < names
    # The runs exported as CSV give the same fit.
    again = command(capsys, "scaling", "--from-csv", str(workdir / "runs.csv"), "--json")
    constants = {name: answer["chinchilla"][name] for name in ("E", "A", "B", "alpha", "beta")}
    refitted = json.loads(again.output)["chinchilla"]
    assert {name: refitted[name] for name in constants} == pytest.approx(constants, rel=1e-6)


def test_dry_run_trains_nothing(capsys: Capture, tmp_path: Path) -> None:
    words = "scaling quickstart --widths 64,128 --tokens 1M,2M,3M --dry-run --json --workdir"
    result = command(capsys, *words.split(), str(tmp_path / "none"))
    assert [row["d_model"] for row in json.loads(result.output)["sweep"]].count(64) == 3
    assert not (tmp_path / "none").exists()
