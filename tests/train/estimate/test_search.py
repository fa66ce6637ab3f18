import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from tests.train.estimate.test_roofline import CHIP, EXPERIMENT
from train.errors import UsageError
from train.estimate.quantities import Candidate, Quantities
from train.estimate.remedies import (
    PrecisionOption,
    cheapest_changes,
    largest_parts,
    plan_remedies,
)
from train.estimate.search import (
    MEMORY_MARGIN,
    MIN_CONTEXT_PARALLEL_LENGTH,
    RankedCandidate,
    candidate_meshes,
    own_candidate,
    rank_candidate,
    search_candidates,
    with_best_mesh,
)
from train.estimate.target import Target
from train.parallel.mesh import MeshConfig
from transformer import AttentionConfig, BlockConfig, MoEConfig, SlidingWindowConfig


def target(memory: int = 2**30, shape: tuple[int, ...] = (2, 2, 2)) -> Target:
    return Target("toy", dataclasses.replace(CHIP, memory_bytes=memory), shape)


@pytest.fixture(scope="module")
def quantities() -> Quantities:
    return Quantities(EXPERIMENT, target().hardware)


@pytest.fixture(scope="module")
def every(quantities: Quantities) -> list[RankedCandidate]:
    return search_candidates(quantities, target())


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
    # Sixteen rows: each of eight chips has two, or one at a time.
    eight = {each.candidate.grad_accum_steps for each in every if each.candidate.mesh.fsdp == 8}
    assert eight == {1, 2}


def test_fastest_fitting_candidate_is_first(every: list[RankedCandidate]) -> None:
    fitting = [each for each in every if each.fits]
    assert fitting == every[: len(fitting)]
    times = [each.time.step_seconds for each in fitting]
    assert times == sorted(times)


def test_less_memory_changes_the_choice(
    quantities: Quantities, every: list[RankedCandidate]
) -> None:
    first = every[0]
    little = int(first.memory.total * 0.9)
    other = search_candidates(quantities, target(little))[0]
    assert other.fits
    assert other.memory.total <= little * (1 - MEMORY_MARGIN)
    assert other.time.step_seconds >= first.time.step_seconds


def test_smallest_is_first_if_nothing_fits(quantities: Quantities) -> None:
    ranked = search_candidates(quantities, target(1000))
    assert not ranked[0].fits
    sizes = [each.memory.total for each in ranked]
    assert sizes == sorted(sizes)


def test_indivisible_model_is_an_error() -> None:
    odd, large = dataclasses.replace(EXPERIMENT, batch_size=7), target(shape=(4, 4, 4))
    with pytest.raises(UsageError, match="target toy: no mesh divides the model"):
        search_candidates(Quantities(odd, large.hardware), large)


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
    asked = Quantities(dataclasses.replace(EXPERIMENT, model=own), target().hardware)
    tried = {each.candidate.remat for each in every}
    assert tried == {"none", "dots", "full"}
    assert {each.candidate.remat for each in search_candidates(asked, target())} == tried | {
        "offload"
    }


def test_best_mesh_keeps_other_settings() -> None:
    planned, candidate = with_best_mesh(EXPERIMENT, target())
    assert planned.mesh == candidate.mesh
    assert dataclasses.replace(planned, mesh=EXPERIMENT.mesh) == EXPERIMENT


@pytest.mark.full
def test_remedies_fit(quantities: Quantities) -> None:
    full = dataclasses.replace(EXPERIMENT, mesh=MeshConfig(data=8), batch_size=64)
    full = dataclasses.replace(full, model=dataclasses.replace(full.model, remat="none"))
    [now] = own_candidate(Quantities(full, target().hardware), target())
    small = target(int(now.memory.total * 0.8))
    remedies = plan_remedies(full, small)
    assert remedies[0].startswith(f"largest are {largest_parts(now.memory)}; give --")
    assert 1 <= len(remedies) <= 3
    assert all("time by estimate" in each for each in remedies)
    assert plan_remedies(full, target()) == []


def test_remedies_with_fewest_changes_come_first(
    quantities: Quantities, every: list[RankedCandidate]
) -> None:
    own = EXPERIMENT.model.precision
    unsaved = Candidate(MeshConfig(data=8), "none", 1)
    now = PrecisionOption(own, rank_candidate(quantities, unsaved, target()))
    best = cheapest_changes(now, [PrecisionOption(own, each) for each in every])
    changes = [frozenset(each.changes_from(now)) for each in best]
    assert [len(names) for names in changes] == sorted(len(names) for names in changes)
    assert len(set(changes)) == len(best)


def sizes(length: int = MIN_CONTEXT_PARALLEL_LENGTH, **changes: Any) -> tuple[set[int], set[int]]:
    """Return the sizes of the axes `context` and `expert` that are searched for eight chips."""
    model: Any = dataclasses.replace(EXPERIMENT.model, **changes)
    quantities: Any = SimpleNamespace(
        sequence_length=length,
        experiment=dataclasses.replace(EXPERIMENT, model=model),
    )
    meshes = list(candidate_meshes(quantities, target()))
    assert len(set(meshes)) == len(meshes)
    products = {each.data * each.fsdp * each.tensor * each.context * each.expert for each in meshes}
    assert products == {8}
    return {each.context for each in meshes}, {each.expert for each in meshes}


def test_context_is_cut_for_long_attention_and_experts_by_common_divisors() -> None:
    assert sizes() == ({1, 2, 4, 8}, {1})
    assert sizes(MIN_CONTEXT_PARALLEL_LENGTH + 8) == ({1, 2, 4}, {1})
    assert sizes(MIN_CONTEXT_PARALLEL_LENGTH - 16) == ({1}, {1})
    window = BlockConfig(mixer=SlidingWindowConfig(num_heads=4, window=8))
    assert sizes(layer_pattern=(window,)) == ({1}, {1})
    experts = [
        BlockConfig(AttentionConfig(num_heads=4), feed_forward=MoEConfig(num_experts=count))
        for count in (4, 6)
    ]
    assert sizes(layer_pattern=tuple(experts[:1]))[1] == {1, 2, 4}
    assert sizes(layer_pattern=tuple(experts), num_layers=2)[1] == {1, 2}
