"""Studies on the queue: what they train, and what they conclude from results made by hand."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from bench.studies import mup
from bench.studies.record import markdown_table, write_record
from bench.studies.stability import experiment
from bench.studies.versus import NEW, OLD, compute, compute_factor, sized, tuned_rates
from configs.versus import CHANGES, EXPERIMENTS
from train.config.io import diff_experiments
from train.scaling.design import count_without_embeddings
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
    found = tuned_rates(runs, results, (64, 96, 384))
    assert found[OLD] == found[NEW] == pytest.approx({64: 4e-3, 96: 1e-3, 384: 5e-4})


def test_compute_factor_of_known_laws() -> None:
    flops = np.array([1e12, 4e12, 1.6e13])
    new = ((1e20 / flops) ** 0.1)[:, None].repeat(3, axis=1)
    old = ((4e20 / flops) ** 0.1)[:, None].repeat(3, axis=1)  # needs four times the compute
    assert compute_factor(flops, old, new) == pytest.approx((4, 4, 4))
    noise = np.array([0.99, 1.0, 1.01])
    factor, low, high = compute_factor(flops, old * noise, new * noise)
    assert low < factor < high


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


def test_rules_are_the_same_at_the_smallest_width() -> None:
    at = dict(base_width=32, depth=2, steps=50)
    assert mup.experiment("mup", 32, 1e-3, **at) == mup.experiment("constant", 32, 1e-3, **at)
    wide, constant = (mup.experiment(rule, 128, 1e-3, **at) for rule in ("mup", "constant"))
    changed = diff_experiments(constant, wide)
    assert changed == {
        "model.logit_scale": (1.0, 0.25),
        "optimizer.matrix_lr_factor": (1.0, 0.25),
    }
