import dataclasses
from typing import Any

import pytest

from tests.train.estimate.test_roofline import CHIP, EXPERIMENT
from train.errors import UsageError
from train.estimate.candidate import Candidate
from train.estimate.quantities import Quantities
from train.estimate.remedies import (
    PrecisionOption,
    changed_flags,
    cheapest_changes,
    largest_parts,
    plan_remedies,
)
from train.estimate.search import MEMORY_MARGIN, rank_candidate, search_candidates, with_best_mesh
from train.estimate.target import Target
from train.experiment import Experiment
from train.parallel.mesh import MeshConfig
from transformer import BlockConfig, TransformerConfig


def target(memory: int = 2**30, shape: tuple[int, ...] = (2, 2, 2)) -> Target:
    return Target("toy", dataclasses.replace(CHIP, memory_bytes=memory), shape)


@pytest.fixture(scope="module")
def quantities() -> Quantities:
    return Quantities.from_experiment(EXPERIMENT, target())


def test_every_candidate_is_valid(quantities: Quantities) -> None:
    every = search_candidates(quantities)
    assert len(every) > 50
    assert len({each.candidate for each in every}) == len(every)
    for each in every:
        mesh = each.candidate.mesh
        assert mesh.data * mesh.fsdp * mesh.tensor * mesh.context * mesh.expert == 8
        rows = mesh.data * mesh.fsdp * each.candidate.grad_accum_steps
        assert EXPERIMENT.batch_size % rows == 0
        assert 4 % mesh.tensor == 0
        assert each.candidate.apply_to(EXPERIMENT).mesh == mesh


def test_fastest_fitting_candidate_is_first(quantities: Quantities) -> None:
    every = search_candidates(quantities)
    fitting = [each for each in every if each.fits]
    assert fitting == every[: len(fitting)]
    times = [each.time.step_seconds for each in fitting]
    assert times == sorted(times)


def test_less_memory_changes_the_choice(quantities: Quantities) -> None:
    first = search_candidates(quantities)[0]
    little = int(first.footprint.total * 0.9)
    other = search_candidates(dataclasses.replace(quantities, target=target(little)))[0]
    assert other.fits
    assert other.footprint.total <= little * (1 - MEMORY_MARGIN)
    assert other.time.step_seconds >= first.time.step_seconds


def test_smallest_is_first_if_nothing_fits(quantities: Quantities) -> None:
    every = search_candidates(dataclasses.replace(quantities, target=target(1000)))
    assert not every[0].fits
    sizes = [each.footprint.total for each in every]
    assert sizes == sorted(sizes)


def with_model(**changes: Any) -> Experiment:
    model: TransformerConfig = dataclasses.replace(EXPERIMENT.model, **changes)
    return dataclasses.replace(EXPERIMENT, model=model)


def test_indivisible_model_is_an_error() -> None:
    odd = dataclasses.replace(EXPERIMENT, batch_size=7)
    message = "target toy: no mesh divides the model .*"
    with pytest.raises(UsageError, match=message):
        search_candidates(Quantities.from_experiment(odd, target(shape=(4, 4, 4))))


def test_flags_reproduce_the_candidate() -> None:
    one = Candidate(MeshConfig(data=1, fsdp=4, tensor=2), "dots", 3)
    assert one.flags() == (
        "--mesh.data 1 --mesh.fsdp 4 --mesh.tensor 2 --grad-accum-steps 3 --model.remat dots"
    )
    assert one.mesh_text() == "fsdp 4 x tensor 2"
    host = Candidate(MeshConfig(data=2, optimizer_placement="host"), "full", 1)
    assert host.flags() == (
        "--mesh.data 2 --mesh.optimizer-placement host --grad-accum-steps 1 --model.remat full"
    )


def test_own_remat_policy_is_tried_too(quantities: Quantities) -> None:
    assert {each.candidate.remat for each in search_candidates(quantities)} == {
        "none",
        "dots",
        "full",
    }
    model = dataclasses.replace(EXPERIMENT.model, remat="offload")
    asked = Quantities.from_experiment(dataclasses.replace(EXPERIMENT, model=model), target())
    assert {each.candidate.remat for each in search_candidates(asked)} == {
        "none",
        "dots",
        "full",
        "offload",
    }


def test_best_mesh_keeps_other_settings() -> None:
    planned, candidate = with_best_mesh(EXPERIMENT, target())
    assert planned.mesh == candidate.mesh
    assert dataclasses.replace(planned, mesh=EXPERIMENT.mesh) == EXPERIMENT
    assert planned.model.precision == EXPERIMENT.model.precision


@pytest.mark.full
def test_remedies_fit(quantities: Quantities) -> None:
    full = dataclasses.replace(EXPERIMENT, mesh=MeshConfig(data=8), batch_size=64)
    full = dataclasses.replace(full, model=dataclasses.replace(full.model, remat="none"))
    full_quantities = Quantities.from_experiment(full, target())
    now = rank_candidate(full_quantities, Candidate.from_experiment(full, 8))
    small = target(int(now.footprint.total * 0.8))
    remedies = plan_remedies(full, small)
    assert remedies[0].startswith(f"largest are {largest_parts(now.footprint)}; give --")
    assert 1 <= len(remedies) <= 3
    assert all("time by estimate" in each for each in remedies)
    assert plan_remedies(full, target()) == []


def test_remedies_with_fewest_changes_come_first(quantities: Quantities) -> None:
    own = EXPERIMENT.model.precision
    now = PrecisionOption(own, rank_candidate(quantities, Candidate(MeshConfig(data=8), "none", 1)))
    best = cheapest_changes(
        now, [PrecisionOption(own, each) for each in search_candidates(quantities)]
    )
    counts = [changed_flags(now, each).count("--") for each in best]
    assert counts == sorted(counts)
    assert len({changed_flags(now, each) for each in best}) == len(best)


def test_other_mixers_are_planned() -> None:
    from transformer import SlidingWindowConfig

    windowed = with_model(
        layer_pattern=(BlockConfig(mixer=SlidingWindowConfig(num_heads=4, window=8)),)
    )
    every = search_candidates(Quantities.from_experiment(windowed, target()))
    assert all(each.candidate.mesh.context == 1 for each in every)
