"""The published runs, and what is expected from them."""

import dataclasses

import pytest

from train.cli.kinds import with_kinds
from train.cli.parsing import parse
from train.describe.shape import with_sizes
from train.experiment import Experiment
from train.plan.candidate import Candidate
from train.plan.chips import CHIPS
from train.plan.published import PROCESSOR, PUBLISHED, STAND_IN, expected
from train.plan.quantities import Quantities
from train.plan.roofline import step_time
from train.plan.target import parse_target
from train.registry import find


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_roofline_of_a_published_run_is_what_the_table_says(name: str) -> None:
    run = PUBLISHED[name]
    config, target, *settings = run.case.split()
    default, left = with_kinds(find(config), settings)
    experiment, _ = with_sizes(parse(Experiment, left, verb="plan", default=default))
    quantities = Quantities.of(experiment, parse_target(target))
    time = step_time(quantities, Candidate.of(experiment, quantities.target.count))
    assert target.startswith(f"{name}:")
    assert time.mfu == pytest.approx(run.bound, abs=5e-4)
    flops = quantities.flops
    assert flops.total(causal=False) / flops.total(causal=True) == pytest.approx(
        run.all_scores, abs=5e-4
    )


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_published_run_is_above_the_bound(name: str) -> None:
    run = PUBLISHED[name]
    assert 0.5 < run.efficiency < 1
    assert 0.95 * run.mfu / 1.1 < run.counted <= run.mfu
    assert run.url.startswith("https://")
    assert f"{run.mfu:.1%}" in run.cited()
    assert run.title in run.cited()


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_run_itself_is_expected_as_it_was(name: str) -> None:
    run = PUBLISHED[name]
    found = expected(CHIPS[name], 10.0, run.bound)
    assert found.mfu == pytest.approx(run.counted)
    assert found.seconds == pytest.approx(10.0 / run.efficiency)
    assert found.published is run


def test_a_step_that_is_bound_by_memory_is_not_expected_at_the_published_mfu() -> None:
    run = PUBLISHED["h100"]
    found = expected(CHIPS["h100"], 1.0, 0.1)
    assert found.mfu == pytest.approx(0.1 * run.efficiency)
    assert found.seconds == pytest.approx(1 / run.efficiency)


def test_nothing_is_expected_above_the_best_published() -> None:
    run = PUBLISHED["v5p"]
    found = expected(CHIPS["v5p"], 1.0, 0.89)
    assert 0.89 * run.efficiency > run.counted
    assert found.mfu == run.counted
    assert found.seconds == pytest.approx(0.89 / run.counted)
    assert "no more than" in found.why


@pytest.mark.parametrize("name", sorted(CHIPS.keys() - PUBLISHED.keys()))
def test_a_chip_without_a_figure_says_so(name: str) -> None:
    run = PUBLISHED[STAND_IN]
    found = expected(CHIPS[name], 1.0, 0.4)
    assert found.mfu == pytest.approx(0.4 * run.efficiency)
    assert found.published is None
    assert found.stand_in is run
    assert CHIPS[name].kind in found.why


def test_the_stand_in_is_the_least_efficient_gpu() -> None:
    gpus = [name for name in PUBLISHED if CHIPS[name].platform == "gpu"]
    assert min(gpus, key=lambda name: PUBLISHED[name].efficiency) == STAND_IN


def test_a_step_that_was_timed_is_its_own_forecast() -> None:
    found = expected(CHIPS["v5p"], 1.0, 0.6, timed=2.0)
    assert found.seconds == 2.0
    assert found.mfu == pytest.approx(0.3)


def test_a_processor_is_expected_as_processors_were_timed() -> None:
    found = expected(dataclasses.replace(CHIPS["t4"], name="here", platform="cpu"), 1.0, 0.5)
    assert found.mfu == 0.5 * PROCESSOR
    assert found.seconds == 1 / PROCESSOR
