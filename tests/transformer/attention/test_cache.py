import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import array, assert_close, normal, random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LanguageModel,
    RoPE,
    TransformerConfig,
)
from transformer.attention.cache import KVCache, MemoryCache, RollingCache

B, T, V = 3, 11, 13


def test_tokens_are_written_at_per_example_positions() -> None:
    cache = KVCache.empty(2, 5, 7, 3, "float32", 2)
    keys, values = 1 + normal(0, 2, 2, 7, 3), 1 + normal(1, 2, 2, 7, 2)
    positions: Any = np.array([[3, 4], [0, 1]])
    written = jax.jit(KVCache.append)(cache, keys, values, positions)
    read = written.read("float32")
    for stored, new in ((read.keys, keys), (read.values, values)):
        assert np.array_equal(stored[0, 3:], new[0])
        assert np.array_equal(stored[1, :2], new[1])
        assert not np.any(stored[0, :3])
        assert not np.any(stored[1, 2:])
    assert np.array_equal(cache.positions, [[0, 1, 2, 3, 4]])
    same = jax.jit(KVCache.append)(cache, keys, values, positions[:1]).read("float32")
    assert np.array_equal(same.keys[:, 3:], keys)
    assert np.array_equal(same.values[:, 3:], values)


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_beyond_the_cache_raise(count: int) -> None:
    """The update of a slice would move them back, onto earlier tokens."""
    cache = KVCache.empty(1, 5, 1, 2, "float32")
    tokens = normal(0, 1, count, 1, 2)
    last: Any = np.arange(5 - count, 5)[None]
    cache.append(tokens, tokens, last)
    with pytest.raises(ValueError, match="beyond the cache of 5"):
        cache.append(tokens, tokens, last + 1)


def test_storage_and_read_dtypes_differ() -> None:
    keys, values = normal(0, 2, 2, 1, 3), normal(1, 2, 2, 1, 3)

    @jax.jit
    def write_and_read(keys: Any, values: Any) -> Any:
        positions = array([[0, 1]] * 2)
        caches = [
            kind.empty(2, 4, 1, 3, "bfloat16").append(keys, values, positions)
            for kind in (KVCache, RollingCache)
        ]
        memory = MemoryCache.empty(2, 2, 1, 3, "bfloat16").append(keys, values)
        every: list[Any] = [*caches, memory]
        return every, [cache.read("float32") for cache in every]

    (*caches, memory), (*reads, memory_read) = jax.device_get(write_and_read(keys, values))
    rounded = keys.astype("bfloat16").astype("float32")
    for cache, read in zip(caches, reads, strict=True):
        assert cache.keys.dtype == cache.values.dtype == "bfloat16"
        assert np.array_equal(read.keys[:, :2], rounded)
        assert read.values.dtype == "float32"
        assert read.positions[0, :2].tolist() == [0, 1]
    assert np.array_equal(memory_read.keys, rounded)
    with pytest.raises(ValueError, match="its cache is for 2 x 2; call init_memory_cache"):
        memory.append(keys[:, :1], values[:, :1])


MIXERS = (  # with caches of different shapes
    AttentionConfig(num_heads=6, num_kv_heads=3, position=RoPE()),
    AttentionConfig(num_heads=5, num_kv_heads=1, head_dim=4, value_head_dim=7, position=RoPE()),
)
PATTERN = tuple(BlockConfig(mixer=each, feed_forward=FeedForwardConfig(17)) for each in MIXERS)
MODEL = TransformerConfig(
    vocab_size=V, d_model=12, num_layers=2, layer_pattern=PATTERN, pad_vocab_to_multiple=8
)


def test_bidirectional_model_sees_only_written_slots() -> None:
    """Neither free slots after the newest token nor another prompt's padding are visible."""
    causal = LanguageModel(MODEL)
    bidirectional = LanguageModel(dataclasses.replace(MODEL, causal=False))
    tokens: Any = np.random.default_rng(0).integers(0, V, (B, 5))
    params = random_params_like(jax.eval_shape(causal.init, jax.random.key(0), tokens)["params"])
    expected, bidirectional_logits = (
        np.asarray(jax.jit(model.apply)({"params": params}, tokens).logits)[..., :V]
        for model in (causal, bidirectional)
    )
    assert np.abs(bidirectional_logits - expected).max() > 0.1
    for size in (5, 9):
        cache = bidirectional.init_cache(B, size)
        kwargs: Any = dict(cache=cache, positions=np.arange(5)[None].repeat(B, 0))
        out: Any = jax.jit(bidirectional.apply)({"params": params}, tokens, **kwargs)
        assert_close(out.logits[..., :V], expected)
