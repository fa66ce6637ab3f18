"""Memory estimates against what compilers reserved (`bench/drills/plan.py`)."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.drills.plan import CASES, ratio
from train.cli.config_verbs import ConfigArguments
from train.cli.parsing import parse
from train.config.experiment_files import find_experiment
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.candidate import Candidate
from train.estimate.footprint import footprint_terms
from train.estimate.quantities import Quantities
from train.estimate.target import parse_target

COMPILED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("footprint_cases.json").read_text()
)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_nine_of_ten_estimates_are_within_ten_percent(platform: str) -> None:
    ratios = [ratio(each) for each in COMPILED if each["platform"] == platform]
    within = sum(abs(each - 1) <= 0.1 for each in ratios)
    assert within >= 0.9 * len(ratios), sorted(ratios)
    assert ratios


def test_at_least_forty_cases_from_the_drill() -> None:
    assert len(COMPILED) >= 40
    assert {each["case"] for each in COMPILED} <= set(CASES.read_text().splitlines())


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [each for each in COMPILED if each["case"].startswith("llama:3.2-1b")][:2],
    ids=lambda each: each["case"].split()[1].replace(":", "-"),
)
def test_stored_terms_match_the_code(case: dict[str, Any]) -> None:
    config, name, *settings = case["case"].split()
    base = find_experiment(config)
    given = parse(ConfigArguments, settings, verb="plan", experiment=base)
    experiment, _ = resolve_sizes(given.experiment)
    target = parse_target(name)
    quantities = Quantities.from_experiment(experiment, target)
    actual = footprint_terms(quantities, Candidate.from_experiment(experiment, target.num_chips))
    assert actual == pytest.approx(case["terms"], rel=0.01)
