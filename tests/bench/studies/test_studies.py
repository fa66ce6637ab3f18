"""Studies on the queue: what they train, and what they conclude from results made by hand."""

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.studies import mup, pretraining, scaling, versus
from bench.studies.finished_runs import compared_fields
from bench.studies.record import markdown_table, shown_arguments, write_record
from bench.studies.stability import experiment
from bench.studies.versus import (
    NEW,
    OLD,
    Frontier,
    compute,
    compute_factors,
    describe_factors,
    interpolate_compute,
    sized,
    tuned_rates,
)
from configs.versus import CHANGES, EXPERIMENTS
from train.config.io import diff_experiments
from train.experiment import Experiment
from train.runtime.signals import PreemptedError
from train.scaling.design import count_without_embeddings
from train.scaling.laws import ParametricLaw
from train.sweep.grid import SweepRun
from train.sweep.sweep_folder import RunResult
from transformer import LanguageModel


def test_both_recipes_have_equal_compute() -> None:
    for width in (64, 128):
        one, other = (sized(recipe, width, 1e-3, 20) for recipe in (OLD, NEW))
        assert compute(one) == pytest.approx(compute(other), rel=0.05)
        parameters = count_without_embeddings(one.model)
        assert compute(one) == pytest.approx(6 * 20 * parameters**2, rel=0.02)


def test_each_change_changes_one_thing() -> None:
    parts = {
        "transformer_pre_norm": ("norm_placement", "final_norm"),
        "transformer_rms_norm": ("norm",),
        "transformer_swiglu": ("feed_forward",),
        "transformer_rope": ("position",),
        "transformer_no_biases": ("bias",),
    }
    assert set(parts) == set(CHANGES)
    for name, allowed in parts.items():
        changed = diff_experiments(EXPERIMENTS[OLD], EXPERIMENTS[name])
        changed.pop("name")
        assert changed
        assert all(any(part in field for part in allowed) for field in changed), (name, changed)


def test_learning_rates_of_larger_widths_follow_from_the_second() -> None:
    losses = {(64, 1e-3): 3.0, (64, 4e-3): 2.0, (96, 1e-3): 2.5, (96, 4e-3): 2.75}
    runs = [
        SweepRun(
            f"{recipe},{width},{rate}",
            {"recipe": recipe, "width": str(width), "rate": str(rate)},
            EXPERIMENTS[OLD],
            1.0,
        )
        for recipe in (OLD, NEW)
        for width, rate in losses
    ]
    results = {
        run.name: RunResult(
            "finished",
            "loss",
            True,
            {"loss": losses[int(run.settings["width"]), float(run.settings["rate"])]},
        )
        for run in runs
    }
    actual = tuned_rates(runs, results, (64, 96, 384))
    assert actual[OLD] == actual[NEW] == pytest.approx({64: 4e-3, 96: 1e-3, 384: 5e-4})


def test_compute_factors_of_known_laws() -> None:
    flops = np.array([1e12, 4e12, 1.6e13])

    def frontier(
        constant: float, spread: Sequence[float] = (1.0,) * 3, flops: np.ndarray = flops
    ) -> Frontier:
        return Frontier(flops, np.outer((constant / flops) ** 0.1, spread))

    old, new = frontier(4e20), frontier(1e20)  # the old recipe needs four times the compute
    for factor in compute_factors(old, new):
        assert factor[:3] == pytest.approx((4.0, 4.0, 4.0))
    # Each recipe has its own compute.
    more = frontier(4e20, flops=1.5 * flops)
    assert [each.value for each in compute_factors(more, new)] == pytest.approx([4.0, 4.0])
    # Beyond the last point, along the last line.
    beyond = compute_factors(new, old)[-1]
    assert beyond.value == pytest.approx(1 / 4)
    assert (beyond.first, beyond.last) == (4e12, 1.6e13)
    alone = compute_factors(frontier(4e20, [1.0]), frontier(1e20, [1.0]))
    assert alone[0].value == pytest.approx(4)
    assert np.isnan(alone[0].low)


@pytest.mark.parametrize("seeds", [2, 5])
def test_few_seeds_have_a_range_and_more_an_interval(seeds: int) -> None:
    flops = np.array([1e12, 4e12, 1.6e13])
    spread = np.linspace(0.99, 1.01, seeds)
    old, new = (Frontier(flops, np.outer((c / flops) ** 0.1, spread)) for c in (4e20, 1e20))
    # All resampled means of two seeds at the extremes.
    reached = [
        flops[1:] / interpolate_compute(flops, (1e20 / flops) ** 0.1 * means, targets).compute
        for means in itertools.product((0.99, 1.01), repeat=3)
        for targets in np.outer((0.99, 1.01), ((4e20 / flops) ** 0.1)[1:])
    ]
    widest, narrowest = np.max(reached, axis=0), np.min(reached, axis=0)
    for index, factor in enumerate(compute_factors(old, new)):
        assert factor.low < factor.value < factor.high
        if seeds == 2:
            assert factor[1:3] == pytest.approx((narrowest[index], widest[index]))
        else:
            assert narrowest[index] * 1.05 < factor.low < factor.high < widest[index] * 0.95
    page = describe_factors((64, 96, 128), old.losses, compute_factors(old, new))
    assert ("95% interval" in page) == (seeds == 5)
    assert ("range over resampled seeds" in page) == (seeds == 2)
    assert "no run lies between" not in page


def test_page_says_where_no_run_lies_between_two_points() -> None:
    flops, losses = np.array([1e9, 6e10, 3e11]), np.array([[6.0], [5.0], [4.0]])
    factors = compute_factors(Frontier(flops, losses * 1.05), Frontier(flops, losses))
    page = describe_factors((32, 64, 96), losses * 1.05, factors)
    assert "60-fold apart at width 64: no run lies between them" in page
    assert "| 64 | 5.2500 |" in page
    assert "| one seed | 1e+09 and 6e+10 |" in page
    assert "| one seed | 6e+10 and 3e+11 |" in page


def test_compute_is_read_off_the_frontier() -> None:
    """No power law: a plateau, and a point that is worse than a smaller one."""
    flops = np.array([1.0, 100.0, 1e4, 1e6])
    losses = np.array([8.0, 4.0, 5.0, 2.0])
    targets = np.array([8.0, np.sqrt(32.0), 4.0, np.sqrt(8.0), 2.0])
    found = interpolate_compute(flops, losses, targets)
    assert found.compute == pytest.approx([1.0, 10.0, 100.0, 1e4, 1e6])
    assert (found.first[-1], found.last[-1]) == (100.0, 1e6)  # 1e4 is no point of the frontier
    assert np.isnan(interpolate_compute(flops, np.ones(4), targets).compute).all()


def test_versus_page_has_the_settings_of_every_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipes' best learning rates differ, and so do the batch sizes of the widths."""
    trained: dict[str, RunResult] = {}

    def train_nothing(runs: list[SweepRun], *_: object, **__: object) -> dict[str, RunResult]:
        results = {}
        for run in runs:
            fields = compared_fields(run.experiment)
            rate = fields["schedule.learning_rate"]
            rotary = fields.get("model.layer_pattern.0.mixer.position.kind") == "RoPE"
            loss = (
                5 + abs(np.log(rate / (1e-3 if rotary else 4e-3))) - compute(run.experiment) / 1e13
            )
            results[run.name] = RunResult("finished", "loss", True, {"loss": loss}, seconds=1.0)
            trained[json.dumps(fields)] = results[run.name]
        return results

    monkeypatch.setattr(versus, "train_all", train_nothing)
    versus.main(
        widths=(32, 64, 96),
        rates=(1e-3, 4e-3),
        seeds=2,
        tokens_per_parameter=3,
        change_width=32,
        vocab_size=512,
        output=tmp_path,
    )
    data = json.loads((tmp_path / "versus.json").read_text())
    # 8 of tuning, 8 more of the frontiers, and of the 14 changes all but the old recipe and the
    # first seed of the new one at the old one's rate, which was tried.
    assert data["runs"] == data["seconds"] == len(trained) == 8 + 8 + 11
    for recipe in (OLD, NEW):
        assert data["flops"][recipe] == [
            compute(sized(recipe, width, 1e-3, 3)) for width in (32, 64, 96)
        ]
    assert data["flops"][OLD] != data["flops"][NEW]
    page = (tmp_path / "versus.md").read_text()
    one = sized(OLD, 32, 4e-3, 3)
    assert one.batch_size == 4
    assert f"| 32 | {OLD} | {compute(one):.3e} | {one.steps} | 4 | 0.004 |" in page
    assert f"| 64 | {NEW} |" in page
    assert "Not all sizes have the same batch size" in page
    assert "at width 32, a batch size of 4 and the learning rate of" in page


def test_depths_share_everything_else() -> None:
    shallow, deep = (experiment("post", depth, 10, rate=1e-3, steps=5) for depth in (6, 12))
    model = dataclasses.replace(shallow.model, num_layers=12)
    assert deep == dataclasses.replace(shallow, model=model)
    pre = experiment("pre", 6, 0, rate=1e-3, steps=5).model
    assert pre.layer_pattern[0].norm_placement == "pre"
    assert pre.final_norm is not None
    LanguageModel(pre)


def test_record_says_how_it_came_about(tmp_path: Path) -> None:
    table = markdown_table(["a", "b"], [["1", "2"]])
    assert table == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    results = {"x": RunResult("finished", seconds=20.0), "y": RunResult("finished", seconds=22.4)}
    write_record("study", "A study", table, {"numbers": [1]}, results, folder=tmp_path)
    page, data = (
        (tmp_path / "study.md").read_text(),
        json.loads((tmp_path / "study.json").read_text()),
    )
    assert data["numbers"] == [1]
    assert (data["runs"], data["seconds"]) == (2, 42)
    assert {"command", "commit", "cpu", "cores"} < data.keys()
    assert page.startswith("# A study\n\n| a | b |")
    assert "study.png" not in page  # there is no figure


def test_shown_arguments_have_no_paths_of_a_machine() -> None:
    given = "--data /home/me/texts --seeds 2 --workdir=/tmp/x --minutes 10 --output out --steps 5"
    assert shown_arguments(given.split()) == ["--data", "DATA", "--seeds", "2", "--steps", "5"]
    assert shown_arguments(["--data=/home/me", "--processes", "2"]) == ["--data", "DATA"]


def test_better_learning_rate_is_chosen_by_validation() -> None:
    accuracies = {3e-4: (0.8, 0.7), 1e-3: (0.75, 0.9)}  # validation, test
    found = {
        pretraining.Setting(task, start, rate, seed).name: {"validation": a + seed / 10, "test": b}
        for task in pretraining.TASKS
        for start in pretraining.STARTS
        for rate, (a, b) in accuracies.items()
        for seed in range(2)
    }
    tried = pretraining.all_rows(found, seeds=2)
    assert len(tried) == 8
    chosen = pretraining.choose_rows(tried)
    assert [(row.task, row.start) for row in chosen] == [
        (task, start) for task in pretraining.TASKS for start in pretraining.STARTS
    ]
    for row in chosen:
        assert (row.learning_rate, row.test) == (3e-4, [0.7, 0.7])
        assert row.validation == pytest.approx(0.85)


def test_rules_are_the_same_at_the_smallest_width() -> None:
    at: Any = dict(base_width=32, depth=2, steps=50)
    assert mup.experiment("mup", 32, 1e-3, **at) == mup.experiment("constant", 32, 1e-3, **at)
    wide, constant = (mup.experiment(rule, 128, 1e-3, **at) for rule in ("mup", "constant"))
    changed = diff_experiments(constant, wide)
    assert changed == {
        "model.logit_scale": (1.0, 0.25),
        "optimizer.matrix_lr_factor": (1.0, 0.25),
    }


def test_scaling_leaves_out_what_takes_too_much_compute() -> None:
    sized = scaling.design((64, 128), (1e5, 4e5), 1e12, seeds=2, vocab_size=512)
    assert all(each.flops <= 1e12 for each in sized)
    assert {(each.run.experiment.model.d_model, each.tokens) for each in sized} == {
        (64, 99_840),
        (64, 400_384),
        (128, 99_840),
    }
    assert len(sized) == 6
    assert all(each.run.experiment.text_data.tokenizer.vocab_size == 512 for each in sized)


def test_scaling_compares_the_corners_of_a_rectangle() -> None:
    losses = {(1, 10): 5.0, (1, 20): 4.5, (1, 40): 4.25, (3, 10): 4.75, (3, 20): 4.0, (9, 10): 4.5}
    assert scaling.held_back(losses) == [
        ("neither", 1, 10, 5.0),
        ("parameters", 3, 10, 4.75),
        ("tokens", 1, 20, 4.5),
        ("both", 3, 20, 4.0),
    ]
    assert scaling.held_back({(1, 10): 5.0, (3, 20): 4.0}) == []


def test_single_laws_hold_the_other_variable() -> None:
    losses = {(n, d): 4 * n**-0.25 * d**-0.5 for n in (1, 16, 81) for d in (1, 4, 9, 16)}
    losses[3, 1] = 1.0  # alone at its size
    of_tokens = scaling.laws_at({at: loss for at, loss in losses.items() if at != (3, 1)}, 0)
    assert [(n, count) for n, _, count in of_tokens] == [(1, 4), (16, 4), (81, 4)]
    assert all(law is not None and law.exponent == pytest.approx(0.5) for _, law, _ in of_tokens)
    assert [n for n, _, _ in scaling.laws_at(losses, 0)] == [1, 16, 81]
    of_size = scaling.laws_at(losses, 1)
    assert [
        law is not None and law.exponent == pytest.approx(0.25) for _, law, _ in of_size[1:]
    ] == [True] * 3
    assert scaling.laws_at({(n, 1): float(n) for n in (1, 2, 3)}, 1) == [(1, None, 3)]


@pytest.mark.full
def test_scaling_page_has_the_law_of_made_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses that follow L(N, D) exactly: the page has its constants and no error."""
    law = ParametricLaw(1.5, 200.0, 500.0, 0.35, 0.4)

    def train_nothing(runs: list[SweepRun], *_: object, **__: object) -> dict[str, RunResult]:
        results = {}
        for run in runs:
            size = count_without_embeddings(run.experiment.model)
            tokens = run.experiment.steps * run.experiment.batch_size * 128
            loss = float(law(np.array(size), np.array(tokens)))
            results[run.name] = RunResult("finished", "loss", True, {"loss": loss})
        return results

    monkeypatch.setattr(scaling, "train_all", train_nothing)
    scaling.main(
        widths=(64, 128, 192), tokens=(1e5, 3e5, 1e6, 3e6), max_flops=1e15, output=tmp_path
    )
    data = json.loads((tmp_path / "scaling.json").read_text())
    assert data["chinchilla"]["alpha"] == pytest.approx(0.35, rel=0.01)
    assert data["chinchilla"]["beta"] == pytest.approx(0.4, rel=0.01)
    assert data["held_out"]["max_relative_error"] < 1e-3
    assert (data["runs"], len(data["fitted_runs"])) == (12, 12)
    page = (tmp_path / "scaling.md").read_text()
    assert "| both | 1.62M | 3M |" in page
    assert (tmp_path / "scaling.csv").read_text().startswith("parameters,tokens,loss\n49344,")


@pytest.mark.full
def test_pretraining_with_other_settings_trains_other_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracies that depend on steps: none of another command is on a page."""
    trained: list[str] = []

    def fit_nothing(
        experiment: Experiment, folder: Path, *, init_from: str = "", quiet: bool
    ) -> SimpleNamespace:
        trained.append(folder.name)
        paths = SimpleNamespace(path=folder, tokenizer=folder / "tokenizer.json")
        return SimpleNamespace(
            experiment=experiment,
            folder=paths,
            model=SimpleNamespace(config=experiment.model),
            final_metrics={"loss": 5.0},
        )

    def evaluate_nothing(run: SimpleNamespace, split: str) -> dict[str, float]:
        return {"accuracy": run.experiment.steps / 1000 + run.experiment.seed / 10}

    monkeypatch.setattr("train.fit", fit_nothing)
    monkeypatch.setattr(pretraining, "evaluate_run", evaluate_nothing)

    def study(data: str = "data", **options: int) -> tuple[dict[str, Any], int]:
        """Return the record and the number of runs on labels that were trained."""
        trained.clear()
        pretraining.main(
            tmp_path / data, workdir=tmp_path / "work", output=tmp_path / "page", **options
        )
        record = json.loads((tmp_path / "page" / "pretraining.json").read_text())
        return record, sum(not name.startswith("pretrained-") for name in trained)

    first, count = study(steps=100, seeds=2)
    assert count == 16
    assert first["runs"] == 17
    assert [row["test"] for row in first["rows"]] == [pytest.approx([0.1, 0.2])] * 4
    page = (tmp_path / "page" / "pretraining.md").read_text()
    assert "| 15.0% | 7.1 |" in page  # 10 points apart: 10 / sqrt(2)
    assert "There is one pretraining run: seeds vary the training on labels only." in page
    again, count = study(steps=100, seeds=2)
    assert count == 0
    assert again["results"] == first["results"]
    longer, count = study(steps=200, seeds=1)
    assert count == 8
    assert [row["test"] for row in longer["rows"]] == [pytest.approx([0.2])] * 4
    assert "| 20.0% | 0.0 |" in (tmp_path / "page" / "pretraining.md").read_text()
    assert study(steps=100, seeds=1, pretraining_steps=10)[1] == 8
    assert study("other", steps=100, seeds=1)[1] == 8
    assert study(steps=100, seeds=2)[1] == 0


def test_seconds_of_a_run_cover_all_its_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 5.0, 100.0, 107.0])
    monkeypatch.setattr(pretraining, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with pytest.raises(PreemptedError), pretraining.Results(tmp_path).timed("run"):
        raise PreemptedError("stopped")
    results = pretraining.Results(tmp_path)
    assert not results.is_finished("run")
    with results.timed("run"):
        pass
    results.add("run", {"test": 0.5})
    reopened = pretraining.Results(tmp_path)
    assert reopened.is_finished("run")
    assert reopened.by_name["run"] == {"seconds": 12.0, "test": 0.5}
