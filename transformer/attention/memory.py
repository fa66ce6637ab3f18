"""Keys and values of cross-attention, which come from an encoder's output (the memory)."""

from typing import Any

import jax
from flax import linen as nn

from transformer.attention.cache import MemoryCache
from transformer.attention.config import MultiHeadConfig
from transformer.attention.projections import project_keys, project_values
from transformer.context import ModelContext


def project_memory(
    module: nn.Module,
    memory: jax.Array | None,  # [B, S, D]; None: read the cache
    cache: Any,
    config: MultiHeadConfig,
    context: ModelContext,
    dtype: Any,  # of the computation; the cache may store another
) -> tuple[jax.Array, jax.Array, MemoryCache | None]:  # [B, S, K, H], [B, S, K, H of values]
    """Return keys and values of the memory without RoPE, and the cache that holds them.

    They are the same for all tokens of the decoder, so decoding projects them once.

    Raises:
      ValueError: If the cache is not one for a memory.
    """
    if not isinstance(cache, MemoryCache | None):
        raise ValueError("attention with a memory: give a cache of init_memory_cache")
    if memory is not None:
        k = project_keys(module, memory, config, context)
        v = project_values(module, memory, config, context)
        if cache is None:
            return k, v, None
        cache = cache.append(k, v)
    assert cache is not None
    return *cache.read(dtype)[:2], cache
