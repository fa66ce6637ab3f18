"""`EncoderDecoder` equals Hugging Face's Marian, and its search finds the same translations.

The outputs were made by tests/fixtures/make_marian.py.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures.tiny import (
    LONGEST,
    MARIAN,
    SEARCHES,
    SOURCE,
    SOURCE_LENGTHS,
    TARGET,
    drawn,
    real,
    tokens,
)
from tests.transformer.formulas import assert_close
from tests.transformer.marian import marian_config, marian_params
from transformer import EncoderDecoder
from transformer.generation.beam_search import BeamSearchConfig
from transformer.generation.translate import translate

FIXTURES = np.load(Path(__file__).parents[2] / "fixtures" / "marian.npz")
MODEL_TOLERANCE = 1e-4
SOURCE_IDS = tokens(SOURCE, MARIAN.vocab)
SEGMENTS = real(SOURCE, SOURCE_LENGTHS)

pytestmark = pytest.mark.full
kinds = pytest.mark.parametrize("kind", ["tied", "separate"])


@functools.cache
def marian(kind: str) -> tuple[EncoderDecoder, Any, Any]:
    """Return the model, its compiled function and its parameters."""
    tied = kind == "tied"
    model = EncoderDecoder(marian_config(MARIAN, tied=tied))
    return model, jax.jit(model.apply), marian_params(drawn, MARIAN, tied=tied)


@kinds
def test_logits_of_a_given_target(kind: str) -> None:
    _, run, params = marian(kind)
    target = tokens(TARGET, MARIAN.vocab)
    logits = run({"params": params}, SOURCE_IDS, target, source_segments=SEGMENTS).logits
    assert_close(logits, FIXTURES[f"{kind}/logits"], MODEL_TOLERANCE)


@pytest.mark.sampled("4-7-25")
@pytest.mark.parametrize(("beams", "begin", "stop"), SEARCHES)
def test_beam_search_finds_the_same_translations(beams: int, begin: int, stop: int) -> None:
    """Scores are log P: neither side normalizes by length.

    Of 2 K candidates, Hugging Face lets only the best K end; this library lets all end, as
    tensor2tensor
    does. In these searches the difference does not matter.
    """
    model, _, params = marian("separate")
    sources = [row[:length] for row, length in zip(SOURCE_IDS, SOURCE_LENGTHS, strict=True)]
    result = translate(
        model,
        params,
        sources,
        start_token=begin,
        stop_token=stop,
        beam_search_config=BeamSearchConfig(beams, length_penalty=0.0),
        extra_length=LONGEST,
        length_factor=0.0,
        batch_size=len(sources),
    )
    assert result.tokens == expected_tokens(beams, stop)
    assert_close(result.scores, FIXTURES[f"{beams} beams/scores"], MODEL_TOLERANCE)


def expected_tokens(beams: int, stop: int) -> list[list[int]]:
    rows = FIXTURES[f"{beams} beams/tokens"].tolist()
    return [row[: row.index(stop)] if stop in row else row for row in rows]
