"""Weights from a verb to a phrase: which tokens, and which numbers of the attention maps."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from bench.distant_phrases import (
    CHOSEN_ON,
    REPORTED_ON,
    Sentence,
    phrase_weights,
    tokens_of,
)
from tests.transformer.formulas import random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    MaskedLanguageModel,
    TransformerConfig,
)
from transformer.attention_maps import attention_maps


def test_tokens_of_words() -> None:
    text = "they were making registration more difficult ."
    wordpieces = ["they", "were", "making", "reg", "##istr", "##ation", "more", "difficult", "."]
    assert tokens_of(wordpieces, text, "making") == [2]
    assert tokens_of(wordpieces, text, "registration") == [3, 4, 5]
    assert tokens_of(wordpieces, text, "more difficult") == [6, 7]
    # Tokens across words, spaces of their own, and special tokens.
    pieces = [
        "<s>",
        "they",
        " we",
        "re ma",
        "king",
        "▁registration",
        "▁more",
        " difficult",
        " .",
        "",
    ]
    assert tokens_of(pieces, text, "making") == [3, 4]
    assert tokens_of(pieces, text, "more difficult") == [6, 7]


def test_no_word_is_chosen_and_reported() -> None:
    words = [
        {word for phrases in kinds.values() for phrase in phrases for word in phrase.split()}
        for kinds in (CHOSEN_ON, REPORTED_ON)
    ]
    assert not words[0] & words[1]
    counts = {len(phrases) for kinds in (CHOSEN_ON, REPORTED_ON) for phrases in kinds.values()}
    assert counts == {4}  # equal parts


def test_weights_are_those_of_the_maps() -> None:
    block = BlockConfig(mixer=AttentionConfig(num_heads=2), feed_forward=FeedForwardConfig(8))
    config = TransformerConfig(
        vocab_size=11, d_model=8, num_layers=2, layer_pattern=(block,), causal=False
    )
    model = MaskedLanguageModel(config)
    params = random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))
    sentences, expected = [], []
    for length, verb, phrase in ((5, 1, (3, 4)), (7, 2, (5,)), (5, 0, (2, 3, 4))):
        tokens = np.random.default_rng(verb).integers(11, size=(1, length))
        sentences.append(Sentence({"tokens": tokens}, length, verb, phrase))
        maps = attention_maps(model, params, tokens=tokens)
        expected.append([each.weights[0, :, verb, list(phrase)].sum(0) for each in maps])
    run: Any = SimpleNamespace(model=model)
    actual = phrase_weights(run, jax.device_get(params), sentences)
    np.testing.assert_allclose(actual, expected, atol=1e-6)
