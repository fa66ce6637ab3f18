"""Log-likelihoods: by NumPy from logits of unpadded sequences, and from Hugging Face's logits."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import random_params_like
from tests.transformer.generation.decoders import GPT, LLAMA, RECURRENT, make_decoder
from transformer import (
    EncoderConfig,
    EncoderDecoder,
    LanguageModel,
    TransformerConfig,
    chunked_cross_entropy,
)
from transformer.attention.full import AttentionConfig
from transformer.attention.rope import LongRoPEScaling, RoPE
from transformer.generation import batches
from transformer.generation.log_likelihood import log_likelihoods, token_log_likelihoods
from transformer.interop.pretrained import read_model
from transformer.models.block import BlockConfig

CONFIGS = {"gpt": GPT, "llama": LLAMA, "recurrent": RECURRENT}

ROWS = ([7, 3, 5], [11], [2, 13, 17, 4, 19, 23, 29], [11, 3], list(range(1, 38)))

GPT2 = Path(__file__).parents[1] / "interop" / "fixtures" / "gpt2-tied"


@functools.partial(jax.jit, static_argnums=0)
def run_full_pass(model: Any, params: Any, *inputs: jax.Array) -> Any:
    return model.apply({"params": params}, *inputs).logits


def expected(logits: np.ndarray, row: list[int], context: int) -> float:
    """Return the sum of log softmax over the tokens after the context, in float64."""
    logits = np.asarray(logits, np.float64)
    total = 0.0
    for place in range(context, len(row)):
        before = logits[place - 1]
        total += before[row[place]] - np.log(np.sum(np.exp(before - before.max()))) - before.max()
    return total


@pytest.fixture(scope="module", params=CONFIGS)
def decoder(request: pytest.FixtureRequest) -> tuple[LanguageModel, Any]:
    return make_decoder(CONFIGS[request.param])


@pytest.mark.full
def test_totals_equal_those_of_unpadded_logits(decoder: tuple[LanguageModel, Any]) -> None:
    model, params = decoder
    contexts = [1, 1, 4, 2, 30]
    found = log_likelihoods(model, params, ROWS, context_lengths=contexts)
    for row, context, each in zip(ROWS, contexts, found, strict=True):
        logits = run_full_pass(model, params, jnp.array([row]))[0]
        assert each.total == pytest.approx(expected(logits, row, context), rel=1e-5, abs=1e-5)
        assert each.num_tokens == len(row) - context


def test_padding_does_not_lengthen_a_row() -> None:
    """LongRoPE has other factors from 9 tokens on; rows of 5 are padded to 32."""
    scaling = LongRoPEScaling((1.0, 1.5, 2.0), (2.0, 5.0, 7.0), 8)
    mixer = AttentionConfig(num_heads=2, head_dim=6, position=RoPE(scaling=scaling))
    config = TransformerConfig(31, 12, num_layers=1, layer_pattern=(BlockConfig(mixer),))
    model, params = make_decoder(config)
    row = [7, 3, 5, 11, 2]
    [found] = log_likelihoods(model, params, [row])
    logits = run_full_pass(model, params, jnp.array([row]))[0]
    assert found.total == pytest.approx(expected(logits, row, 1), rel=1e-5)


@pytest.mark.full
def test_small_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, params = make_decoder(GPT)
    whole = log_likelihoods(model, params, ROWS)
    monkeypatch.setattr(batches, "TOKENS_PER_BATCH", 70)
    parts = log_likelihoods(model, params, ROWS)
    assert [each.total for each in parts] == pytest.approx([each.total for each in whole], rel=1e-5)


def test_tokens_and_the_likeliest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits of a chunk have 3 tokens, so that the last of a row of 36 is not whole."""
    monkeypatch.setitem(chunked_cross_entropy.CHUNK_BYTES, "cpu", 3 * 61 * 4)
    monkeypatch.setattr(chunked_cross_entropy, "CPU_TOKENS_PER_WIDTH", 0)
    model, params = make_decoder(GPT)
    found = token_log_likelihoods(model, params, ROWS, num_top=4)
    for row, each in zip(ROWS, found, strict=True):
        assert each.values.shape == (len(row) - 1,)
        logits = run_full_pass(model, params, jnp.array([row]))[0]
        log_probs = np.asarray(jax.nn.log_softmax(logits, axis=-1))[:-1]
        values = np.take_along_axis(log_probs, np.array(row[1:], int)[:, None], axis=1)[:, 0]
        np.testing.assert_allclose(each.values, values, rtol=1e-5, atol=1e-5)
        best = np.argsort(-log_probs, axis=1)[:, :4]
        np.testing.assert_array_equal(each.top_tokens, best)
        expected_top = np.take_along_axis(log_probs, best, axis=1)
        np.testing.assert_allclose(each.top_values, expected_top, rtol=1e-5, atol=1e-5)


def test_greedy_rows_are_told_apart() -> None:
    """A row that ends with the likeliest token, as long as all positions and one; another token."""
    model, params = make_decoder(GPT)
    row = [*range(1, 42)]
    best = int(run_full_pass(model, params, jnp.array([row]))[0, -1].argmax())
    rows = [[*row, best], [*row, (best + 1) % 61]]
    found = log_likelihoods(model, params, rows, context_lengths=[41, 41])
    assert [each.is_greedy for each in found] == [True, False]
    found = log_likelihoods(model, params, rows[:1], context_lengths=[2])
    assert not found[0].is_greedy


def test_hugging_face_has_the_same_log_likelihoods() -> None:
    pretrained, params = read_model(GPT2)
    model = pretrained.make_model()
    assert isinstance(model, LanguageModel)
    reference = np.load(GPT2 / "reference.npz")
    rows, logits = reference["tokens"].tolist(), reference["logits"]
    found = log_likelihoods(model, params, rows)
    assert [each.num_tokens for each in found] == [len(row) - 1 for row in rows]
    for row, given, each in zip(rows, logits, found, strict=True):
        assert each.total == pytest.approx(expected(given, row, 1), rel=1e-5)


@pytest.mark.full
def test_encoder_decoder_reads_the_source() -> None:
    block = BlockConfig(mixer=AttentionConfig(num_heads=2))
    config = TransformerConfig(
        vocab_size=31,
        d_model=16,
        num_layers=2,
        layer_pattern=(BlockConfig(AttentionConfig(2), cross_attention=AttentionConfig(2)),),
        encoder=EncoderConfig(num_layers=1, layer_pattern=(block,)),
    )
    model = EncoderDecoder(config)
    params = random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))
    sources, targets = ([3, 4, 5, 6, 2], [9]), ([2, 8, 7], [2, 8, 7, 11, 12])
    found = log_likelihoods(model, params, targets, sources=sources)
    for source, target, each in zip(sources, targets, found, strict=True):
        logits = run_full_pass(model, params, jnp.array([source]), jnp.array([target]))[0]
        assert each.total == pytest.approx(expected(logits, target, 1), rel=1e-5)
    swapped = log_likelihoods(model, params, targets, sources=sources[::-1])
    assert abs(swapped[0].total - found[0].total) > 1e-3


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([[1], []], {}, "sequence 1: is empty"),
        ([[1, 61]], {}, "sequence 0: "),
        ([[1] * 43], {}, "sequence 0: 42 tokens are more than the model's 41 learned positions"),
        ([[1, 2]], {"context_lengths": [3]}, r"context_lengths\[0\] 3: the sequence has 2 tokens"),
        ([[1, 2]], {"context_lengths": [0]}, r"context_lengths\[0\]"),
        ([[1, 2]], {"context_lengths": [1, 1]}, "context_lengths: 2 for 1 sequences"),
        ([[1, 2]], {"sources": [[1]]}, "sources: a LanguageModel has no encoder"),
    ],
)
def test_wrong_arguments_raise(rows: Any, settings: dict[str, Any], message: str) -> None:
    model = LanguageModel(GPT)
    params = {"embedding": jnp.zeros((61, 20))}
    with pytest.raises(ValueError, match=f"^{message}"):
        log_likelihoods(model, params, rows, **settings)
