import dataclasses
from typing import Any

import pytest

from tests.train.plan.test_estimates import CHIP, EXPERIMENT
from train.errors import UsageError
from train.experiment import Experiment
from train.plan.automatic import with_mesh
from train.plan.candidate import Candidate
from train.plan.precisions import InPrecision
from train.plan.quantities import Quantities
from train.plan.remedies import changed, cheapest, largest, remedies
from train.plan.search import SPARE, ranked, search
from train.plan.target import Target
from train.sharding import MeshConfig
from transformer import BlockConfig, TransformerConfig


def target(memory: int = 2**30, shape: tuple[int, ...] = (2, 2, 2)) -> Target:
    return Target("toy", dataclasses.replace(CHIP, memory=memory), shape)


@pytest.fixture(scope="module")
def found() -> Quantities:
    return Quantities.of(EXPERIMENT, target())


def test_every_candidate_can_be_trained(found: Quantities) -> None:
    every = search(found)
    assert len(every) > 50
    assert len({each.candidate for each in every}) == len(every)
    for each in every:
        mesh = each.candidate.mesh
        assert mesh.data * mesh.fsdp * mesh.tensor * mesh.context * mesh.expert == 8
        rows = mesh.data * mesh.fsdp * each.candidate.accumulate
        assert EXPERIMENT.batch_size % rows == 0
        assert 4 % mesh.tensor == 0
        assert each.candidate.applied(EXPERIMENT).mesh == mesh


def test_the_fastest_that_fits_is_first(found: Quantities) -> None:
    every = search(found)
    fitting = [each for each in every if each.fits]
    assert fitting == every[: len(fitting)]
    times = [each.time.step for each in fitting]
    assert times == sorted(times)


def test_little_memory_leads_to_another_choice(found: Quantities) -> None:
    first = search(found)[0]
    little = int(first.footprint.total * 0.9)
    other = search(dataclasses.replace(found, target=target(little)))[0]
    assert other.fits
    assert other.footprint.total <= little * (1 - SPARE)
    assert other.time.step >= first.time.step


def test_when_nothing_fits_the_smallest_is_first(found: Quantities) -> None:
    every = search(dataclasses.replace(found, target=target(1000)))
    assert not every[0].fits
    sizes = [each.footprint.total for each in every]
    assert sizes == sorted(sizes)


def with_model(**changes: Any) -> Experiment:
    model: TransformerConfig = dataclasses.replace(EXPERIMENT.model, **changes)
    return dataclasses.replace(EXPERIMENT, model=model)


def test_a_model_that_cannot_be_divided() -> None:
    odd = dataclasses.replace(EXPERIMENT, batch_size=7)
    message = "target toy: no mesh divides the model .*"
    with pytest.raises(UsageError, match=message):
        search(Quantities.of(odd, target(shape=(4, 4, 4))))


def test_the_flags_make_the_candidate() -> None:
    one = Candidate(MeshConfig(data=1, fsdp=4, tensor=2), "dots", 3)
    assert one.flags() == (
        "--mesh.data 1 --mesh.fsdp 4 --mesh.tensor 2 --accumulate 3 --model.remat dots"
    )
    assert one.shown() == "fsdp 4 x tensor 2"
    host = Candidate(MeshConfig(data=2, optimizer="host"), "full", 1)
    assert host.flags() == ("--mesh.data 2 --mesh.optimizer host --accumulate 1 --model.remat full")


def test_a_policy_that_is_asked_for_is_tried_too(found: Quantities) -> None:
    assert {each.candidate.remat for each in search(found)} == {"none", "dots", "full"}
    model = dataclasses.replace(EXPERIMENT.model, remat="offload")
    asked = Quantities.of(dataclasses.replace(EXPERIMENT, model=model), target())
    assert {each.candidate.remat for each in search(asked)} == {"none", "dots", "full", "offload"}


def test_an_experiment_gets_a_mesh_and_keeps_what_else_it_has() -> None:
    planned, candidate = with_mesh(EXPERIMENT, target())
    assert planned.mesh == candidate.mesh
    assert dataclasses.replace(planned, mesh=EXPERIMENT.mesh) == EXPERIMENT
    assert planned.model.precision == EXPERIMENT.model.precision


@pytest.mark.slow
def test_what_ran_out_of_memory_is_told_what_would_fit(found: Quantities) -> None:
    whole = dataclasses.replace(EXPERIMENT, mesh=MeshConfig(data=8), batch_size=64)
    whole = dataclasses.replace(whole, model=dataclasses.replace(whole.model, remat="none"))
    quantities = Quantities.of(whole, target())
    now = ranked(quantities, Candidate.of(whole, 8))
    small = target(int(now.footprint.total * 0.8))
    said = remedies(whole, small)
    assert said[0].startswith(f"largest are {largest(now.footprint)}; give --")
    assert 1 <= len(said) <= 3
    assert all("time by estimate" in each for each in said)
    assert remedies(whole, target()) == []


def test_the_smallest_changes_come_first(found: Quantities) -> None:
    own = EXPERIMENT.model.precision
    now = InPrecision(own, ranked(found, Candidate(MeshConfig(data=8), "none", 1)))
    best = cheapest(now, [InPrecision(own, each) for each in search(found)])
    counts = [changed(now, each).count("--") for each in best]
    assert counts == sorted(counts)
    assert len({changed(now, each) for each in best}) == len(best)


@pytest.mark.slow
def test_another_mixer_is_planned_too() -> None:
    from transformer import SlidingWindowConfig

    windowed = with_model(pattern=(BlockConfig(mixer=SlidingWindowConfig(heads=4, window=8)),))
    every = search(Quantities.of(windowed, target()))
    assert all(each.candidate.mesh.context == 1 for each in every)
