"""Precisions against numbers by hand, for the model and the chip of `test_estimates`."""

import dataclasses

import pytest

from tests.train.plan.test_estimates import (
    CHIP,
    EXPERIMENT,
    LAYERS,
    MATRICES,
    OTHERS,
    B,
    D,
    L,
    T,
    V,
    candidate,
)
from train.cli.parsing import parse
from train.experiment import Experiment
from train.plan.candidate import Candidate
from train.plan.chips import ATTAINED, CHIPS
from train.plan.precisions import InPrecision, alternatives, in_precision, others
from train.plan.quantities import Quantities
from train.plan.remedies import PRECISION, changed, cheapest, told
from train.plan.roofline import step_time
from train.plan.search import ranked, search
from train.plan.target import Target
from train.sharding import MeshConfig
from transformer import Precision

SLOW = dataclasses.replace(CHIP, flops32=CHIP.flops / 2)
TARGET = Target("toy", SLOW, (2, 2, 2))


@pytest.fixture(scope="module")
def wide() -> Quantities:
    return Quantities.of(in_precision(EXPERIMENT, Precision()), TARGET)


@pytest.fixture(scope="module")
def narrow() -> Quantities:
    return Quantities.of(EXPERIMENT, TARGET)


def test_the_speeds_that_are_known() -> None:
    for chip in CHIPS.values():
        if chip.name == "t4":  # tensor cores of float16 alone
            assert chip.peak("bfloat16") == chip.peak("float32") < chip.peak("float16") / 8
            continue
        # One pass of bfloat16 on a TPU; TF32, of half the speed, on a GPU.
        slower = 2 if chip.platform == "gpu" else 1
        assert chip.peak("bfloat16") / chip.peak("float32") == slower
        assert chip.peak("float16") == chip.peak("bfloat16")


@pytest.mark.parametrize(
    ("own", "names"),
    [
        ("float32", ["bfloat16", "pure_bfloat16"]),
        ("bfloat16", ["pure_bfloat16"]),
        ("float16", ["bfloat16", "pure_bfloat16"]),
        ("pure_bfloat16", []),
        ("compute=bfloat16,softmax=bfloat16", []),  # those with a name have a wider softmax
    ],
)
def test_no_other_precision_is_wider(own: str, names: list[str]) -> None:
    found = others(Precision.named(own), CHIP)
    assert [each.name for each in found] == names


def test_float16_is_tried_where_it_is_faster() -> None:
    quick = dataclasses.replace(CHIP, flops16=3 * CHIP.flops)
    names = [each.name for each in others(Precision(), quick)]
    assert names == ["bfloat16", "pure_bfloat16", "float16"]


@pytest.mark.slow
def test_what_float32_takes(wide: Quantities, narrow: Quantities) -> None:
    layer = 2 * MATRICES + 4 * T * D
    operations = 3 * (L * layer + 2 * V * D) + L * layer
    time = step_time(wide, candidate(fsdp=8))
    assert time.compute == pytest.approx(B * T / 8 * operations / (0.5e9 * ATTAINED))
    assert time.mfu == pytest.approx(time.model_flops / time.step / (8 * 0.5e9))
    assert wide.item == 2 * narrow.item == 4
    # The inputs of layers and of the last norm are twice as wide.
    assert wide.kept("full").whole - narrow.kept("full").whole == (L + 1) * T * D * 2


def test_what_pure_bfloat16_saves(narrow: Quantities) -> None:
    pure = Quantities.of(in_precision(EXPERIMENT, Precision.named("pure_bfloat16")), TARGET)
    own = narrow.state(MeshConfig(data=8))
    found = pure.state(MeshConfig(data=8))
    assert own.weights == 4 * (LAYERS + OTHERS) == 2 * found.weights
    assert own.optimizer == found.optimizer  # moments stay in float32
    assert own.gradients == found.gradients


@pytest.mark.slow
def test_the_best_in_each_precision(narrow: Quantities) -> None:
    half = in_precision(EXPERIMENT, Precision.named("float16"))
    found = list(alternatives(half, TARGET, lambda quantities: search(quantities)[:1]))
    assert [each.precision.name for each in found] == ["bfloat16", "pure_bfloat16"]
    assert found[0].best == search(narrow)[0]


def test_its_flags_make_the_experiment(narrow: Quantities) -> None:
    best = ranked(narrow, Candidate(MeshConfig(data=2, fsdp=4), "dots", 2))
    for precision in others(Precision(), CHIP):
        way = InPrecision(precision, best)
        given = parse(Experiment, way.flags().split(), verb="fit", default=EXPERIMENT)
        planned = best.candidate.applied(in_precision(EXPERIMENT, precision))
        assert given == planned


def test_another_precision_is_a_remedy_that_counts_twice(
    wide: Quantities, narrow: Quantities
) -> None:

    def way(quantities: Quantities, accumulate: int, mesh: MeshConfig) -> InPrecision:
        one = ranked(quantities, Candidate(mesh, "full", accumulate))
        return InPrecision(quantities.experiment.model.precision, one)

    data, fsdp = MeshConfig(data=8), MeshConfig(data=1, fsdp=8)
    now = way(wide, 1, data)
    one, two, three = way(wide, 2, data), way(narrow, 1, data), way(narrow, 2, fsdp)
    assert cheapest(now, [three, two, one]) == [one, two, three]
    assert changed(now, one) == "--accumulate 2"
    assert changed(now, two) == f"--{PRECISION} bfloat16"
    assert told(now, two).endswith("time by estimate, rounds more)")
    assert told(now, one).endswith("time by estimate)")
