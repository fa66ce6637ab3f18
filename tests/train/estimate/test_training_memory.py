import dataclasses

import pytest

from tests.train.estimate.tiny_models import (
    BLOCK,
    LAYER_ELEMENTS,
    TINY,
    TOKENS,
    describe_tiny,
    describe_translator,
)
from tests.train.support import light_compiler as light_compiler
from train.estimate.memory import estimate_memory
from train.estimate.quantities import Candidate
from train.optim.muon import Muon
from train.parallel.mesh import MeshConfig
from train.state import EmaConfig
from transformer import EncoderConfig, Precision, TransformerConfig
from transformer.models.stack import RematPolicy


def test_memory_items() -> None:
    memory = describe_tiny(TINY).memory
    assert memory.weights == 4 * 2463
    assert memory.compute_copy == 0
    assert memory.gradients == 4 * 2463
    assert memory.optimizer == 8 * 2463 + 4  # two moments and the step count
    assert memory.activations.textbook_elements == 3 * LAYER_ELEMENTS
    assert memory.activations.textbook_bytes == 4 * 3 * LAYER_ELEMENTS
    assert memory.activations.sixteen_bit_bytes == 3 * TOKENS * (34 * 7 + 5 * 11 * 3)
    assert memory.logits == 0.5 * 4 * TOKENS * 24
    assert memory.textbook_logits == 2 * 4 * TOKENS * 17
    assert memory.total == 9852 + 9852 + 19708 + memory.activations.bytes + 2 * TOKENS * 24


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_description_and_plan_have_one_estimate(remat: RematPolicy) -> None:
    described = describe_tiny(dataclasses.replace(TINY, remat=remat), ema=EmaConfig(0.9))
    planned = estimate_memory(described.quantities, Candidate(MeshConfig(data=1), remat, 1))
    assert described.memory.total == pytest.approx(planned.total - planned.batch, abs=3)


@pytest.mark.parametrize(
    ("precision", "weights", "copy"), [("bfloat16", 4, 2), ("pure_bfloat16", 2, 0)]
)
def test_memory_by_precision(precision: str, weights: int, copy: int) -> None:
    memory = describe_tiny(dataclasses.replace(TINY, precision=Precision.parse(precision))).memory
    assert memory.weights == weights * 2463
    assert memory.compute_copy == copy * 2463
    assert memory.gradients == 4 * 2463
    assert memory.optimizer == 8 * 2463 + 4
    assert memory.activations.textbook_bytes == 2 * 3 * LAYER_ELEMENTS
    wide = describe_tiny(TINY).memory.activations.bytes
    assert 0.5 * wide <= memory.activations.bytes < 0.8 * wide


def test_memory_variants_cover_every_precision_and_optimizer() -> None:
    result = {
        (each.precision, each.optimizer): each for each in describe_tiny(TINY).memory_variants
    }
    sums = {key: sum(each.textbook_bytes_per_parameter) for key, each in result.items()}
    assert sums == {
        ("float32", "adamw"): 16,
        ("float32", "adamw8bit"): 10,
        ("float32", "sgd"): 12,
        ("bfloat16", "adamw"): 18,
        ("bfloat16", "adamw8bit"): 12,
        ("bfloat16", "sgd"): 14,
    }
    assert result["float32", "sgd"].state_bytes == (4 * 2463, 4 * 2463, 4 * 2463)
    assert result["bfloat16", "adamw"].state_bytes == (4 * 2463, 4 * 2463, 8 * 2463 + 4)
    # No parameter of this model has 4,096 numbers per layer.
    assert result["float32", "adamw8bit"].state_bytes == result["float32", "adamw"].state_bytes
    narrow = result["bfloat16", "sgd"].memory.activations.bytes
    assert result["float32", "sgd"].memory.activations.bytes > narrow


def test_eight_bit_state_has_codes_scales_and_unquantized_moments() -> None:
    model = TransformerConfig(vocab_size=128, d_model=64, num_layers=3)
    per_layer = {"large": (4 * 64 * 64 + 2 * 64 * 256), "small": 4 * 64 + 256 + 64 + 4 * 64}
    large, small = 128 * 64 + 3 * per_layer["large"], 3 * per_layer["small"] + 2 * 64
    described = describe_tiny(model)
    assert described.parameters.allocated == large + small
    eight = described.eight_bit_state
    assert (eight.codes, eight.scales, eight.unquantized) == (
        2 * large,
        2 * 4 * large // 256,
        8 * small,
    )
    (result,) = (
        each
        for each in described.memory_variants
        if (each.precision, each.optimizer) == ("float32", "adamw8bit")
    )
    assert result.memory.optimizer == eight.codes + eight.scales + eight.unquantized + 4


def test_ema_adds_one_float32_copy_of_the_weights() -> None:
    plain, averaged = describe_tiny(TINY).memory, describe_tiny(TINY, ema=EmaConfig(0.9)).memory
    assert (plain.ema, averaged.ema) == (0, 4 * 2463)
    assert averaged.total == plain.total + 4 * 2463


def test_activations_of_cross_attention() -> None:
    block = dataclasses.replace(BLOCK, cross_attention=BLOCK.mixer)
    config = dataclasses.replace(TINY, layer_pattern=(block,), encoder=EncoderConfig(3, (BLOCK,)))
    result = describe_translator(config).memory.activations
    assert result.textbook_elements == 6 * LAYER_ELEMENTS + 3 * TOKENS * (6 * 7 + 11 * 3)


def test_muon_has_one_moment_for_matrices() -> None:
    matrices = 3 * (7 * 15 + 7 * 5 + 7 * 11 + 33 * 7 + 2 * 7 * 13)
    moments = 4 * (matrices + 2 * (2463 - matrices))
    memory = describe_tiny(TINY, optimizer=Muon()).memory
    assert moments < memory.optimizer < moments + 64  # and step counts


def test_gradient_accumulation_has_fewer_activations_and_two_gradients() -> None:
    whole, memory = (describe_tiny(TINY, grad_accum_steps=steps).memory for steps in (1, 5))
    assert memory.gradients == 2 * whole.gradients == 2 * 4 * 2463
    assert memory.activations.bytes == pytest.approx(whole.activations.bytes / 5, abs=1)
    assert memory.logits == 0.5 * 4 * 11 * 24
