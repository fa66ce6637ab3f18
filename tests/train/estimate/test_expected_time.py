"""Published runs, and the step times expected from them."""

import dataclasses

import pytest

from bench.drills.plan import parse_case
from train.estimate.chips import CHIPS, CPU_EFFICIENCY, FALLBACK_CHIPS, PUBLISHED
from train.estimate.quantities import Candidate, Quantities
from train.estimate.roofline import estimate_step_time, expect_step


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_table_has_the_roofline_of_each_published_run(name: str) -> None:
    run = PUBLISHED[name]
    experiment, target = parse_case(run.plan_arguments)
    quantities = Quantities(experiment, target.hardware)
    candidate = Candidate.from_experiment(experiment, target.num_chips)
    time = estimate_step_time(quantities, candidate, target)
    assert target.chip == CHIPS[name]
    assert time.mfu == pytest.approx(run.mfu_bound, abs=5e-4)
    flops = quantities.token_flops
    assert flops.total(causal=False) / flops.total(causal=True) == pytest.approx(
        run.full_scores_flops_ratio, abs=5e-4
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_run_is_expected_as_published(name: str) -> None:
    run = PUBLISHED[name]
    assert 0.5 < run.efficiency < 1
    assert 0.95 * run.mfu / 1.1 < run.mfu_causal_scores <= run.mfu
    result = expect_step(CHIPS[name], 10.0, run.mfu_bound)
    assert result.mfu == pytest.approx(run.mfu_causal_scores)
    assert result.seconds == pytest.approx(10.0 / run.efficiency)
    assert result.published is run


def test_memory_bound_step_is_expected_below_the_published_mfu() -> None:
    run = PUBLISHED["h100"]
    result = expect_step(CHIPS["h100"], 1.0, 0.1)
    assert result.mfu == pytest.approx(0.1 * run.efficiency)
    assert result.seconds == pytest.approx(1 / run.efficiency)


def test_expectation_never_exceeds_the_published_mfu() -> None:
    run = PUBLISHED["v5p"]
    result = expect_step(CHIPS["v5p"], 1.0, 0.89)
    assert 0.89 * run.efficiency > run.mfu_causal_scores
    assert result.mfu == run.mfu_causal_scores
    assert "no more than" in result.reason
    assert result.seconds == pytest.approx(0.89 / run.mfu_causal_scores)


def test_chips_without_a_published_run_use_the_least_efficient_one() -> None:
    gpus = [name for name in PUBLISHED if CHIPS[name].platform == "gpu"]
    assert min(gpus, key=lambda name: PUBLISHED[name].efficiency) == FALLBACK_CHIPS["gpu"]
    for name in sorted(CHIPS.keys() - PUBLISHED.keys()):
        run = PUBLISHED[FALLBACK_CHIPS[CHIPS[name].platform]]
        result = expect_step(CHIPS[name], 1.0, 0.4)
        assert result.mfu == pytest.approx(0.4 * run.efficiency)
        assert result.published is run
        assert CHIPS[name].device_kind in result.reason


def test_measured_step_replaces_the_forecast() -> None:
    result = expect_step(CHIPS["v5p"], 1.0, 0.6, measured_seconds=2.0)
    assert result.seconds == 2.0
    assert result.mfu == pytest.approx(0.3)


def test_cpu_expectation_uses_measured_efficiency() -> None:
    result = expect_step(dataclasses.replace(CHIPS["t4"], name="here", platform="cpu"), 1.0, 0.5)
    assert result.mfu == 0.5 * CPU_EFFICIENCY
    assert result.seconds == 1 / CPU_EFFICIENCY
