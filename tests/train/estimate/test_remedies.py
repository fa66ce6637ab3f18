"""Precisions against numbers by hand, for the model and the chip of `test_roofline`."""

import dataclasses
from typing import Any

import pytest

from tests.train.estimate.test_roofline import (
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
from train.cli.config_verbs import ConfigArguments
from train.cli.parsing import parse
from train.estimate.chips import ATTAINABLE_FRACTION, CHIPS
from train.estimate.quantities import Candidate, Quantities
from train.estimate.remedies import (
    PRECISION_SETTING,
    PrecisionOption,
    cheapest_changes,
    describe_change,
    generic_remedies,
    narrower_precisions,
    options_in_precision,
    replace_precision,
)
from train.estimate.roofline import estimate_step_time
from train.estimate.search import rank_candidate, search_candidates
from train.estimate.target import Target
from train.experiment import Experiment
from train.parallel.mesh import MeshConfig
from transformer import Precision, TransformerConfig

SLOW = dataclasses.replace(CHIP, fp32_flops_per_second=CHIP.bf16_flops_per_second / 2)
TARGET = Target("toy", SLOW, (2, 2, 2))
LARGE = Experiment(
    model=TransformerConfig(d_model=768, num_layers=12), batch_size=32, grad_accum_steps=4
)

COUNTED_DEVICES = 8


@pytest.fixture(scope="module")
def wide() -> Quantities:
    return Quantities(replace_precision(EXPERIMENT, Precision()), TARGET.hardware)


@pytest.fixture(scope="module")
def narrow() -> Quantities:
    return Quantities(EXPERIMENT, TARGET.hardware)


def test_peak_rates_by_dtype() -> None:
    for name, chip in CHIPS.items():
        rate = chip.peak_flops_per_second
        single, half, brain = rate("float32"), rate("float16"), rate("bfloat16")
        if name == "t4":  # tensor cores of float16 alone
            assert brain == single < half / 8
        else:  # one pass of bfloat16 on a TPU; TF32, of half the speed, on a GPU
            assert brain / single == (2 if chip.platform == "gpu" else 1)
            assert half == brain


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
def test_alternative_precisions_are_never_wider(own: str, names: list[str]) -> None:
    actual = narrower_precisions(Precision.parse(own), CHIP)
    assert [each.name for each in actual] == names


def test_float16_is_tried_only_if_faster() -> None:
    quick = dataclasses.replace(CHIP, fp16_flops_per_second=3 * CHIP.bf16_flops_per_second)
    names = [each.name for each in narrower_precisions(Precision(), quick)]
    assert names == ["bfloat16", "pure_bfloat16", "float16"]


@pytest.mark.full
def test_float32_step(wide: Quantities, narrow: Quantities) -> None:
    layer = 2 * MATRICES + 4 * T * D
    operations = 3 * (L * layer + 2 * V * D) + L * layer
    time = estimate_step_time(wide, candidate(fsdp=8), TARGET)
    assert time.compute_seconds == pytest.approx(
        B * T / 8 * operations / (0.5e9 * ATTAINABLE_FRACTION)
    )
    assert time.mfu == pytest.approx(time.model_flops / time.step_seconds / (8 * 0.5e9))
    assert wide.compute_itemsize == 2 * narrow.compute_itemsize == 4
    # The inputs of layers and of the last norm are twice as wide.
    assert (
        wide.residuals("full").replicated_per_row - narrow.residuals("full").replicated_per_row
        == (L + 1) * T * D * 2
    )


def test_pure_bfloat16_step(narrow: Quantities) -> None:
    pure = Quantities(
        replace_precision(EXPERIMENT, Precision.parse("pure_bfloat16")), TARGET.hardware
    )
    own = narrow.state_bytes(MeshConfig(data=8))
    result = pure.state_bytes(MeshConfig(data=8))
    assert own.weights == 4 * (LAYERS + OTHERS) == 2 * result.weights
    assert own.optimizer == result.optimizer  # moments stay in float32
    assert own.gradients == result.gradients


@pytest.mark.full
def test_best_candidate_in_each_precision(narrow: Quantities) -> None:
    half = replace_precision(EXPERIMENT, Precision.parse("float16"))
    own = narrow.experiment.model.precision
    options = options_in_precision(half, own, TARGET, search_candidates)
    assert [each.best for each in options] == search_candidates(narrow, TARGET)


def test_flags_reproduce_the_option(narrow: Quantities) -> None:
    best = rank_candidate(narrow, Candidate(MeshConfig(data=2, fsdp=4), "dots", 2), TARGET)
    for precision in narrower_precisions(Precision(), CHIP):
        way = PrecisionOption(precision, best)
        flags = way.flags().split()
        given = parse(ConfigArguments, flags, verb="fit", experiment=EXPERIMENT).experiment
        planned = best.candidate.apply_to(replace_precision(EXPERIMENT, precision))
        assert given == planned


def test_precision_counts_as_two_changes(wide: Quantities, narrow: Quantities) -> None:

    def way(quantities: Quantities, accumulate: int, mesh: MeshConfig) -> PrecisionOption:
        one = rank_candidate(quantities, Candidate(mesh, "full", accumulate), TARGET)
        return PrecisionOption(quantities.experiment.model.precision, one)

    data, fsdp = MeshConfig(data=8), MeshConfig(data=1, fsdp=8)
    now = way(wide, 1, data)
    one, two, three = way(wide, 2, data), way(narrow, 1, data), way(narrow, 2, fsdp)
    assert cheapest_changes(now, [three, two, one]) == [one, two, three]
    assert one.changes_from(now) == {"grad-accum-steps": 2}
    assert two.changes_from(now) == {PRECISION_SETTING: "bfloat16"}
    assert "lower precision" in describe_change(now, two)
    assert "lower precision" not in describe_change(now, one)


def test_remedies_name_settings_and_values() -> None:
    assert generic_remedies(LARGE) == [
        "set mesh.fsdp to 8 (now 1)",
        "raise grad_accum_steps (now 4) or lower batch_size (now 32)",
        "set model.remat to full (now none)",
        "lower data.sequence_length (now 256)",
        "lower model.d_model (now 768) or model.num_layers (now 12)",
    ]


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"grad_accum_steps": 32}, "raise grad_accum_steps"),
        ({"model": dataclasses.replace(LARGE.model, remat="full")}, "model.remat"),
        ({"mesh": MeshConfig(fsdp=8)}, "mesh.fsdp"),
    ],
)
def test_applied_settings_are_not_suggested(changes: dict[str, Any], remedy: str) -> None:
    remedies = generic_remedies(dataclasses.replace(LARGE, **changes))
    assert len(remedies) == 4
    assert not any(remedy in each for each in remedies)
