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
from train.optim.muon import Muon
from train.state import EmaConfig
from transformer import EncoderConfig, Precision, TransformerConfig


def test_memory_items() -> None:
    described = describe_tiny(TINY)
    memory, textbook = described.memory, described.textbook
    assert memory.weights == memory.gradients == 4 * 2463
    assert memory.optimizer == 8 * 2463 + 4  # two moments and the step count
    assert memory.batch == 28 * TOKENS
    assert memory.working_set == 0.5 * 4 * TOKENS * 24  # logits
    assert memory.total == 9852 + 9852 + 19708 + 28 * TOKENS + memory.residuals + 2 * TOKENS * 24
    assert textbook.elements == 3 * LAYER_ELEMENTS
    assert textbook.bytes == 4 * 3 * LAYER_ELEMENTS
    assert textbook.sixteen_bit_bytes == 3 * TOKENS * (34 * 7 + 5 * 11 * 3)
    assert textbook.logits_bytes == 2 * 4 * TOKENS * 17


@pytest.mark.parametrize(("precision", "weights"), [("bfloat16", 4), ("pure_bfloat16", 2)])
def test_memory_by_precision(precision: str, weights: int) -> None:
    described = describe_tiny(dataclasses.replace(TINY, precision=Precision.parse(precision)))
    memory = described.memory
    assert memory.weights == weights * 2463
    assert memory.gradients == 4 * 2463
    assert memory.optimizer == 8 * 2463 + 4
    assert described.textbook.bytes == 2 * 3 * LAYER_ELEMENTS
    wide = describe_tiny(TINY).memory.residuals
    assert 0.5 * wide <= memory.residuals < 0.8 * wide
    adamw = described.optimizer_states[0]  # in float32, whatever the model stores
    assert (adamw.weights, adamw.gradients, adamw.optimizer_state) == (9852, 9852, 19708)


def test_textbook_bytes_of_every_precision_and_optimizer() -> None:
    states = {each.optimizer: each for each in describe_tiny(TINY).optimizer_states}
    sums = {
        (precision, kind): sum(each.textbook(precision))
        for kind, each in states.items()
        for precision in ("float32", "bfloat16")
    }
    assert sums == {
        ("float32", "adamw"): 16,
        ("float32", "adamw8bit"): 10,
        ("float32", "sgd"): 12,
        ("bfloat16", "adamw"): 18,
        ("bfloat16", "adamw8bit"): 12,
        ("bfloat16", "sgd"): 14,
    }
    assert states["sgd"].total == 3 * 4 * 2463
    # No parameter of this model has 4,096 numbers per layer.
    assert states["adamw8bit"].total == states["adamw"].total == 16 * 2463 + 4


def test_eight_bit_state_has_codes_scales_and_unquantized_moments() -> None:
    model = TransformerConfig(vocab_size=128, d_model=64, num_layers=3)
    per_layer = {"large": (4 * 64 * 64 + 2 * 64 * 256), "small": 4 * 64 + 256 + 64 + 4 * 64}
    large, small = 128 * 64 + 3 * per_layer["large"], 3 * per_layer["small"] + 2 * 64
    described = describe_tiny(model)
    assert described.parameters.allocated == large + small
    states = {each.optimizer: each.optimizer_state for each in described.optimizer_states}
    assert states["adamw8bit"] == 2 * large + 2 * 4 * large // 256 + 8 * small + 4


def test_ema_adds_one_float32_copy_of_the_weights() -> None:
    plain, averaged = describe_tiny(TINY).memory, describe_tiny(TINY, ema=EmaConfig(0.9)).memory
    assert (plain.other_state, averaged.other_state) == (0, 4 * 2463)
    assert averaged.total == plain.total + 4 * 2463


def test_activations_of_cross_attention() -> None:
    block = dataclasses.replace(BLOCK, cross_attention=BLOCK.mixer)
    config = dataclasses.replace(TINY, layer_pattern=(block,), encoder=EncoderConfig(3, (BLOCK,)))
    result = describe_translator(config).textbook
    assert result.elements == 6 * LAYER_ELEMENTS + 3 * TOKENS * (6 * 7 + 11 * 3)


def test_muon_has_one_moment_for_matrices() -> None:
    matrices = 3 * (7 * 15 + 7 * 5 + 7 * 11 + 33 * 7 + 2 * 7 * 13)
    moments = 4 * (matrices + 2 * (2463 - matrices))
    memory = describe_tiny(TINY, optimizer=Muon()).memory
    assert moments < memory.optimizer < moments + 64  # and step counts


def test_gradient_accumulation_has_fewer_activations_and_two_gradients() -> None:
    whole, memory = (describe_tiny(TINY, grad_accum_steps=steps).memory for steps in (1, 5))
    assert memory.gradients == 2 * whole.gradients == 2 * 4 * 2463
    assert memory.residuals == pytest.approx(whole.residuals / 5, abs=1)
    assert memory.working_set == 0.5 * 4 * 11 * 24
