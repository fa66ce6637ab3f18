"""BERT equals Hugging Face's: layer by layer, and whole with each of its heads.

The outputs were made by tests/fixtures/make_bert.py.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.fixtures.tiny import BERT, PAIR_LENGTHS, SHORT, drawn, pair_types, real, tokens
from tests.transformer.bert import bert_config, bert_params, class_head, masked_head, pooler
from tests.transformer.formulas import array, assert_close
from tests.transformer.layouts import Params
from transformer import Classifier, Mask, MaskedLanguageModel, Model, Tagger
from transformer.attention.mixer import MixerInputs
from transformer.layers.block import Block

FIXTURES = np.load(Path(__file__).parents[2] / "fixtures" / "bert.npz")
LAYER_TOLERANCE, MODEL_TOLERANCE = 1e-5, 1e-4

CONFIG, POOLED = bert_config(BERT, 64), bert_config(BERT, 64, pooler=True)
ROWS = CONFIG.padded_vocab_size
BODY = bert_params(drawn, BERT, ROWS)
SEGMENTS = real(SHORT, PAIR_LENGTHS)
IS_TOKEN = SEGMENTS == 1

MASKED = MaskedLanguageModel(CONFIG), BODY | masked_head(drawn, BERT, ROWS)
TAGGER = Tagger(CONFIG, num_classes=BERT.classes), BODY | class_head(drawn, BERT)
CLASSIFIER = (
    Classifier(POOLED, num_classes=BERT.classes),
    BODY | pooler(drawn, BERT) | class_head(drawn, BERT),
)


def outputs(model: Model, params: Params) -> Any:
    """Return the outputs for rows of two sentences each; the second row is padded."""
    ids, types = tokens(SHORT, BERT.vocab), pair_types()
    return jax.jit(model.apply)({"params": params}, ids, segments=SEGMENTS, token_types=types)


def test_layers_match_hugging_face() -> None:
    block = Block(CONFIG.layer_pattern[0], MASKED[0].context, parent=None)
    positions, mask = np.arange(SHORT[1])[None], Mask(segments=jnp.asarray(SEGMENTS))
    apply = jax.jit(lambda w, x: block.apply({"params": w}, x, MixerInputs(array(positions), mask)))
    stream = FIXTURES["stream"]
    for layer in range(BERT.layers):
        weights = jax.tree.map(lambda leaf, i=layer: leaf[i], BODY["layers"]["place_0"])
        x = np.asarray(apply(weights, stream[layer]).x)
        assert_close(x[IS_TOKEN], stream[layer + 1][IS_TOKEN], LAYER_TOLERANCE)


def test_hidden_states_and_tags_match_hugging_face() -> None:
    out = outputs(*TAGGER)
    assert_close(
        np.asarray(out.hidden)[IS_TOKEN], FIXTURES["stream"][-1][IS_TOKEN], MODEL_TOLERANCE
    )
    assert_close(np.asarray(out.logits)[IS_TOKEN], FIXTURES["tags"][IS_TOKEN], MODEL_TOLERANCE)


def test_classes_match_hugging_face() -> None:
    assert_close(outputs(*CLASSIFIER).logits, FIXTURES["classes"], MODEL_TOLERANCE)


def test_masked_tokens_match_hugging_face() -> None:
    logits = np.asarray(outputs(*MASKED).logits)[..., : BERT.vocab]
    assert_close(logits[IS_TOKEN], FIXTURES["masked"][IS_TOKEN], MODEL_TOLERANCE)
