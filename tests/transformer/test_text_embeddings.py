"""Embeddings of sequences: pooling, padding, and models with any head."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from transformer.interop.pretrained import read_model
from transformer.text_embeddings import EmbeddingPooling, embed_sequences

FIXTURES = Path(__file__).parent / "interop" / "fixtures"

ROWS = [np.arange(3, 3 + length) for length in (7, 1, 13, 40, 2)]


def pool(states: Any, pooling: str) -> np.ndarray[Any, Any]:
    states = np.asarray(states)
    last = {"first": states[0], "last": states[-1], "mean": states.mean(0), "max": states.max(0)}
    return last[pooling]


@pytest.mark.parametrize("pooling", ["mean", "last", "max"])
def test_vectors_are_the_pooled_states_of_each_sequence_alone(pooling: EmbeddingPooling) -> None:
    """The last states of a decoder: each row by itself, without padding."""
    pretrained, params = read_model(FIXTURES / "llama-grouped")
    model = pretrained.make_model()
    expected = [
        pool(model.apply({"params": params}, jnp.asarray(row)[None]).hidden[0], pooling)
        for row in ROWS
    ]
    found = embed_sequences(model, params, ROWS, pooling=pooling, normalize=False)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    scaled = embed_sequences(model, params, ROWS, pooling=pooling)
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(scaled, expected / lengths, atol=2e-6)


@pytest.mark.parametrize(
    "fixture",
    [
        "bert-mlm",
        "bert-classifier",
        "distilbert-tagger",
        "modernbert-local",
        "longformer-mlm",
        "mixtral-experts",
    ],
)
def test_padding_changes_no_vector(fixture: str) -> None:
    pretrained, params = read_model(FIXTURES / fixture)
    model = pretrained.make_model()
    together = embed_sequences(model, params, ROWS, normalize=False)
    alone = np.concatenate([embed_sequences(model, params, [row], normalize=False) for row in ROWS])
    full = embed_sequences(model, params, [ROWS[3][:32]], normalize=False)  # a whole bucket
    longer = embed_sequences(model, params, [ROWS[3][:32], ROWS[3]], normalize=False)
    np.testing.assert_allclose(together, alone, atol=2e-6)
    np.testing.assert_allclose(longer[:1], full, atol=2e-6)


def test_the_head_has_no_part_in_a_vector() -> None:
    """A masked language model's own `hidden` is that of its head."""
    reference = np.load(FIXTURES / "bert-mlm" / "reference.npz")
    pretrained, params = read_model(FIXTURES / "bert-mlm")
    found = embed_sequences(
        pretrained.make_model(), params, list(reference["tokens"]), pooling="first", normalize=False
    )
    np.testing.assert_allclose(found, reference["hidden"][-1][:, 0], atol=1e-5)


def test_what_has_no_vector_is_refused() -> None:
    pretrained, params = read_model(FIXTURES / "llama-grouped")
    model = pretrained.make_model()
    with pytest.raises(ValueError, match="pooling first: the first token of a causal model"):
        embed_sequences(model, params, ROWS, pooling="first")
    with pytest.raises(ValueError, match="sequence 1: is empty"):
        embed_sequences(model, params, [[3], []])
    translator, weights = read_model(FIXTURES / "t5-gated")
    with pytest.raises(ValueError, match="EncoderDecoder: has no one stack"):
        embed_sequences(translator.make_model(), weights, ROWS)
