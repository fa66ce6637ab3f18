"""The sliding window is softmax attention under the window, decoded from a rolling cache."""

from typing import Any, cast

import jax
import numpy as np
import pytest

from tests.transformer.formulas import array, assert_close, assert_trees_close
from tests.transformer.mixers import assert_chunks_match_full_pass, value_and_gradients
from transformer import (
    BlockConfig,
    Hardware,
    LanguageModel,
    Mask,
    MaskPattern,
    RoPE,
    SlidingWindowConfig,
    TransformerConfig,
)
from transformer.attention.cache import ABSENT_POSITION, RollingCache
from transformer.attention.mixer import MixerInputs
from transformer.attention.projections import QKV
from transformer.attention.variants.sliding_window import sliding_window_visible_keys
from transformer.testing.contract import pack_two_documents
from transformer.testing.mixer_under_test import Trial, make_trial, run_mixer


def trial_of(config: SlidingWindowConfig, length: int = 67) -> Trial:
    return make_trial(config, 12, length, (length,), Hardware())


def test_cache_of_a_window_refuses_a_prefix() -> None:
    block = BlockConfig(SlidingWindowConfig(num_heads=2, window=3))
    model = LanguageModel(TransformerConfig(11, 12, num_layers=1, layer_pattern=(block,)))
    tokens = array(np.arange(8, dtype=np.int32)[None])
    params, prefix = jax.eval_shape(model.init_params, jax.random.key(0)), array([4])

    def trace(**given: Any) -> None:
        jax.eval_shape(lambda params: model.apply({"params": params}, tokens, **given), params)

    decoding: Any = {"cache": model.init_cache(1, 12), "positions": np.arange(8)[None]}
    trace(prefix_lengths=prefix)
    trace(**decoding)
    with pytest.raises(ValueError, match="its cache holds one window of tokens, and a prefix"):
        trace(prefix_lengths=prefix, **decoding)


def test_window_by_hand() -> None:
    trial = trial_of(SlidingWindowConfig(num_heads=2, window=3, dilation=2), 7)
    mixer, inputs = cast(Any, trial.mixer), MixerInputs(array(np.arange(7)[None]), Mask())
    select = jax.jit(lambda x: mixer.select(QKV(x, x, x), inputs))
    visible = np.asarray(select(trial.inputs(0)))
    behind = np.tril(visible[0, 0])
    seen = [[0], [1], [0, 2], [1, 3], [0, 2, 4], [1, 3, 5], [2, 4, 6]]
    assert [np.flatnonzero(row).tolist() for row in behind] == seen
    plain = sliding_window_visible_keys(SlidingWindowConfig(num_heads=2, window=3), 7)
    assert plain.causal == pytest.approx((1 + 2 + 5 * 3) / 7)
    counted = sliding_window_visible_keys(mixer.config, 7)
    assert counted.causal == pytest.approx(behind.sum(-1).mean())
    assert counted.bidirectional == pytest.approx(visible[0, 0].sum(-1).mean())


@pytest.mark.parametrize(("causal", "dilation"), [(True, 2), (False, 1)])
def test_gradients_of_tiles_match_formula(causal: bool, dilation: int) -> None:
    """At a prime length, with packed documents and padding."""
    segments, positions = map(array, pack_two_documents(67))
    mask = Mask(MaskPattern(causal=causal), positions=positions, segments=segments)
    results = []
    for form in ("blockwise", "reference"):
        config = SlidingWindowConfig(
            num_heads=3, window=9, dilation=dilation, backend=form, sinks=True, soft_cap=4.0
        )
        trial = trial_of(config)
        inputs = trial.mixer_inputs(67, mask=mask, positions=positions)

        def run(params: Any, x: Any, trial: Trial = trial, inputs: Any = inputs) -> Any:
            return run_mixer(trial.mixer, params, x, inputs).y

        results.append(value_and_gradients(run, trial.params, trial.inputs(0)))
    assert_trees_close(*results)


def test_cache_size_does_not_depend_on_length() -> None:
    mixer = trial_of(SlidingWindowConfig(num_heads=2, window=5, dilation=2)).mixer
    sizes = [
        jax.eval_shape(lambda length=length: mixer.init_cache(3, length)).keys.shape[1]
        for length in (4, 9, 100_000)
    ]
    assert sizes == [4, 9, 9]


append = jax.jit(RollingCache.append)


def empty_ring(batch: int) -> RollingCache:
    """Return a cache of three slots, of one number each."""
    zeros = array(np.zeros((batch, 3, 1, 1), np.float32))
    return RollingCache(zeros, zeros, array(np.full((batch, 3), ABSENT_POSITION, np.int32)))


def test_rolling_cache_by_hand() -> None:
    """Five tokens into three slots: the last three stay, each at its position modulo three."""
    new = np.arange(10, dtype=np.float32).reshape(2, 5, 1, 1)
    positions = array([[0, 1, 2, 3, 4], [0, 1, ABSENT_POSITION, ABSENT_POSITION, ABSENT_POSITION]])
    ring = append(empty_ring(2), new, 10 * new, positions)
    assert np.asarray(ring.keys)[..., 0, 0].tolist() == [[3, 4, 2], [5, 6, 0]]
    assert np.asarray(ring.values)[..., 0, 0].tolist() == [[30, 40, 20], [50, 60, 0]]
    assert np.asarray(ring.positions).tolist() == [[3, 4, 2], [0, 1, ABSENT_POSITION]]


def test_rolling_cache_keeps_the_newest_token_of_a_slot() -> None:
    """Positions 1 and 4 share a slot: the older must not overwrite the newer, in either order."""
    new = np.arange(5, dtype=np.float32).reshape(1, 5, 1, 1)
    ring = append(empty_ring(1), new, new, array([[4, 3, 2, 1, 0]]))
    assert np.asarray(ring.positions).tolist() == [[3, 4, 2]]
    assert np.asarray(ring.keys)[..., 0, 0].tolist() == [[1, 0, 2]]


def test_rolling_cache_slots_in_position_order() -> None:
    """Empty slots come first, then tokens by position, whatever their slot."""
    tokens = array(np.arange(6, dtype=np.float32).reshape(2, 3, 1, 1))
    ring = jax.jit(RollingCache.sorted_by_position)(
        RollingCache(tokens, 10 * tokens, array([[3, 4, 2], [0, 1, ABSENT_POSITION]]))
    )
    assert np.asarray(ring.keys)[..., 0, 0].tolist() == [[2, 0, 1], [5, 3, 4]]
    assert np.asarray(ring.values)[..., 0, 0].tolist() == [[20, 0, 10], [50, 30, 40]]
    assert np.asarray(ring.positions).tolist() == [[2, 3, 4], [ABSENT_POSITION, 0, 1]]


CACHED = [
    SlidingWindowConfig(num_heads=2, window=9, sinks=True, soft_cap=3.0, position=RoPE()),
    SlidingWindowConfig(
        num_heads=4, num_kv_heads=2, window=4, dilation=3, sinks=True, backend="reference"
    ),
    SlidingWindowConfig(num_heads=2, window=5, dilation=2, sinks=True, backend="blockwise"),
]


@pytest.mark.full
@pytest.mark.parametrize("config", CACHED)
def test_chunked_prefill_matches_full_pass(config: SlidingWindowConfig) -> None:
    """Caches of 9 or 10 slots, full and not, with chunks longer and shorter than the cache."""
    trial = trial_of(config, 340)
    for sizes in ((4, 30, 1, 7, 298), (300, 20, 10, 9, 1)):
        assert_chunks_match_full_pass(trial, sizes)


@pytest.mark.full
@pytest.mark.parametrize("config", CACHED)
def test_padded_chunks_match_full_pass(config: SlidingWindowConfig) -> None:
    """Each row continues from its own position, in the second chunk as in the first."""
    trial = trial_of(config)
    x, index, rows = trial.inputs(0), np.arange(25), np.arange(3)[:, None]
    full = trial(x).y
    cache, starts = trial.init_cache(67), np.zeros(3, int)
    for lengths in ([25, 11, 1], [3, 25, 0], [14, 20, 25]):
        is_token = index < np.array(lengths)[:, None]
        positions = starts[:, None] + index
        tokens = np.where(is_token[..., None], x[rows, positions], 100 * trial.inputs(1, 25))
        y, cache, _ = trial(tokens, cache=cache, positions=np.where(is_token, positions, -1))
        assert_close(y[is_token], full[rows, positions][is_token])
        starts = starts + lengths


def test_returned_weights_with_a_cache() -> None:
    trial = trial_of(SlidingWindowConfig(num_heads=2, window=5, dilation=2))
    x, outputs = trial.inputs(0), frozenset({"weights"})
    weights = np.asarray(trial(x, cache=trial.init_cache(67), outputs=outputs).aux["weights"])
    assert weights.shape == (3, 2, 67, 9 + 67)
    assert not np.any(weights[..., :9])  # of the empty slots
    assert_close(weights[..., 9:], trial(x, outputs=outputs).aux["weights"])
