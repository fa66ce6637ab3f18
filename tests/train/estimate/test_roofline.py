"""The estimates against numbers by hand: D 8, N 4, H 2, F 16, V 32, L 3, B 16, T 64."""

import dataclasses
from typing import Any

import pytest

from train.data.data_config import TextDataConfig
from train.estimate.chips import ATTAINABLE_FRACTION, Chip
from train.estimate.memory import Terms, count_terms, estimate_memory
from train.estimate.quantities import Candidate, Quantities
from train.estimate.roofline import (
    GATHERS_PER_MICROBATCH,
    axis_ring,
    estimate_step_time,
    link_traffic,
)
from train.estimate.target import Target
from train.experiment import Experiment
from train.optim.muon import Muon
from train.parallel.mesh import MeshConfig
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
    device_kind="toy",
    platform="tpu",
    bf16_flops_per_second=1e9,
    memory_bytes=2**30,
    memory_bandwidth=1e8,
    link_bandwidth=6e6,
    chips_per_host=4,
    network_bandwidth=1e5,
    torus_dimensions=3,
    hop_latency=0.0,
)
EXPERIMENT = Experiment(
    model=TransformerConfig(
        vocab_size=V,
        pad_vocab_to_multiple=1,
        d_model=D,
        num_layers=L,
        layer_pattern=(
            BlockConfig(
                mixer=AttentionConfig(num_heads=4, bias=False, backend="reference"),
                feed_forward=FeedForwardConfig(d_ff=F, bias=False),
            ),
        ),
        tie_embeddings=True,
        precision=Precision.parse("bfloat16"),
        remat="full",
        layer_loop="scan",
    ),
    data=TextDataConfig(sequence_length=T),
    batch_size=B,
)
TARGET = Target("toy", CHIP, (2, 4, 4))
MATRICES = 4 * D * D + 2 * D * F
NORMS = 2 * 2 * D
LAYERS = L * (MATRICES + NORMS)
OTHERS = V * D + 2 * D


@pytest.fixture(scope="module")
def quantities() -> Quantities:
    return Quantities(EXPERIMENT, TARGET.hardware)


def candidate(**sizes: Any) -> Candidate:
    accumulate = sizes.pop("accumulate", 1)
    return Candidate(dataclasses.replace(MeshConfig(data=1), **sizes), "full", accumulate)


def test_quantities(quantities: Quantities) -> None:
    assert quantities.layer_parameters == LAYERS
    assert quantities.other_parameters == OTHERS
    assert quantities.largest_layer_parameters == MATRICES + NORMS
    assert quantities.compute_itemsize == 2
    assert quantities.computes_all_scores


def test_terms_of_the_memory(quantities: Quantities) -> None:
    one = candidate(data=2, fsdp=2, tensor=2, context=2, accumulate=2)
    rows = 16 / (2 * 2 * 2 * 2)  # data, fsdp and microbatches; context
    full, none = quantities.residuals("full"), quantities.residuals("none")
    terms = count_terms(quantities, one)
    assert terms == Terms(
        residuals=full.bytes_per_chip(rows, 2),
        gradients=2 * quantities.state_bytes(one.mesh).gradients,
        layer=none.bytes_per_chip(rows, 2) / L,
        logits=4 * rows * T * V / 2,
        gathered_layer=(MATRICES + NORMS) * 2 / 2,
        output_gradient=4 * V * D / 2,
    )
    memory = estimate_memory(quantities, one)
    assert memory.batch == 28 * B * T / 8
    assert memory.temporaries == pytest.approx(sum(terms.estimated("tpu")), abs=3)
    alone = count_terms(quantities, candidate(data=4))
    assert alone.gradients == quantities.state_bytes(MeshConfig(data=4)).gradients
    assert alone.output_gradient == 0  # nothing is gathered


def test_offloaded_optimizer_state_visits_the_chip_by_layer(
    quantities: Quantities,
) -> None:
    near, far = (
        estimate_memory(quantities, candidate(optimizer_placement=where))
        for where in ("device", "host")
    )
    assert near.optimizer >= 2 * 4 * (LAYERS + OTHERS)
    assert far.optimizer == 0
    # They are moved in and out while gradients are in memory and activations are not.
    share = max(MATRICES + NORMS, OTHERS) / (LAYERS + OTHERS)
    assert far.temporaries == max(
        near.temporaries, near.gradients + int(2 * share * near.optimizer)
    )
    assert far.weights == near.weights


@pytest.mark.full
def test_full_remat_saves_layer_inputs(
    quantities: Quantities,
) -> None:
    full, none = quantities.residuals("full"), quantities.residuals("none")
    inputs = L * T * D * 2
    assert inputs <= full.replicated_per_row < 4 * inputs  # and what is stored once
    # At least the scores of every head.
    assert none.sharded_per_row > L * 4 * T * T * 2 > full.sharded_per_row


def bytes_sent(quantities: Quantities, one: Candidate) -> dict[str, float]:
    return {axis: sent.bytes for axis, sent in link_traffic(quantities, one).items()}


def test_data_parallelism_all_reduces_gradients(quantities: Quantities) -> None:
    weights = 2 * (LAYERS + OTHERS)
    assert bytes_sent(quantities, candidate(data=4)) == {"data": pytest.approx(2 * weights * 3 / 4)}
    twice = bytes_sent(quantities, candidate(data=4, accumulate=2))
    assert twice == {"data": pytest.approx(2 * 2 * weights * 3 / 4)}


def test_fsdp_gathers_weights_and_scatters_gradients(quantities: Quantities) -> None:
    weights = 2 * (LAYERS + OTHERS)
    actual = bytes_sent(quantities, candidate(fsdp=8, accumulate=2))
    assert actual == {"fsdp": pytest.approx(2 * weights * (GATHERS_PER_MICROBATCH + 1) * 7 / 8)}


def test_tensor_parallelism_all_reduces_activations(quantities: Quantities) -> None:
    activations = B * T // 2 * D * 2
    actual = bytes_sent(quantities, candidate(data=2, tensor=4))
    assert actual["tensor"] == pytest.approx(5 * L * 2 * activations * 3 / 4)
    # Each chip has a quarter of the gradients to sum over its copy.
    weights = 2 * (LAYERS + OTHERS) / 4
    assert actual["data"] == pytest.approx(2 * weights * 1 / 2)


def test_context_parallelism_passes_keys_and_values(quantities: Quantities) -> None:
    a_hop = B * T // 4 * 2 * D * 2
    assert bytes_sent(quantities, candidate(context=4)) == {
        "context": pytest.approx(4 * L * a_hop * 3)
    }


def test_time_on_one_chip(quantities: Quantities) -> None:
    time = estimate_step_time(quantities, candidate(), TARGET)
    layer = 2 * MATRICES + 4 * T * D
    operations = 3 * (L * layer + 2 * V * D) + L * layer
    assert time.compute_seconds == pytest.approx(B * T * operations / (1e9 * ATTAINABLE_FRACTION))
    causal = 2 * MATRICES + 4 * (T + 1) / 2 * D
    assert time.model_flops == pytest.approx(3 * B * T * (L * causal + 2 * V * D))
    assert time.link_seconds == {}
    assert time.step_seconds == max(time.compute_seconds, time.memory_seconds)
    assert time.sequential_seconds == time.compute_seconds + time.memory_seconds
    # The price is for all 32 chips, however many of them a candidate uses.
    assert time.mfu == pytest.approx(time.model_flops / time.step_seconds / 32e9)


def test_cpu_overlaps_nothing(quantities: Quantities) -> None:
    time = estimate_step_time(quantities, candidate(fsdp=8, tensor=4), TARGET)
    alone = dataclasses.replace(time, overlaps=False)
    assert alone.step_seconds == pytest.approx(time.sequential_seconds)
    assert alone.step_seconds > time.step_seconds
    processor = Target("toy", dataclasses.replace(CHIP, platform="cpu"), (32,))
    assert not estimate_step_time(quantities, candidate(fsdp=8, tensor=4), processor).overlaps


@pytest.mark.full
def test_muon_has_matmuls_of_its_own(quantities: Quantities) -> None:
    muon = dataclasses.replace(EXPERIMENT, optimizer=Muon())
    slow = Target("toy", dataclasses.replace(CHIP, fp32_flops_per_second=1e8), (2, 4, 4))
    result = Quantities(muon, slow.hardware)
    # Five times X X' and B X, of 8 x 8 or 8 x 16, and A A, of 8 x 8.
    square, wide = 5 * (2 * 2 * D**3 + 2 * D**3), 5 * (2 * 2 * D * D * F + 2 * D**3)
    assert result.optimizer_flops == L * (4 * square + 2 * wide)
    assert quantities.optimizer_flops == 0
    own, other = (
        estimate_step_time(quantities, candidate(fsdp=8), slow),
        estimate_step_time(result, candidate(fsdp=8), slow),
    )
    assert other.compute_seconds - own.compute_seconds == pytest.approx(
        result.optimizer_flops / 8 / (1e8 * ATTAINABLE_FRACTION)
    )
    assert other.model_flops == own.model_flops


def test_offloaded_optimizer_state_is_not_overlapped(quantities: Quantities) -> None:
    slow = Target("toy", dataclasses.replace(CHIP, host_bandwidth=1e6), (2, 4, 4))
    near, far = (
        estimate_step_time(quantities, candidate(fsdp=8, optimizer_placement=x), slow)
        for x in ("device", "host")
    )
    both_ways = (
        2
        * quantities.state_bytes(MeshConfig(data=1, fsdp=8)).optimizer
        / (1e6 * ATTAINABLE_FRACTION)
    )
    assert near.host_seconds == {}
    assert far.host_seconds == {"optimizer": pytest.approx(both_ways)}
    assert far.step_seconds == pytest.approx(near.step_seconds + both_ways)


@pytest.mark.full
@pytest.mark.parametrize("bandwidth", [1e3, 1e12])
def test_offloaded_activations_are_overlapped(quantities: Quantities, bandwidth: float) -> None:
    slow = Target("toy", dataclasses.replace(CHIP, host_bandwidth=bandwidth), (2, 4, 4))
    dots, offload = (
        estimate_step_time(quantities, Candidate(MeshConfig(data=8), remat, 2), slow)
        for remat in ("dots", "offload")
    )
    kept = {
        remat: quantities.residuals(remat).bytes_per_chip(B / 8, 1) for remat in ("dots", "full")
    }
    both_ways = 2 * (kept["dots"] - kept["full"]) / (bandwidth * ATTAINABLE_FRACTION)
    assert offload.host_seconds == {"activations": pytest.approx(both_ways)}
    assert offload.step_seconds == max(dots.step_seconds, offload.host_seconds["activations"])
    assert (offload.step_seconds > dots.step_seconds) == (bandwidth == 1e3)


def test_tensor_communication_is_not_overlapped(quantities: Quantities) -> None:
    time = estimate_step_time(quantities, candidate(fsdp=8, tensor=4), TARGET)
    busy = max(time.compute_seconds, time.memory_seconds, time.link_seconds["fsdp"])
    assert time.step_seconds == pytest.approx(busy + time.link_seconds["tensor"])
    assert time.compute_seconds <= time.step_seconds <= time.sequential_seconds


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
def test_axis_uses_links_of_the_dimensions_it_fills(
    mesh: dict[str, int], axis: str, dimensions: int, hops: int
) -> None:
    torus = Target("toy", dataclasses.replace(CHIP, hop_latency=1.0), (2, 4, 4))
    result = axis_ring(torus, candidate(**mesh), axis)
    assert result.bandwidth == dimensions * 2e6
    assert result.round_latency == hops


@pytest.mark.parametrize(
    ("mesh", "axis", "bandwidth", "hops"),
    [
        (dict(tensor=8), "tensor", 4e6, 3),  # both devices of each chip: 2 x 2 chips
        (dict(fsdp=32, tensor=2), "fsdp", 3e6, 5),  # one of each: two rings share the links
        (dict(fsdp=64), "fsdp", 6e6, 5),
    ],
)
def test_rings_of_chips_with_two_devices(
    mesh: dict[str, int], axis: str, bandwidth: float, hops: float
) -> None:
    chip = dataclasses.replace(CHIP, hop_latency=1.0, devices_per_chip=2)
    result = axis_ring(Target("toy", chip, (2, 4, 4)), candidate(**mesh), axis)
    assert result.bandwidth == bandwidth
    assert result.round_latency == hops


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
def test_gpu_rings_within_and_across_hosts(
    mesh: dict[str, int], axis: str, bandwidth: float
) -> None:
    chip = dataclasses.replace(
        CHIP,
        platform="gpu",
        torus_dimensions=0,
        chips_per_host=8,
        link_bandwidth=100.0,
        network_bandwidth=1.0,
    )
    assert axis_ring(Target("gpus", chip, (16,)), candidate(**mesh), axis).bandwidth == bandwidth
