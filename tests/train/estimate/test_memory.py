"""Memory estimates against what compilers reserved (`bench/drills/plan.py`)."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.drills.plan import CASES, case_terms, ratio

COMPILED: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("memory_cases.json").read_text()
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
    assert case_terms(case["case"])._asdict() == pytest.approx(case["terms"], rel=0.01)
