"""The estimates against numbers by hand: D 8, N 4, H 2, F 16, V 32, L 3, B 16, T 64."""

import dataclasses
from typing import Any

import pytest

from train.data.config import DataConfig
from train.experiment import Experiment
from train.optimizers import Muon
from train.plan.candidate import Candidate
from train.plan.chips import ATTAINED, Chip
from train.plan.footprint import footprint
from train.plan.quantities import Quantities
from train.plan.roofline import ring, step_time
from train.plan.target import Target
from train.plan.traffic import GATHERS, sent
from train.sharding import MeshConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Precision,
    TransformerConfig,
)

D, F, V, L, B, T = 8, 16, 32, 3, 16, 64
CHIP = Chip(
    name="toy",
    kind="toy",
    platform="tpu",
    flops=1e9,
    memory=2**30,
    bandwidth=1e8,
    links=6e6,
    per_host=4,
    network=1e5,
    dimensions=3,
    latency=0.0,
)
EXPERIMENT = Experiment(
    model=TransformerConfig(
        vocab_size=V,
        vocab_multiple=1,
        width=D,
        layers=L,
        pattern=(
            BlockConfig(
                mixer=AttentionConfig(heads=4, bias=False, form="reference"),
                feed_forward=FeedForwardConfig(hidden=F, bias=False),
            ),
        ),
        tied=True,
        precision=Precision.named("bfloat16"),
        remat="full",
        loop="scan",
    ),
    data=DataConfig(sequence_length=T),
    batch_size=B,
)
MATRICES = 4 * D * D + 2 * D * F
NORMS = 2 * 2 * D
LAYERS = L * (MATRICES + NORMS)
OTHERS = V * D + 2 * D


@pytest.fixture(scope="module")
def quantities() -> Quantities:
    return Quantities.of(EXPERIMENT, Target("toy", CHIP, (2, 4, 4)))


def candidate(**sizes: Any) -> Candidate:
    accumulate = sizes.pop("accumulate", 1)
    return Candidate(dataclasses.replace(MeshConfig(data=1), **sizes), "full", accumulate)


def test_what_there_is_to_count(quantities: Quantities) -> None:
    assert quantities.layer_weights == LAYERS
    assert quantities.other_weights == OTHERS
    assert quantities.largest_layer == MATRICES + NORMS
    assert quantities.item == 2
    assert quantities.scored


def test_moments_of_the_host_are_on_the_chip_a_layer_at_a_time(
    quantities: Quantities,
) -> None:
    near, far = (footprint(quantities, candidate(optimizer=where)) for where in ("device", "host"))
    assert near.optimizer >= 2 * 4 * (LAYERS + OTHERS)
    assert far.optimizer == 0
    # They come and they go; there are gradients then, and nothing else that was kept.
    share = max(MATRICES + NORMS, OTHERS) / (LAYERS + OTHERS)
    assert far.temporaries == max(
        near.temporaries, near.gradients + int(2 * share * near.optimizer)
    )
    assert far.weights == near.weights


@pytest.mark.slow
def test_what_is_kept_of_a_layer_that_is_computed_again_is_its_input(
    quantities: Quantities,
) -> None:
    full, none = quantities.kept("full"), quantities.kept("none")
    inputs = L * T * D * 2
    assert inputs <= full.whole < 4 * inputs  # and what is there once
    # Scores of every head at least, whatever else.
    assert none.cut > L * 4 * T * T * 2 > full.cut


def test_data_parallelism_sends_gradients_twice_around(quantities: Quantities) -> None:
    weights = 2 * (LAYERS + OTHERS)
    assert sent(quantities, candidate(data=4)) == {"data": pytest.approx(2 * weights * 3 / 4)}
    twice = sent(quantities, candidate(data=4, accumulate=2))
    assert twice == {"data": pytest.approx(2 * 2 * weights * 3 / 4)}


def test_fsdp_gathers_weights_and_scatters_gradients(quantities: Quantities) -> None:
    weights = 2 * (LAYERS + OTHERS)
    found = sent(quantities, candidate(fsdp=8, accumulate=2))
    assert found == {"fsdp": pytest.approx(2 * weights * (GATHERS + 1) * 7 / 8)}


def test_tensor_parallelism_sums_activations(quantities: Quantities) -> None:
    activations = B * T // 2 * D * 2
    found = sent(quantities, candidate(data=2, tensor=4))
    assert found["tensor"] == pytest.approx(5 * L * 2 * activations * 3 / 4)
    # Each chip has a quarter of the gradients to sum over its copy.
    weights = 2 * (LAYERS + OTHERS) / 4
    assert found["data"] == pytest.approx(2 * weights * 1 / 2)


def test_keys_and_values_go_round(quantities: Quantities) -> None:
    a_hop = B * T // 4 * 2 * D * 2
    assert sent(quantities, candidate(context=4)) == {"context": pytest.approx(4 * L * a_hop * 3)}


def test_the_time_of_one_chip(quantities: Quantities) -> None:
    time = step_time(quantities, candidate())
    layer = 2 * MATRICES + 4 * T * D
    operations = 3 * (L * layer + 2 * V * D) + L * layer
    assert time.compute == pytest.approx(B * T * operations / (1e9 * ATTAINED))
    causal = 2 * MATRICES + 4 * (T + 1) / 2 * D
    assert time.model_flops == pytest.approx(3 * B * T * (L * causal + 2 * V * D))
    assert time.links == {}
    assert time.step == max(time.compute, time.memory) == time.overlapped
    assert time.in_turn == time.compute + time.memory
    # Of 32 chips together, whatever part of them a candidate takes.
    assert time.mfu == pytest.approx(time.model_flops / time.step / 32e9)


def test_a_processor_does_one_after_the_other(quantities: Quantities) -> None:
    time = step_time(quantities, candidate(fsdp=8, tensor=4))
    alone = dataclasses.replace(time, beside=False)
    assert alone.step == pytest.approx(time.in_turn)
    assert alone.step > time.step
    processor = Target("toy", dataclasses.replace(CHIP, platform="cpu"), (32,))
    own = dataclasses.replace(quantities, target=processor)
    assert not step_time(own, candidate(fsdp=8, tensor=4)).beside


@pytest.mark.slow
def test_muon_makes_products_of_its_own(quantities: Quantities) -> None:
    muon = dataclasses.replace(EXPERIMENT, optimizer=Muon())
    slow = dataclasses.replace(CHIP, flops32=1e8)
    found = Quantities.of(muon, Target("toy", slow, (2, 4, 4)))
    # Five times X X' and B X, of 8 x 8 or 8 x 16, and A A, of 8 x 8.
    square, wide = 5 * (2 * 2 * D**3 + 2 * D**3), 5 * (2 * 2 * D * D * F + 2 * D**3)
    assert found.update == L * (4 * square + 2 * wide)
    assert quantities.update == 0
    own, other = step_time(quantities, candidate(fsdp=8)), step_time(found, candidate(fsdp=8))
    assert other.compute - own.compute == pytest.approx(found.update / 8 / (1e8 * ATTAINED))
    assert other.model_flops == own.model_flops


def test_moments_of_the_host_are_waited_for(quantities: Quantities) -> None:
    slow = Target("toy", dataclasses.replace(CHIP, host=1e6), (2, 4, 4))
    own = dataclasses.replace(quantities, target=slow)
    near, far = (step_time(own, candidate(fsdp=8, optimizer=x)) for x in ("device", "host"))
    both_ways = 2 * quantities.state(MeshConfig(data=1, fsdp=8)).optimizer / (1e6 * ATTAINED)
    assert near.host == {}
    assert far.host == {"optimizer": pytest.approx(both_ways)}
    assert far.step == pytest.approx(near.step + both_ways)
    assert far.overlapped == max(near.overlapped, both_ways)


@pytest.mark.slow
@pytest.mark.parametrize("bandwidth", [1e3, 1e12])
def test_what_is_offloaded_comes_and_goes_meanwhile(
    quantities: Quantities, bandwidth: float
) -> None:
    slow = Target("toy", dataclasses.replace(CHIP, host=bandwidth), (2, 4, 4))
    own = dataclasses.replace(quantities, target=slow)
    dots, offload = (
        step_time(own, Candidate(MeshConfig(data=8), remat, 2)) for remat in ("dots", "offload")
    )
    kept = {remat: own.kept(remat).of(B / 8, 1) for remat in ("dots", "full")}
    both_ways = 2 * (kept["dots"] - kept["full"]) / (bandwidth * ATTAINED)
    assert offload.host == {"activations": pytest.approx(both_ways)}
    assert offload.step == max(dots.step, offload.host["activations"])
    assert (offload.step > dots.step) == (bandwidth == 1e3)


def test_tensor_messages_are_waited_for_and_others_are_not(quantities: Quantities) -> None:
    time = step_time(quantities, candidate(fsdp=8, tensor=4))
    busy = max(time.compute, time.memory, time.links["fsdp"])
    assert time.step == pytest.approx(busy + time.links["tensor"])
    assert time.overlapped <= time.step <= time.in_turn


@pytest.mark.parametrize(
    ("mesh", "axis", "dimensions", "hops"),
    [
        (dict(tensor=2), "tensor", 1, 1),
        (dict(tensor=4), "tensor", 2, 3),  # fills the dimension of 2, then that of 4
        (dict(fsdp=32), "fsdp", 3, 5),
        (dict(fsdp=16, tensor=2), "fsdp", 2, 4),
        (dict(data=4, fsdp=8), "data", 1, 2),
    ],
)
def test_an_axis_has_the_links_of_the_dimensions_that_it_fills(
    mesh: dict[str, int], axis: str, dimensions: int, hops: int
) -> None:
    torus = Target("toy", dataclasses.replace(CHIP, latency=1.0), (2, 4, 4))
    found = ring(torus, candidate(**mesh), axis)
    assert found.bandwidth == dimensions * 2e6
    assert found.latency == hops


@pytest.mark.parametrize(
    ("mesh", "axis", "bandwidth"),
    [
        (dict(tensor=8), "tensor", 100.0),
        (dict(fsdp=8), "fsdp", 100.0),
        (dict(fsdp=16), "fsdp", 8.0),  # eight cards of each host
        (dict(fsdp=2, tensor=8), "fsdp", 1.0),  # each GPU has its own ring
        (dict(fsdp=4, tensor=4), "fsdp", 2.0),
    ],
)
def test_gpus_of_a_host_and_of_several(mesh: dict[str, int], axis: str, bandwidth: float) -> None:
    chip = dataclasses.replace(
        CHIP, platform="gpu", dimensions=0, per_host=8, links=100.0, network=1.0
    )
    assert ring(Target("gpus", chip, (16,)), candidate(**mesh), axis).bandwidth == bandwidth
