"""Compiled programs of variants with linear memory have no array of T x S, forward or backward.

Top-k attention and full attention in tiles are included: their time grows with T x S, but not
their memory.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.compiled import compiled_text, quadratic_shapes, shapes_in
from tests.transformer.formulas import array, normal
from tests.transformer.mixers import make_mixer
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

pytestmark = pytest.mark.full

T, D = 1021, 6
"""T is a prime that no other size equals; padding to blocks makes it longer. All other sizes are
small, so that what is stored per token is at most T / 10; tiles have 128 x S entries."""

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
CAUSAL, FULL = MaskPattern(causal=True), MaskPattern()
DOCUMENTS = array(1 + np.arange(T)[None] // 400)


def abilities(name: str) -> Any:
    return mixer_class(CONFIGS[name]).abilities(CONFIGS[name])


TRAINING_CASES = [
    pytest.param(name, pattern, id=f"{name}, {'causal' if pattern.causal else 'both ways'}")
    for name in CONFIGS
    for pattern in (CAUSAL, FULL)
    if abilities(name).causal or not pattern.causal
]


def build_mixer(config: MixerConfig) -> Any:
    """Return the mixer, a function that calls it, and its weights."""
    constants: Any = mixer_class(config).constants(config, 0, D)
    mixer, params = make_mixer(config, D, constants=constants)
    positions = jnp.arange(T)[None]

    def call(params: Any, x: Any, mask: Mask, cache: Any = None) -> Any:
        kwargs: Any = dict(positions=positions, constants=constants, mask=mask, cache=cache)
        return mixer.apply({"params": params}, x, MixerInputs(**kwargs))

    return mixer, call, params


def training_program(config: MixerConfig, mask: Mask) -> str:
    """Return the compiled program of outputs, loss and gradients of weights and inputs."""
    _, call, params = build_mixer(config)

    def total(params: Any, x: Any) -> jax.Array:
        return jnp.square(call(params, x, mask).y).sum()

    def both(params: Any, x: Any) -> Any:
        return call(params, x, mask).y, jax.value_and_grad(total, argnums=(0, 1))(params, x)

    return compiled_text(both, params, normal(0, 1, T, D))


def prefill_program(config: MixerConfig) -> str:
    """Return the compiled program that reads T tokens into an empty cache."""
    mixer, call, params = build_mixer(config)

    def read(params: Any, x: Any, cache: Any) -> Any:
        mask = Mask(CAUSAL, positions=jnp.arange(T)[None])
        return call(params, x, mask, cache)[:2]

    return compiled_text(read, params, normal(0, 1, T, D), mixer.init_cache(1, T))


@pytest.mark.parametrize(("name", "pattern"), TRAINING_CASES)
def test_training_allocates_no_quadratic_array(name: str, pattern: MaskPattern) -> None:
    """For a row of one document, and for packed documents if the variant supports segments."""
    masks = [Mask(pattern)]
    if abilities(name).segments:
        masks.append(dataclasses.replace(masks[0], segments=DOCUMENTS))
    for mask in masks:
        program = training_program(CONFIGS[name], mask)
        assert quadratic_shapes(program, T) == []
        assert any(T in shape for shape in shapes_in(program))  # it does have arrays of T tokens


@pytest.mark.parametrize("name", [name for name in CONFIGS if abilities(name).cached])
def test_prefill_allocates_no_quadratic_array(name: str) -> None:
    assert quadratic_shapes(prefill_program(CONFIGS[name]), T) == []


def test_quadratic_arrays_are_detected() -> None:
    """Of full attention that materializes its scores, with and without a cache."""
    quadratic = AttentionConfig(num_heads=1, backend="reference")
    for program in (training_program(quadratic, Mask(CAUSAL)), prefill_program(quadratic)):
        assert (1, 1, T, T) in quadratic_shapes(program, T)
