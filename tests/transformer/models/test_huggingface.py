"""GPT-2 and Llama equal Hugging Face's: whole, and layer by layer.

The outputs were made by tests/fixtures/make_huggingface.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures.tiny import (
    GPT2,
    LLAMA,
    LONG,
    SHORT,
    Array,
    Sizes,
    drawn,
    packed,
    padded,
    tokens,
)
from tests.transformer.formulas import array, assert_close
from tests.transformer.huggingface import gpt2_config, gpt2_params, llama_config, llama_params
from tests.transformer.layouts import Params
from transformer import LanguageModel, Mask, MaskPattern, ModelOutput
from transformer.attention.mixer import MixerInputs
from transformer.layers.block import Block

FIXTURES = Path(__file__).parents[2] / "fixtures" / "huggingface.npz"
LAYER_TOLERANCE, MODEL_TOLERANCE = 1e-5, 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    sizes: Sizes
    model: LanguageModel
    params: Params
    outputs: Mapping[str, Array]

    def expected(self, output: str) -> Array:
        return self.outputs[f"{self.name}/{output}"]

    def logits(self, ids: Array, **kwargs: Any) -> Array:
        out: ModelOutput = jax.jit(self.model.apply)({"params": self.params}, ids, **kwargs)
        return np.asarray(out.logits)[..., : self.sizes.vocab]


def make_case(name: str) -> Case:
    sizes, config, params = CASES[name]
    model = LanguageModel(config(sizes, vocab_multiple=64))
    weights = params(drawn, sizes, model.config.padded_vocab_size)
    return Case(name, sizes, model, weights, np.load(FIXTURES))


CASES: dict[str, tuple[Sizes, Callable[..., Any], Callable[..., Any]]] = {
    "gpt2": (GPT2, gpt2_config, gpt2_params),
    "llama": (LLAMA, llama_config, llama_params),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


def test_logits(case: Case) -> None:
    logits = case.logits(tokens(SHORT, case.sizes.vocab))
    assert_close(logits, case.expected("logits"), MODEL_TOLERANCE)


def test_last_logits_of_a_long_input(case: Case) -> None:
    logits = case.logits(tokens(LONG, case.sizes.vocab))
    assert_close(logits[:, -3:], case.expected("long"), MODEL_TOLERANCE)


def test_layer_and_attention_outputs(case: Case) -> None:
    block = Block(case.model.config.layer_pattern[0], case.model.context, parent=None)
    positions, mask = np.arange(SHORT[1])[None], Mask(MaskPattern(causal=True))
    inputs = MixerInputs(array(positions), mask, outputs=frozenset({"weights"}))
    apply = jax.jit(lambda weights, x: block.apply({"params": weights}, x, inputs))
    stream = case.expected("stream")
    for layer in range(case.sizes.layers):
        weights = jax.tree.map(lambda leaf, i=layer: leaf[i], case.params["layers"]["place_0"])
        output = apply(weights, stream[layer])
        assert_close(output.x, stream[layer + 1], LAYER_TOLERANCE)
        assert_close(output.aux["weights"], case.expected("attention")[layer], LAYER_TOLERANCE)


def test_gpt2_with_left_padding() -> None:
    case, real = make_case("gpt2"), padded()
    positions = np.maximum(np.cumsum(real, axis=1) - 1, 0)
    logits = case.logits(tokens(SHORT, GPT2.vocab), positions=positions, segments=real)
    visible = real.astype(bool)
    assert_close(logits[visible], case.expected("padded")[visible], MODEL_TOLERANCE)


def test_llama_with_packed_documents() -> None:
    case = make_case("llama")
    segments, positions = packed()
    ids = tokens(SHORT, LLAMA.vocab)[:1]
    logits = case.logits(ids, positions=positions, segments=segments)
    assert_close(logits, case.expected("packed"), MODEL_TOLERANCE)
