"""Fits of sets of runs: what is reported, and what is excluded with a reason."""

import json
from pathlib import Path

import numpy as np
import pytest

from train.cli.main import main
from train.errors import UserError
from train.scaling.analysis import analyze, best_losses, format_csv, predict_held_out, read_csv
from train.scaling.design import format_count, parse_counts
from train.scaling.laws import ParametricLaw, Runs
from train.scaling.scaling_report import print_analysis, write_report, write_runs

LAW = ParametricLaw(E=1.8172, A=482.01, B=2085.43, alpha=0.3478, beta=0.3658)


def grid(noise: float = 0.0) -> Runs:
    """Return four sizes, each with four amounts of data."""
    parameters = np.repeat([1e6, 4e6, 1.6e7, 6.4e7], 4)
    tokens = np.tile([1e8, 4e8, 1.6e9, 6.4e9], 4)
    factors = np.exp(noise * np.random.default_rng(1).standard_normal(16))
    return Runs(parameters, tokens, LAW(parameters, tokens) * factors)


def test_intervals_of_the_optimum_contain_the_true_value() -> None:
    [found] = analyze(grid(noise=1e-3), budgets=[1e19], bootstrap_samples=40).optima
    true = LAW.optimum(1e19)
    assert found.best.parameters == pytest.approx(true.parameters, rel=0.1)
    assert found.parameters.low < true.parameters < found.parameters.high
    assert found.tokens.low < true.tokens < found.tokens.high
    assert found.loss.low < true.loss < found.loss.high
    assert found.extrapolation == pytest.approx(1e19 / (6 * 6.4e7 * 6.4e9))


def test_the_largest_runs_are_predicted_from_the_others() -> None:
    held_out = predict_held_out(grid())
    assert held_out is not None
    # A fifth of 16 runs: those with the most compute.
    assert sorted(zip(held_out.runs.parameters, held_out.runs.tokens, strict=True)) == [
        (1.6e7, 6.4e9),
        (6.4e7, 1.6e9),
        (6.4e7, 6.4e9),
    ]
    assert np.abs(held_out.relative_errors).max() < 1e-4
    runs = grid()
    runs.loss[runs.flops.argmax()] *= 1.25
    wrong = predict_held_out(runs)
    assert wrong is not None
    assert wrong.relative_errors.min() == pytest.approx(1 / 1.25 - 1, abs=1e-3)


def test_power_laws_fit_the_frontier() -> None:
    runs = Runs(
        np.array([1e6, 1e6, 2e6, 2e6]), np.array([1e7, 2e7, 1e7, 2e7]), np.array([4.0, 3, 3.5, 2])
    )
    points = {name: [x.tolist(), y.tolist()] for name, (x, y) in best_losses(runs).items()}
    assert points == {
        "parameters": [[1e6, 2e6], [3.0, 2.0]],
        "tokens": [[1e7, 2e7], [3.5, 2.0]],
        # The two runs of 1.2e14 FLOPs: only the better one is on the frontier.
        "compute": [[6e13, 1.2e14, 2.4e14], [4.0, 3.0, 2.0]],
    }


def test_diverged_runs_are_excluded_with_a_note() -> None:
    runs = grid()
    runs.loss[[3, 8]] = np.nan, np.inf
    analysis = analyze(runs, bootstrap_samples=2)
    assert len(analysis.runs.loss) == 14
    assert analysis.law.alpha == pytest.approx(LAW.alpha, rel=1e-3)
    assert analysis.notes == ("2 runs diverged and are left out of the fits",)


def test_loss_that_does_not_fall_gives_a_reason_instead_of_a_law() -> None:
    runs = grid()
    rising = Runs(runs.parameters, runs.tokens, 2 + runs.parameters / 1e8 + runs.tokens / 1e11)
    analysis = analyze(rising, budgets=[1e18], bootstrap_samples=2)
    assert analysis.kaplan["parameters"] is None
    assert any(note.startswith("L(parameters): the loss does not fall") for note in analysis.notes)


def test_too_few_runs_hold_none_out() -> None:
    analysis = analyze(grid().select(np.arange(0, 15, 3)), bootstrap_samples=2)
    assert analysis.held_out is None
    assert "too few runs to hold the largest out and predict them" in analysis.notes


def test_report_files_are_valid_and_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    analysis = analyze(grid(), budgets=[1e18], bootstrap_samples=2)
    print_analysis(analysis)
    shown = capsys.readouterr().out
    for text in ("E     1.8172", "beta  0.3658", "Compute-optimal models", "predicted"):
        assert text in shown
    write_runs(analysis.runs, str(tmp_path / "new"))
    figure = write_report(analysis, str(tmp_path / "new"))
    assert figure.read_bytes().startswith(b"\x89PNG")
    saved = json.loads((tmp_path / "new" / "scaling.json").read_text(), parse_constant=pytest.fail)
    assert saved["chinchilla"]["E"] == analysis.law.E
    again = read_csv(str(tmp_path / "new" / "runs.csv"))
    for one, other in zip(again, analysis.runs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_csv_columns_may_be_in_any_order_beside_others(tmp_path: Path) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("\ufeffname, loss,tokens,parameters\n" + "a,3.5,1e7,2e6\n\n" * 5)
    runs = read_csv(str(file))
    assert [each.tolist() for each in runs] == [[2e6] * 5, [1e7] * 5, [3.5] * 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column parameters; its first line must name parameters, tokens, loss"),
        ("parameters,tokens\n1,2\n", "has no column loss"),
        ("parameters,tokens,loss\n1,2,3\n", "has 1 runs, and the law has 5 constants; give 5"),
        (
            "parameters,tokens,loss\n1,2,3\n\n1,2\n",
            "line 4: loss is missing: give a positive number",
        ),
        ("parameters,tokens,loss\n1,2,0\n", "line 2: loss 0: give a positive number"),
        ("parameters,tokens,loss\n-1,2,3\n", "line 2: parameters -1: give a positive"),
        ("parameters,tokens,loss\n1,2,nan\n", "line 2: loss nan: give a positive number"),
    ],
)
def test_damaged_csv_raises(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "runs.csv"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_csv(str(file))
    assert str(refused.value).startswith(str(file))
    assert message in str(refused.value)


def test_csv_that_is_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name and folder are those of a report."""
    monkeypatch.chdir(tmp_path)
    runs = Runs(np.array([1e6]), np.array([123456789.0]), np.array([3.25]))
    assert format_csv(runs) == "parameters,tokens,loss\n1000000,123456789,3.25\n"
    text = format_csv(grid()).replace("\n", ",kept\n")
    (tmp_path / "runs.csv").write_text(text)
    arguments = ["scaling", "--from-csv", "runs.csv", "--workdir", ".", "--bootstrap-samples", "2"]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0
    assert (tmp_path / "runs.csv").read_text() == text


@pytest.mark.parametrize("seed", range(2))
def test_noise_without_a_law_is_analyzed(seed: int) -> None:
    """Constants of its fits leave the range of floats; JSON has neither NaN nor infinity."""
    random = np.random.default_rng(seed)
    parameters = random.choice([3.5e5, 5.8e6], 8)
    tokens = random.choice([4.9e6, 1e7, 9.8e7], 8)
    runs = Runs(parameters, tokens, 3 + 0.01 * random.standard_normal(8))
    analysis = analyze(runs, budgets=[1e15], bootstrap_samples=6)
    json.dumps(analysis.as_dict(), allow_nan=False)
    print_analysis(analysis)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("1.1M,500k", [1.1e6, 5e5]), ("1e19", [1e19]), (" 2B , 2e9,7", [2e9, 7.0]), ("3T", [3e12])],
)
def test_counts_with_suffixes(text: str, numbers: list[float]) -> None:
    assert parse_counts(text, "--sizes") == numbers


@pytest.mark.parametrize("text", ["", "1M,,2M", "-1", "0", "M", "1e400", "nan"])
def test_invalid_counts_raise(text: str) -> None:
    with pytest.raises(UserError, match="is not a positive number"):
        parse_counts(text, "--sizes")


def test_counts_are_shown_with_three_digits() -> None:
    shown = [format_count(each) for each in (12, 999.9, 1234, 999_600, 1.5e6, 2e9, 6.4e13)]
    assert shown == ["12", "1k", "1.23k", "1M", "1.5M", "2B", "64T"]
