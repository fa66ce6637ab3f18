import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import assert_close
from tests.transformer.generation.decoders import (
    GPT,
    GREEDY,
    LLAMA,
    OUTPUT_NORMS,
    POST,
    PROMPTS,
    RECURRENT,
    make_decoder,
    read,
    step,
)
from transformer.attention.full import Attention, AttentionConfig
from transformer.attention.mixer import MIXERS, Abilities
from transformer.generation import generate as generate_module
from transformer.generation.batches import bucket_length
from transformer.generation.generate import decode_step, generate, prefill
from transformer.generation.sampling import SamplingConfig
from transformer.hardware import Hardware
from transformer.layers.position_embedding import LearnedPositions
from transformer.models.block import BlockConfig
from transformer.models.language_model import LanguageModel
from transformer.models.unstacked import unstack_for_decoding

CONFIGS = {
    "gpt": GPT,
    "llama": LLAMA,
    "output norms": OUTPUT_NORMS,
    "post": POST,
    "recurrent": RECURRENT,
}


@functools.partial(jax.jit, static_argnums=0)
def run_full_pass(model: LanguageModel, params: Any, tokens: jax.Array) -> Any:
    return model.apply({"params": params}, tokens).logits


def join_streams(streamed: list[list[list[int]]]) -> list[list[int]]:
    """Return the tokens streamed for each prompt, joined."""
    return [list(itertools.chain(*pieces)) for pieces in zip(*streamed, strict=True)]


@pytest.fixture(scope="module", params=CONFIGS)
def any_model(request: pytest.FixtureRequest) -> tuple[LanguageModel, Any]:
    return make_decoder(CONFIGS[request.param])


@pytest.fixture(scope="module")
def gpt() -> tuple[LanguageModel, Any]:
    return make_decoder(GPT)


def full_logits(model: LanguageModel, params: Any, tokens: Sequence[int]) -> np.ndarray:  # [T, V]
    """Return the logits of one text, padded at its end, by a full pass without a cache."""
    padded = np.zeros((1, 41), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(run_full_pass(model, params, padded))[0, : len(tokens)]


@pytest.mark.sampled("recurrent", "post")
def test_greedy_decoding_equals_argmax_of_the_full_pass(
    any_model: tuple[LanguageModel, Any],
) -> None:
    model, params = any_model
    tokens = generate(model, params, PROMPTS, max_new_tokens=19, sampling=GREEDY).tokens
    for prompt, new in zip(PROMPTS, tokens, strict=True):
        assert len(new) == 19
        logits = full_logits(model, params, prompt + new)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new
    assert len({tuple(new) for new in tokens}) == len(PROMPTS)


@pytest.mark.sampled("[llama", "[recurrent")
def test_decoding_logits_equal_the_full_pass(any_model: tuple[LanguageModel, Any]) -> None:
    """Token by token, in one batch of three lengths, for different padding of the prompts."""
    model, params = any_model
    texts = np.random.default_rng(0).integers(0, 61, (3, 12))
    lengths = np.array([2, 7, 5])
    expected = np.stack([full_logits(model, params, text) for text in texts])
    cut = unstack_for_decoding(params)
    cache, logits = read(model, cut, texts[:, :9], lengths, 17)
    for added in range(5):
        at = lengths + added
        assert_close(logits, expected[np.arange(3), at - 1])
        cache, logits = step(model, cut, cache, texts[np.arange(3), at], at)


@pytest.mark.full
def test_samples_are_independent_of_the_batch(gpt: tuple[LanguageModel, Any]) -> None:
    model, params = gpt
    together = generate(model, params, PROMPTS, max_new_tokens=9, seed=5).tokens
    for index in (2, 3):
        alone = generate(model, params, [PROMPTS[index]], max_new_tokens=9, seed=5)
        assert alone.tokens == [together[index]]
    reversed_batch = generate(model, params, PROMPTS[::-1], max_new_tokens=9, seed=5)
    assert reversed_batch.tokens == together[::-1]


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_beyond_32_bits_is_an_error(gpt: tuple[LanguageModel, Any], seed: int) -> None:
    model, params = gpt
    with pytest.raises(ValueError, match=rf"^seed {seed}: give an integer from 0 to "):
        generate(model, params, [[5, 3]], max_new_tokens=2, seed=seed)


def test_seeds(gpt: tuple[LanguageModel, Any]) -> None:
    model, params = gpt
    first, again, other = (
        generate(model, params, [[5, 3]] * 4, max_new_tokens=9, seed=seed).tokens
        for seed in (0, 0, 1)
    )
    assert first == again
    assert len({tuple(tokens) for tokens in first + other}) == 8  # equal prompts differ too


def test_generation_stops_at_the_stop_tokens(gpt: tuple[LanguageModel, Any]) -> None:
    model, params = gpt
    free = generate(model, params, PROMPTS, max_new_tokens=21, seed=3)
    assert free.stopped == [False] * 4
    early, late = free.tokens[0][0], free.tokens[2][12]
    for stop in (early, [late], [late, early]):
        streamed: list[list[list[int]]] = []
        ended = generate(
            model,
            params,
            PROMPTS,
            max_new_tokens=21,
            seed=3,
            stop_token=stop,
            on_tokens=streamed.append,
        )
        for actual, tokens, stopped in zip(ended.tokens, free.tokens, ended.stopped, strict=True):
            ends = np.flatnonzero(np.isin(tokens, stop))
            assert stopped == bool(len(ends))
            assert actual == tokens[: ends[0] if stopped else None]
        assert join_streams(streamed) == ended.tokens


@pytest.mark.full
def test_decoding_ends_when_all_rows_have_ended(
    gpt: tuple[LanguageModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    decode = record_calls(generate_module.continue_rows, calls)
    monkeypatch.setattr(generate_module, "continue_rows", decode)
    prompts = [[5], [5], [7]]
    tokens = generate(*gpt, prompts, max_new_tokens=36, seed=1, on_tokens=print).tokens
    assert len(calls) == 5  # of 8 tokens, after the first
    shared = set(tokens[0]).intersection(*tokens)
    last = {word: max(row.index(word) for row in tokens) for word in shared}
    stop = min(last, key=last.__getitem__)
    assert last[stop] < 17
    calls.clear()
    generate(*gpt, prompts, max_new_tokens=36, seed=1, stop_token=stop, on_tokens=print)
    assert len(calls) == -(-last[stop] // 8)


def test_tokens_are_streamed(gpt: tuple[LanguageModel, Any]) -> None:
    model, params = gpt
    streamed: list[list[list[int]]] = []
    result = generate(model, params, PROMPTS, max_new_tokens=20, on_tokens=streamed.append)
    assert [len(new[0]) for new in streamed] == [1, 8, 8, 3]
    assert join_streams(streamed) == result.tokens


@pytest.mark.full
def test_prefill_and_decode_are_compiled_once(
    gpt: tuple[LanguageModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call reloads the model, with other prompts, counts, seeds and stop tokens."""
    chex.clear_trace_counter()
    for function in (prefill, decode_step):
        once = chex.assert_max_traces(function, n=1)
        monkeypatch.setattr(generate_module, function.__name__, once)
    config = dataclasses.replace(GPT, position_embedding=LearnedPositions(97))
    for prompts, count, seed, stop in (
        ([[1, 2, 3], [5]], 3, 0, None),
        ([[7] * 31, [2, 4]], 40, 1, 6),
        ([[9], [8] * 32], 65, 2, 9),
    ):
        params = {**jax.tree.map(jnp.copy, gpt[1]), "positions": jnp.ones((97, 20))}
        model = LanguageModel(dataclasses.replace(config))
        generate(model, params, prompts, max_new_tokens=count, seed=seed, stop_token=stop)


def record_calls(function: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """Return the function, recording each call: one per compilation."""

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(function.__name__)
        return function(*arguments, **named)

    return call


def test_one_prompt_on_a_gpu_runs_beside_a_finished_row(gpt: tuple[LanguageModel, Any]) -> None:
    _, params = gpt
    mixer: Any = GPT.layer_pattern[0].mixer
    block = dataclasses.replace(
        GPT.layer_pattern[0], mixer=dataclasses.replace(mixer, backend="reference")
    )
    config = dataclasses.replace(GPT, layer_pattern=(block,))
    streamed: list[list[list[int]]] = []
    results = [
        generate(
            LanguageModel(config, Hardware(platform)),
            params,
            [[1, 2, 3]],
            max_new_tokens=11,
            sampling=GREEDY,
            on_tokens=streamed.append,
        ).tokens
        for platform in ("cpu", "gpu")
    ]
    assert results[0] == results[1] == join_streams(streamed[: len(streamed) // 2])
    assert {len(new) for new in streamed} == {1}


def test_lengths_are_bucketed() -> None:
    assert [bucket_length(n, 32, None) for n in (1, 32, 33, 255, 256)] == [32, 32, 64, 256, 256]
    assert [bucket_length(n, 32, None) for n in (257, 513, 641, 1025)] == [320, 640, 768, 1280]
    assert [bucket_length(n, 128, 997) for n in (1, 900, 990, 997)] == [128, 997, 997, 997]
    assert len({bucket_length(n, 32, None) for n in range(1, 4097)}) == 8 + 4 * 4
    assert all(n <= bucket_length(n, 32, None) < max(n + 32, 1.25 * n) for n in range(1, 4097))


@pytest.mark.full
def test_all_learned_positions_can_be_used(gpt: tuple[LanguageModel, Any]) -> None:
    model, params = gpt
    prompt = list(range(30))
    [new] = generate(model, params, [prompt], max_new_tokens=11, sampling=GREEDY).tokens
    assert full_logits(model, params, prompt + new)[29:-1].argmax(-1).tolist() == new


def test_no_prompts(gpt: tuple[LanguageModel, Any]) -> None:
    assert generate(*gpt, [], max_new_tokens=3) == ([], [])


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([[1], []], 3, "prompt 1: is empty"),
        ([[1, 61]], 3, "prompt 0: 61 is not one of the model's 61"),
        ([[-1]], 3, "prompt 0: -1 is not one of the model's 61"),
        ([[1]], 0, "max_new_tokens 0: give 1 or more"),
        ([[1], [1] * 30], 12, "prompt 1: 30 tokens leave no room for 12 .* to 11$"),
        ([[1] * 41], 1, "prompt 0: 41 tokens leave no room for 1 .* shorten it$"),
    ],
    ids=["empty", "beyond", "negative", "none", "too many", "too long"],
)
def test_invalid_prompts_are_errors(
    gpt: tuple[LanguageModel, Any], prompts: list[list[int]], count: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        generate(*gpt, prompts, max_new_tokens=count)


def test_mixer_without_cache_uses_the_full_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled programs know models by value: a loop of its own gives the mixer its own ones."""
    config = dataclasses.replace(GPT, num_layers=1)
    model, params = make_decoder(config)
    prompts = [[1], [4, 2, 3], [5, 5]]
    expected = generate(model, params, prompts, max_new_tokens=6, seed=3)
    asked = []

    class Uncached(Attention):
        @staticmethod
        def abilities(config: AttentionConfig) -> Abilities:
            asked.append(config)
            return Abilities(cached=False)

        def init_cache(self, batch: int, length: int) -> Any:
            raise AssertionError("an uncached mixer was asked for a cache")

    monkeypatch.setitem(MIXERS, "full", Uncached)
    same = LanguageModel(dataclasses.replace(config, layer_loop="unroll"))
    assert same != model
    assert generate(same, params, prompts, max_new_tokens=6, seed=3) == expected
    assert asked


def test_sampling_values_share_a_program() -> None:
    block = BlockConfig(mixer=AttentionConfig(num_heads=5), feed_forward=None)
    model, params = make_decoder(dataclasses.replace(GPT, num_layers=1, layer_pattern=(block,)))

    def programs(*settings: SamplingConfig) -> int:
        for each in settings:
            generate(model, params, [[3]], max_new_tokens=2, sampling=each)
        continue_rows: Any = generate_module.continue_rows
        return int(continue_rows._cache_size())

    first = programs(SamplingConfig(0.7, top_p=0.9))
    assert programs(SamplingConfig(0.5, top_p=0.3), SamplingConfig(3.0, top_k=5)) == first
    assert programs(SamplingConfig(0.7), SamplingConfig(0.0)) == first
