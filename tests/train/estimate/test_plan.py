import dataclasses
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.train.support import light_compiler as light_compiler
from tests.train.support import tiny
from train.errors import UserError
from train.estimate.batch_shapes import max_batch_shape, resolve_sizes
from train.estimate.chips import CHIPS, PUBLISHED
from train.estimate.plan import (
    Plan,
    PlanOptions,
    chip_price,
    make_plan,
    measure_if_local,
    print_plan,
)
from train.estimate.search import RankedCandidate
from train.estimate.target import Target, parse_target
from train.experiment import Experiment
from train.parallel.mesh import MeshConfig

COUNTED_DEVICES = 8


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return resolve_sizes(tiny(tmp_path_factory.mktemp("text"), batch_size=16))[0]


@pytest.fixture(scope="module")
def here() -> Target:
    return parse_target("here")


@pytest.fixture(scope="module")
def best_plan(experiment: Experiment, here: Target) -> Plan:
    return make_plan(experiment, here, PlanOptions(compile_best=1, tokens=1e6))


@pytest.mark.full
def test_step_is_compiled_for_all_devices(best_plan: Plan) -> None:
    compiled = best_plan.compiled_step
    assert compiled is not None
    size = best_plan.best.memory
    assert compiled.weights == size.weights
    assert compiled.optimizer == size.optimizer
    assert compiled.peak >= compiled.arguments + compiled.temporaries > size.weights
    assert best_plan.fits
    assert best_plan.memory_bytes == compiled.peak


@pytest.mark.full
def test_local_steps_are_measured(best_plan: Plan, here: Target) -> None:
    assert best_plan.measured_seconds is not None
    assert 0 < best_plan.measured_seconds < 600
    chosen, compiled = best_plan.best, best_plan.compiled_step
    assert compiled is not None
    # What was timed is the best forecast, and here costs nothing.
    assert best_plan.expected.seconds == best_plan.measured_seconds
    assert best_plan.dollars(best_plan.measured_seconds) == 0
    assert 0 < best_plan.expected.mfu <= best_plan.mfu_bound
    ways = {
        "elsewhere": (chosen, compiled, parse_target("v5e:2x2")),
        "not compiled": (chosen, None, here),
        "too large": (chosen, dataclasses.replace(compiled, peak=here.memory_bytes + 1), here),
        "too long": (_of_seconds(chosen, 11.0), compiled, here),
    }
    for name, way in ways.items():
        assert measure_if_local(best_plan.experiment, *way) is None, name


def _of_seconds(chosen: RankedCandidate, seconds: float) -> RankedCandidate:
    return chosen._replace(time=dataclasses.replace(chosen.time, compute_seconds=seconds))


def test_figures_of_a_step_time_are_consistent(experiment: Experiment) -> None:
    plain = make_plan(
        experiment,
        parse_target("h100:8"),
        PlanOptions(compile_best=0, tokens=1e9, precisions=False),
    ).as_dict()
    rows, length = max_batch_shape(experiment)
    for suffix in ("", "_bound"):
        step, speed = plain[f"step_seconds{suffix}"], plain[f"tokens_per_second{suffix}"]
        assert speed * step == pytest.approx(rows * length)
        assert plain[f"hours{suffix}"] == pytest.approx(1e9 / speed / 3600)
        dollars = plain[f"hours{suffix}"] * 8 * chip_price(CHIPS["h100"])
        assert plain[f"dollars{suffix}"] == pytest.approx(dollars)
    assert plain["mfu"] * plain["step_seconds"] == pytest.approx(
        plain["mfu_bound"] * plain["step_seconds_bound"]
    )
    assert plain["mfu"] < plain["mfu_bound"]
    assert plain["published"]["mfu"] == PUBLISHED["h100"].mfu


@pytest.mark.full
def test_json_and_tables(best_plan: Plan) -> None:
    plain = json.loads(json.dumps(best_plan.as_dict()))
    assert plain["flags"] == best_plan.best.candidate.flags()
    assert plain["candidates"] == best_plan.num_candidates > 10
    assert plain["tokens"] == best_plan.tokens == 1e6
    assert plain["precision"] == "float32"
    # And float16, where it was measured to be faster.
    assert plain["precisions"].keys() >= {"bfloat16", "pure_bfloat16"}
    console = Console(width=100, record=True, file=io.StringIO())
    print_plan(best_plan, console)
    text = console.export_text()
    for part in ("fits", "Memory of one chip", "measured", best_plan.best.candidate.mesh_text()):
        assert part in text
    assert text.index("expected: ") < text.index("at most: ")
    for each in best_plan.other_precisions:
        assert f"{each.precision.name}: python -m train fit ... {each.flags()}\n" in text


def test_step_that_does_not_fit(experiment: Experiment, here: Target) -> None:
    small = dataclasses.replace(here, chip=dataclasses.replace(here.chip, memory_bytes=10_000))
    best_plan = make_plan(experiment, small, PlanOptions(compile_best=0, precisions=False))
    assert not best_plan.fits
    assert best_plan.memory_bytes > 10_000


def test_plan_without_search(experiment: Experiment, here: Target) -> None:
    cut = dataclasses.replace(experiment, mesh=MeshConfig(data=2, fsdp=2, tensor=2))
    best_plan = make_plan(cut, here, PlanOptions(search=False, compile_best=0, precisions=False))
    assert best_plan.num_candidates == 1
    assert best_plan.experiment == cut


def test_missing_compiler_fails_before_the_search(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    module = sys.modules[make_plan.__module__]  # the package has a function of that name
    monkeypatch.setattr(module, "search_candidates", lambda *arguments: pytest.fail("has searched"))
    with pytest.raises(UserError, match="is not installed"):
        make_plan(experiment, parse_target("v5e:2x2"), PlanOptions())


def test_prices(tmp_path: Path) -> None:
    assert all(chip_price(chip) > 0 for chip in CHIPS.values())
    own = tmp_path / "prices.toml"
    own.write_text("v5e = 0.5\n")
    assert chip_price(CHIPS["v5e"], str(own)) == 0.5
    with pytest.raises(UserError, match="has no price for v5p"):
        chip_price(CHIPS["v5p"], str(own))
    own.write_text("v5e: 1")
    with pytest.raises(UserError, match="is not TOML"):
        chip_price(CHIPS["v5e"], str(own))
