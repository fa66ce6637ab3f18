import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import assert_close, random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    EncoderDecoder,
    FeedForwardConfig,
    LanguageModel,
    LearnedPositions,
    SinusoidalPositions,
    TransformerConfig,
)
from transformer.attention.masks import dense_mask
from transformer.generation.beam_search import BeamSearchConfig
from transformer.generation.translate import translate
from transformer.models.encoder_decoder import _source_mask

B, S, T, V, D = 3, 7, 5, 13, 12
BLOCK = BlockConfig(
    mixer=AttentionConfig(num_heads=3, num_kv_heads=1, head_dim=5, value_head_dim=2),
    feed_forward=FeedForwardConfig(11, activation="relu"),
    norm_placement="post",
)
ENCODER = EncoderConfig(num_layers=2, layer_pattern=(BLOCK,), final_norm=None)
CONFIG = TransformerConfig(
    vocab_size=V,
    d_model=D,
    num_layers=2,
    layer_pattern=(dataclasses.replace(BLOCK, cross_attention=AttentionConfig(num_heads=2)),),
    position_embedding=SinusoidalPositions(),
    scale_embeddings=True,
    final_norm=None,
    encoder=ENCODER,
    pad_vocab_to_multiple=8,
)
SEPARATE = dataclasses.replace(
    CONFIG, tie_embeddings=False, encoder=dataclasses.replace(ENCODER, vocab_size=19)
)
LEARNED = dataclasses.replace(CONFIG, position_embedding=LearnedPositions(31))
RANDOM = np.random.default_rng(0)
SOURCE: Any = RANDOM.integers(0, V, (B, S))
TOKENS: Any = RANDOM.integers(0, V, (B, T))
SOURCE_SEGMENTS: Any = (np.arange(S)[None] < np.array([[S], [4], [1]])).astype(np.int32)


@functools.cache
def make_model(config: TransformerConfig) -> tuple[EncoderDecoder, Any, Any]:
    """Return the model, its compiled function, and random parameters."""
    model = EncoderDecoder(config)
    shapes = jax.eval_shape(model.init, jax.random.key(0), *model.example_inputs())["params"]
    return (
        model,
        jax.jit(model.apply, static_argnames="outputs"),
        {"params": random_params_like(shapes)},
    )


@pytest.mark.full
def test_shared_and_separate_embeddings() -> None:
    _, _, shared = make_model(CONFIG)
    assert set(shared["params"]) == {"embedding", "encoder", "decoder"}
    _, run, separate = make_model(SEPARATE)
    assert set(separate["params"]) == {
        "embedding",
        "source_embedding",
        "output",
        "encoder",
        "decoder",
    }
    assert separate["params"]["source_embedding"].shape == (24, D)
    assert run(separate, SOURCE + 6, TOKENS).logits.shape == (B, T, V)


@pytest.mark.full
@pytest.mark.parametrize("config", [SEPARATE, LEARNED])
def test_cached_decoding_matches_full_pass(config: TransformerConfig) -> None:
    model, run, params = make_model(config)
    full = run(params, SOURCE, TOKENS, source_segments=SOURCE_SEGMENTS).logits
    cache = model.init_cache(B, T + 2, S)
    for t in range(T):
        out = run(
            params,
            SOURCE if t == 0 else None,
            TOKENS[:, t : t + 1],
            source_segments=SOURCE_SEGMENTS,
            positions=np.full((B, 1), t),
            cache=cache,
        )
        cache = out.cache
        assert_close(out.logits[:, 0], full[:, t])


@pytest.mark.full
def test_encoded_memory_replaces_the_source() -> None:
    _, run, params = make_model(CONFIG)
    memory = run(params, SOURCE, None, source_segments=SOURCE_SEGMENTS).hidden
    assert memory.shape == (B, S, D)
    kwargs = dict(source_segments=SOURCE_SEGMENTS)
    expected = run(params, SOURCE, TOKENS, **kwargs).logits
    assert_close(run(params, None, TOKENS, memory=memory, **kwargs).logits, expected)


def test_visibility_of_source_and_target() -> None:
    """The target sees all of the source but its padding, and only earlier target tokens."""
    _, run, params = make_model(CONFIG)

    def logits(source: Any, tokens: Any) -> np.ndarray:
        return np.asarray(run(params, source, tokens, source_segments=SOURCE_SEGMENTS).logits)

    before = logits(SOURCE, TOKENS)
    padding = np.where(SOURCE_SEGMENTS == 0, (SOURCE + 1) % V, SOURCE)
    assert np.array_equal(logits(padding, TOKENS), before)
    later = TOKENS.copy()
    later[:, 3:] = (later[:, 3:] + 1) % V
    after = logits(SOURCE, later)
    assert np.array_equal(after[:, :3], before[:, :3])
    assert np.any(after[:, 3:] != before[:, 3:], axis=(1, 2)).all()
    last = SOURCE.copy()
    last[0, -1] = (last[0, -1] + 1) % V
    assert np.any(logits(last, TOKENS)[0, 0] != before[0, 0])


@pytest.mark.full
def test_packed_pairs_are_independent() -> None:
    _, run, params = make_model(CONFIG)
    source, target = SOURCE[:1], TOKENS[:1]
    packed = run(
        params,
        source,
        target,
        source_segments=np.array([[1, 1, 1, 2, 2, 2, 2]]),
        source_positions=np.array([[0, 1, 2, 0, 1, 2, 3]]),
        segments=np.array([[1, 1, 2, 2, 2]]),
        positions=np.array([[0, 1, 0, 1, 2]]),
    )
    for sources, targets in ((slice(3), slice(2)), (slice(3, None), slice(2, None))):
        alone = run(params, source[:, sources], target[:, targets])
        assert_close(packed.logits[:, targets], alone.logits)


def test_source_mask_by_hand() -> None:
    """Of packed pairs, of padding in the source alone, and of padding in the target alone."""
    target, source = np.array([[1, 2, 0]]), np.array([[2, 1, 0, 1]])
    cases: tuple[Any, ...] = (
        (target, source, [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]),
        (None, source, [[0, 1, 0, 1]] * 3),
        (target, None, [[1, 1, 1, 1]] * 3),
    )

    @jax.jit
    def visible(segments: Any, source_segments: Any) -> jax.Array:
        positions = jnp.arange(3)[None], jnp.zeros((1, 3), int)
        return dense_mask(_source_mask(positions[0], segments, source_segments, positions[1]), 3, 4)

    for segments, source_segments, expected in cases:
        found = np.asarray(visible(segments, source_segments))[0]
        assert np.array_equal(found, np.array(expected) == 1)


@pytest.mark.parametrize("length", [S, T])
def test_padding_of_the_target_does_not_hide_the_source(length: int) -> None:
    _, run, params = make_model(CONFIG)
    source = SOURCE[:, :length]
    segments = (np.arange(T)[None] < np.array([[T], [3], [2]])).astype(np.int32)
    found = np.asarray(run(params, source, TOKENS, segments=segments).logits)
    expected = np.asarray(run(params, source, TOKENS).logits)
    for row, count in enumerate(segments.sum(axis=1)):
        assert_close(found[row, :count], expected[row, :count])


@pytest.mark.full
def test_scanned_equals_unrolled_with_dropout() -> None:
    """Both have one parameter layout and the same random bits."""
    dropping = dataclasses.replace(
        CONFIG,
        embedding_dropout=0.2,
        layer_pattern=tuple(
            dataclasses.replace(b, residual_dropout=0.3) for b in CONFIG.layer_pattern
        ),
    )
    keys = jax.vmap(jax.random.key)(jnp.arange(B))
    _, scanned, params = make_model(dataclasses.replace(dropping, layer_loop="scan"))
    _, unrolled, _ = make_model(dataclasses.replace(dropping, layer_loop="unroll"))
    dropped = unrolled(params, SOURCE, TOKENS, dropout_rngs=keys).logits
    assert_close(scanned(params, SOURCE, TOKENS, dropout_rngs=keys).logits, dropped)
    assert not np.allclose(dropped, unrolled(params, SOURCE, TOKENS).logits, atol=1e-2)


@pytest.mark.sampled("1")
@pytest.mark.parametrize("beams", [1, 3])
def test_cached_search_matches_search_by_full_passes(beams: int) -> None:
    """Each step of a NumPy search over full passes ends where the cached search does."""
    model, run, params = make_model(CONFIG)
    stop, begin, limit = 3, 0, 6
    sources = [SOURCE[0], SOURCE[1, :4], SOURCE[2, :1]]
    result = translate(
        model,
        params["params"],
        sources,
        start_token=begin,
        stop_token=stop,
        beam_search_config=BeamSearchConfig(beams, 0.6),
        extra_length=limit,
        length_factor=0.0,
        batch_size=2,
    )
    for source, tokens, score in zip(sources, result.tokens, result.scores, strict=True):
        best, expected = expected_search(run, params, source, begin, stop, beams, limit)
        assert tokens == expected
        assert np.isclose(score, best, rtol=1e-4)


def test_a_forced_first_token_counts_nothing_and_the_rest_follows_it() -> None:
    model, run, params = make_model(CONFIG)
    search = dict(start_token=0, stop_token=12, extra_length=5, length_factor=0.0)
    for beams in (1, 3):
        config = BeamSearchConfig(beams, 0.0)
        found = translate(
            model,
            params["params"],
            [SOURCE[0]],
            first_token=7,
            beam_search_config=config,
            **search,  # type: ignore[arg-type]
        )
        [tokens], [score] = found.tokens, found.scores
        assert tokens[0] == 7
        ended = [*tokens, 12][:5]  # the stop token is not returned
        logits = run(params, SOURCE[:1], np.array([[0, *ended[:-1]]])).logits[0]
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        expected = sum(log_probs[i, token] for i, token in enumerate(ended) if i)
        assert np.isclose(score, expected, rtol=1e-4)
        if beams == 1:
            assert ended[1:] == log_probs[1:].argmax(-1).tolist()


def expected_search(
    run: Any, params: Any, source: Any, begin: int, stop: int, beams: int, limit: int
) -> tuple[float, list[int]]:
    beams_left: list[tuple[float, list[int]]] = [(0.0, [begin])]
    finished: list[tuple[float, list[int]]] = []
    padded = np.zeros((1, S), np.int32)
    padded[0, : len(source)] = source
    segments = (np.arange(S)[None] < len(source)).astype(np.int32)
    for step in range(limit):
        candidates = []
        for total, tokens in beams_left:
            row = np.zeros((1, limit + 1), np.int32)
            row[0, : len(tokens)] = tokens
            output = run(params, padded, row, source_segments=segments)
            logits = np.asarray(output.logits)[0, len(tokens) - 1]
            log_probs = logits - np.log(np.exp(logits).sum())
            candidates += [(total + log_probs[word], [*tokens, word]) for word in range(V)]
        candidates = sorted(candidates, key=lambda each: -each[0])[: 2 * beams]
        over = [each for each in candidates if each[1][-1] == stop or step + 1 == limit]
        finished += [(total / ((6 + step) / 6) ** 0.6, tokens[1:]) for total, tokens in over]
        beams_left = [each for each in candidates if each[1][-1] != stop][:beams]
    best, words = max(finished)
    return best, [word for word in words if word != stop]


def test_invalid_configs_and_calls_raise() -> None:
    without = dataclasses.replace(CONFIG, encoder=None)
    with pytest.raises(ValueError, match="encoder: is missing"):
        EncoderDecoder(without)
    with pytest.raises(ValueError, match="no block attends to the source"):
        EncoderDecoder(dataclasses.replace(CONFIG, layer_pattern=(BLOCK,)))
    with pytest.raises(ValueError, match="a cache of 32 tokens: the model's positions reach 31"):
        EncoderDecoder(LEARNED).init_cache(B, 32, S)
    model, _, params = make_model(CONFIG)
    with pytest.raises(ValueError, match="neither source nor tokens"):
        model.apply(params, None, None)
    blind = LanguageModel(without)
    with pytest.raises(ValueError, match="use EncoderDecoder"):
        jax.eval_shape(blind.init, jax.random.key(0), TOKENS)
