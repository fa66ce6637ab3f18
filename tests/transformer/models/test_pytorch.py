"""`EncoderDecoder` and `LanguageModel` equal PyTorch's own transformer modules.

The outputs were made by tests/fixtures/make_pytorch.py.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.fixtures.tiny import (
    PYTORCH,
    SHORT,
    SOURCE,
    SOURCE_LENGTHS,
    TARGET,
    TARGET_LENGTHS,
    drawn,
    real,
    tokens,
)
from tests.transformer.formulas import assert_close
from tests.transformer.pytorch import (
    causal_config,
    causal_params,
    transformer_config,
    transformer_params,
)
from transformer import EncoderDecoder, LanguageModel
from transformer.models.block import NormPlacement

FIXTURES = np.load(Path(__file__).parents[2] / "fixtures" / "pytorch.npz")
MODEL_TOLERANCE = 1e-4
SOURCE_IDS, TARGET_IDS = tokens(SOURCE, PYTORCH.vocab), tokens(TARGET, PYTORCH.vocab)
SOURCE_SEGMENTS = real(SOURCE, SOURCE_LENGTHS)
TARGET_SEGMENTS = real(TARGET, TARGET_LENGTHS)

both = pytest.mark.parametrize("placement", ["post", "pre"])


@functools.cache
def encoder_decoder(placement: NormPlacement) -> tuple[Any, Any]:
    """Return the model as a compiled function, and its parameters."""
    model = EncoderDecoder(transformer_config(PYTORCH, placement))
    params = transformer_params(drawn, PYTORCH, placement)
    return jax.jit(model.apply), {"params": params}


@both
def test_encoder_output(placement: NormPlacement) -> None:
    run, params = encoder_decoder(placement)
    memory = np.asarray(run(params, SOURCE_IDS, None, source_segments=SOURCE_SEGMENTS).hidden)
    visible = SOURCE_SEGMENTS == 1
    assert_close(memory[visible], FIXTURES[f"{placement}/memory"][visible], MODEL_TOLERANCE)


@pytest.mark.sampled("pre")
@both
def test_decoder_output(placement: NormPlacement) -> None:
    """With padding in the source and in the target, whose mask is causal."""
    run, params = encoder_decoder(placement)
    kwargs = dict(source_segments=SOURCE_SEGMENTS, segments=TARGET_SEGMENTS)
    hidden = np.asarray(run(params, SOURCE_IDS, TARGET_IDS, **kwargs).hidden)
    visible = TARGET_SEGMENTS == 1
    assert_close(hidden[visible], FIXTURES[f"{placement}/hidden"][visible], MODEL_TOLERANCE)


@both
def test_encoder_with_causal_mask_is_a_language_model(placement: NormPlacement) -> None:
    model = LanguageModel(causal_config(PYTORCH, placement))
    params = {"params": causal_params(drawn, PYTORCH, placement)}
    hidden = jax.jit(model.apply)(params, tokens(SHORT, PYTORCH.vocab)).hidden
    assert_close(hidden, FIXTURES[f"{placement}/causal"], MODEL_TOLERANCE)
