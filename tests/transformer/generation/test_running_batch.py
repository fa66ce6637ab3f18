"""Rows that join and leave a running batch have the tokens that `generate` gives them alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tests.transformer.generation.decoders import GPT, GREEDY, LLAMA, RECURRENT, make_decoder
from transformer.attention.full import AttentionConfig
from transformer.attention.rope import RoPE
from transformer.attention.variants.reformer import ReformerConfig
from transformer.attention.variants.sliding_window import SlidingWindowConfig
from transformer.generation import running_batch
from transformer.generation.generate import (
    continue_rows,
    generate,
    seed_words,
    start_rows,
    stop_token_array,
)
from transformer.generation.running_batch import BatchRow, RunningBatch
from transformer.generation.sampling import SamplingConfig
from transformer.models.block import BlockConfig
from transformer.models.language_model import LanguageModel

WINDOW = dataclasses.replace(
    LLAMA,
    num_layers=2,
    layer_pattern=(
        BlockConfig(
            mixer=SlidingWindowConfig(
                num_heads=6, num_kv_heads=2, head_dim=4, window=5, position=RoPE()
            )
        ),
        BlockConfig(mixer=AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=4)),
    ),
)
UNCACHED = dataclasses.replace(
    GPT,
    layer_pattern=(
        BlockConfig(mixer=ReformerConfig(num_heads=5, window=8)),
        BlockConfig(mixer=AttentionConfig(num_heads=5)),
    ),
)
CONFIGS = {
    "gpt": GPT,
    "llama": LLAMA,
    "window": WINDOW,
    "recurrent": RECURRENT,
    "uncached": UNCACHED,
}

SAMPLINGS = (
    GREEDY,
    SamplingConfig(),
    SamplingConfig(temperature=1.5, top_k=7),
    SamplingConfig(temperature=0.8, top_p=0.6),
)


def make_row(index: int) -> BatchRow:
    """Return a row unlike all others, of 1 to 30 tokens in all."""
    draw = np.random.default_rng(index)
    prompt = draw.integers(0, 61, draw.integers(1, 12)).astype(np.int32)
    return BatchRow(
        prompt=prompt,
        max_new_tokens=int(draw.integers(1, 24)),
        sampling=SAMPLINGS[index % len(SAMPLINGS)],
        seed=seed_words(index, [prompt])[0],
    )


def alone(model: Any, params: Any, row: BatchRow, stop: list[int]) -> tuple[list[int], bool]:
    tokens, [stopped] = generate(
        model,
        params,
        [row.prompt],
        max_new_tokens=row.max_new_tokens,
        sampling=row.sampling,
        seed=int(row.seed[0]),
        stop_token=stop,
    )
    return tokens[0], stopped


@pytest.fixture(params=CONFIGS)
def any_model(request: pytest.FixtureRequest) -> tuple[LanguageModel, Any]:
    return make_decoder(CONFIGS[request.param])


@pytest.mark.sampled("gpt", "llama", "window")
def test_rows_are_those_of_generate(
    any_model: tuple[LanguageModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eleven rows come at different times to a batch of four, whose cache grows."""
    monkeypatch.setattr(running_batch, "MIN_CACHE_LENGTH", 16)
    model, params = any_model
    stop = [5, 17]
    batch = RunningBatch(model, params, (1, 2, 4), stop_token_array(stop, 61))
    rows = [make_row(index) for index in range(11)]
    waiting, draw = list(rows), np.random.default_rng(0)
    while waiting or batch.rows:
        count = min(batch.num_free, int(draw.integers(0, 4)), len(waiting))
        if count:
            batch.add(waiting[:count])
            del waiting[:count]
        batch.advance(int(draw.integers(1, 5)))
    for row in rows:
        assert (row.tokens, row.stopped) == alone(model, params, row, stop)
    assert {row.stopped for row in rows} == {False, True}


def test_removed_row_leaves_its_slot_to_another() -> None:
    model, params = make_decoder(GPT)
    stop = stop_token_array(None, 61)
    batch = RunningBatch(model, params, (1, 2), stop)
    first, second, third = (make_row(index) for index in (1, 2, 3))
    for row in (first, second, third):
        row.max_new_tokens = 9
    batch.add([first, second])
    batch.advance(3)
    batch.remove(first)
    assert (batch.rows, batch.num_free) == ([second], 1)
    batch.advance(2)
    batch.add([third])
    while batch.rows:
        batch.advance(4)
    assert len(first.tokens) == 4
    for row in (second, third):
        assert (row.tokens, False) == alone(model, params, row, [])


def test_no_number_compiles_anything() -> None:
    """After one group of rows, others with other lengths, limits and settings of sampling."""
    model, params = make_decoder(dataclasses.replace(GPT, num_layers=1))
    batch = RunningBatch(model, params, (4,), stop_token_array(3, 61))
    batch.compile(4, 1)
    functions: Any = (start_rows, continue_rows, running_batch._take, running_batch._put)
    programs = [function._cache_size() for function in functions]
    for indices in ((0, 1, 2, 3), (4, 5, 6, 7)):
        batch.add([make_row(index) for index in indices])
        while batch.rows:
            batch.advance(3)
        batch.clear()
    assert [function._cache_size() for function in functions] == programs
