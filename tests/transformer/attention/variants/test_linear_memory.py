"""No compiled program of a variant of linear cost has an array of T x S, forward or backward.

Top-k attention and full attention in tiles are included: their time grows with T x S, but not
their memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.compiled import pairs_of_tokens, program_of, shapes_in
from tests.transformer.formulas import array, normal
from tests.transformer.mixers import made
from transformer import (
    AttentionConfig,
    BigBirdConfig,
    LinearAttentionConfig,
    LinformerConfig,
    LongformerConfig,
    Mask,
    MaskPattern,
    MixerConfig,
    PerformerConfig,
    ReformerConfig,
    RoutingAttentionConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
    TopKConfig,
)
from transformer.attention.mixer import MixerInputs, mixer_class

T, D = 1021, 6
"""A prime, which no other size equals: what is padded to blocks is longer. All else is small, so
that what is kept of a token comes to a tenth of T at most; tiles have 128 x S."""

CONFIGS: dict[str, MixerConfig] = {
    "full in tiles": AttentionConfig(num_heads=1, backend="blockwise"),
    "sliding_window": SlidingWindowConfig(num_heads=1, window=16, sinks=True),
    "sliding_window, dilated": SlidingWindowConfig(num_heads=1, window=16, dilation=3),
    "longformer": LongformerConfig(
        num_heads=2, one_sided_window=16, dilations=(2, 1), num_global_tokens=3
    ),
    "bigbird": BigBirdConfig(num_heads=1, block_size=8, random_block_span=T),
    "sparse, strided": SparseTransformerConfig(num_heads=1, pattern="strided", stride=32),
    "sparse, fixed": SparseTransformerConfig(
        num_heads=1, pattern="fixed", stride=32, num_summary_tokens=2
    ),
    "performer": PerformerConfig(num_heads=1, num_features=10),
    "linear": LinearAttentionConfig(num_heads=1),
    "linformer": LinformerConfig(num_heads=1, max_length=T, rank=8),
    "routing": RoutingAttentionConfig(num_heads=1, num_clusters=32, window=16),
    "routing, balanced": RoutingAttentionConfig(
        num_heads=1, num_clusters=32, window=32, balanced=True
    ),
    "reformer": ReformerConfig(num_heads=1, num_buckets=32, num_hashes=2, window=8),
    "top_k": TopKConfig(num_heads=1, keys_per_query=8),
}
QUADRATIC = AttentionConfig(num_heads=1, backend="reference")
CAUSAL, FULL = MaskPattern(causal=True), MaskPattern()
DOCUMENTS = array(1 + np.arange(T)[None] // 400)


def able(name: str) -> Any:
    return mixer_class(CONFIGS[name]).abilities(CONFIGS[name])


BOTH_WAYS = [
    pytest.param(name, pattern, id=f"{name}, {'causal' if pattern.causal else 'both ways'}")
    for name in CONFIGS
    for pattern in (CAUSAL, FULL)
    if able(name).causal or not pattern.causal
]
CACHED = [name for name in CONFIGS if able(name).cached]


def called(config: MixerConfig) -> Any:
    """The mixer as a function of weights, x and what else is given, and its weights."""
    constants: Any = mixer_class(config).constants(config, 0, D)
    mixer, params = made(config, D, constants=constants)
    positions = jnp.arange(T)[None]

    def call(params: Any, x: Any, mask: Mask, cache: Any = None) -> Any:
        given: Any = dict(positions=positions, constants=constants, mask=mask, cache=cache)
        return mixer.apply({"params": params}, x, MixerInputs(**given))

    return mixer, call, params


def training(config: MixerConfig, mask: Mask) -> str:
    """The program of a result, and of a value with the gradients of weights and inputs."""
    _, call, params = called(config)

    def total(params: Any, x: Any) -> jax.Array:
        return jnp.square(call(params, x, mask).y).sum()

    def both(params: Any, x: Any) -> Any:
        return call(params, x, mask).y, jax.value_and_grad(total, argnums=(0, 1))(params, x)

    return program_of(both, params, normal(0, 1, T, D))


def prefill(config: MixerConfig) -> str:
    """The program that reads T tokens into an empty cache."""
    mixer, call, params = called(config)

    def read(params: Any, x: Any, cache: Any) -> Any:
        mask = Mask(CAUSAL, positions=jnp.arange(T)[None])
        return call(params, x, mask, cache)[:2]

    return program_of(read, params, normal(0, 1, T, D), mixer.init_cache(1, T))


@pytest.mark.slow
@pytest.mark.sampled(
    "[sliding_window, causal",
    "[bigbird, causal",
    "[performer, causal",
    "[linear, causal",
    "[linformer",
    "balanced",
    "[top_k, causal",
)
@pytest.mark.parametrize(("name", "pattern"), BOTH_WAYS)
def test_nothing_of_pairs_of_tokens_exists(name: str, pattern: MaskPattern) -> None:
    """In a row of one document, and in a pack where the variant takes one."""
    masks = [Mask(pattern)]
    if able(name).segments:
        masks.append(dataclasses.replace(masks[0], segments=DOCUMENTS))
    for mask in masks:
        program = training(CONFIGS[name], mask)
        assert pairs_of_tokens(program, T) == []
        assert any(T in shape for shape in shapes_in(program))  # it is the program of so many


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHED)
def test_reading_a_prompt_makes_nothing_of_pairs_of_tokens(name: str) -> None:
    assert pairs_of_tokens(prefill(CONFIGS[name]), T) == []


@pytest.mark.parametrize("pattern", [CAUSAL, FULL], ids=["causal", "both ways"])
def test_pairs_of_tokens_would_be_seen(pattern: MaskPattern) -> None:
    """Full attention with all scores in memory is detected, with and without a cache."""
    assert (1, 1, T, T) in pairs_of_tokens(training(QUADRATIC, Mask(pattern)), T)
    if pattern.causal:
        assert (1, 1, T, T) in pairs_of_tokens(prefill(QUADRATIC), T)


@pytest.mark.parametrize(
    "shape",
    [(T, T), (T, 3, T), (2, T, T, 5), (1024, 1, T), (16, 64, 16, 64), (T * T,), (8, 128, 1030)],
)
def test_no_layout_hides_them(shape: tuple[int, ...]) -> None:
    """Transposed, split, padded, in tiles, flat, and in blocks of too many rows."""
    text = f"  x = bf16[{','.join(map(str, shape))}]{{1,0}} add(f32[{T},6]{{1,0}} y, s32[] z)"
    assert pairs_of_tokens(text, T) == [shape]
    assert shapes_in(text) == {shape, (T, 6)}


def test_a_triangle_of_pairs_would_be_seen() -> None:
    """In a real program, flat."""
    rows, columns = np.tril_indices(T)
    program = program_of(lambda x: jnp.sort(x[rows] * x[columns]), normal(0, T))
    assert (T * (T + 1) // 2,) in pairs_of_tokens(program, T)
