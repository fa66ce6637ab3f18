import dataclasses

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
from train.estimate.search import (
    MEMORY_MARGIN,
    RankedCandidate,
    rank_candidate,
    search_candidates,
    with_best_mesh,
)
from train.estimate.target import Target
from train.parallel.mesh import MeshConfig
from transformer import BlockConfig, SlidingWindowConfig


def target(memory: int = 2**30, shape: tuple[int, ...] = (2, 2, 2)) -> Target:
    return Target("toy", dataclasses.replace(CHIP, memory_bytes=memory), shape)


@pytest.fixture(scope="module")
def quantities() -> Quantities:
    return Quantities.from_experiment(EXPERIMENT, target())


@pytest.fixture(scope="module")
def every(quantities: Quantities) -> list[RankedCandidate]:
    return search_candidates(quantities)


def test_every_candidate_is_valid(every: list[RankedCandidate]) -> None:
    assert len(every) > 50
    assert len({each.candidate for each in every}) == len(every)
    for each in every:
        mesh = each.candidate.mesh
        assert mesh.data * mesh.fsdp * mesh.tensor * mesh.context * mesh.expert == 8
        rows = mesh.data * mesh.fsdp * each.candidate.grad_accum_steps
        assert EXPERIMENT.batch_size % rows == 0
        assert 4 % mesh.tensor == 0
        assert each.candidate.apply_to(EXPERIMENT).mesh == mesh


def test_fastest_fitting_candidate_is_first(every: list[RankedCandidate]) -> None:
    fitting = [each for each in every if each.fits]
    assert fitting == every[: len(fitting)]
    times = [each.time.step_seconds for each in fitting]
    assert times == sorted(times)


def test_less_memory_changes_the_choice(
    quantities: Quantities, every: list[RankedCandidate]
) -> None:
    first = every[0]
    little = int(first.footprint.total * 0.9)
    other = search_candidates(dataclasses.replace(quantities, target=target(little)))[0]
    assert other.fits
    assert other.footprint.total <= little * (1 - MEMORY_MARGIN)
    assert other.time.step_seconds >= first.time.step_seconds


def test_smallest_is_first_if_nothing_fits(quantities: Quantities) -> None:
    ranked = search_candidates(dataclasses.replace(quantities, target=target(1000)))
    assert not ranked[0].fits
    sizes = [each.footprint.total for each in ranked]
    assert sizes == sorted(sizes)


def test_indivisible_model_is_an_error() -> None:
    odd = dataclasses.replace(EXPERIMENT, batch_size=7)
    with pytest.raises(UsageError, match="target toy: no mesh divides the model"):
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


def test_own_remat_policy_is_tried_too(every: list[RankedCandidate]) -> None:
    own = dataclasses.replace(EXPERIMENT.model, remat="offload")
    asked = Quantities.from_experiment(dataclasses.replace(EXPERIMENT, model=own), target())
    tried = {each.candidate.remat for each in every}
    assert tried == {"none", "dots", "full"}
    assert {each.candidate.remat for each in search_candidates(asked)} == tried | {"offload"}


def test_best_mesh_keeps_other_settings() -> None:
    planned, candidate = with_best_mesh(EXPERIMENT, target())
    assert planned.mesh == candidate.mesh
    assert dataclasses.replace(planned, mesh=EXPERIMENT.mesh) == EXPERIMENT


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


def test_remedies_with_fewest_changes_come_first(
    quantities: Quantities, every: list[RankedCandidate]
) -> None:
    own = EXPERIMENT.model.precision
    now = PrecisionOption(own, rank_candidate(quantities, Candidate(MeshConfig(data=8), "none", 1)))
    best = cheapest_changes(now, [PrecisionOption(own, each) for each in every])
    counts = [changed_flags(now, each).count("--") for each in best]
    assert counts == sorted(counts)
    assert len({changed_flags(now, each) for each in best}) == len(best)


def test_windows_are_not_cut_along_the_context() -> None:
    block = BlockConfig(mixer=SlidingWindowConfig(num_heads=4, window=8))
    model = dataclasses.replace(EXPERIMENT.model, layer_pattern=(block,))
    windowed = dataclasses.replace(EXPERIMENT, model=model)
    ranked = search_candidates(Quantities.from_experiment(windowed, target(shape=(2, 2, 1))))
    assert all(each.candidate.mesh.context == 1 for each in ranked)
