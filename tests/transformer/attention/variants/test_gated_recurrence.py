"""Gated DeltaNet and Mamba-2 against their recurrences, token by token in NumPy."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import Array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, make_mixer
from transformer import GatedDeltaConfig, Mamba2Config, Mask, MaskPattern, MixerConfig
from transformer.attention.document_boundaries import DocumentBoundaries
from transformer.attention.variants import chunks
from transformer.attention.variants.gated_recurrence import scan_chunks, step_bias_initializer

B, T, D, K, N, H, HV, TAPS = 2, 11, 6, 2, 4, 3, 5, 3
DELTA = GatedDeltaConfig(
    num_heads=N, num_key_heads=K, head_dim=H, value_head_dim=HV, kernel_size=TAPS
)
MAMBA = Mamba2Config(
    num_heads=N, head_dim=HV, state_dim=H, num_groups=K, kernel_size=TAPS, bias=True
)
CAUSAL = Mask(MaskPattern(causal=True))


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_SIZE", 4)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def convolved(x: Array, w: Any, name: str) -> Array:  # [T, heads, width] of one row
    projected = np.tensordot(x, w[name], 1) + w.get(f"{name}_bias", 0)
    padded = np.concatenate([np.zeros((TAPS - 1, *projected.shape[1:])), projected])
    taps, bias = w[f"{name}_taps"], w.get(f"{name}_taps_bias", 0)
    return silu(sum(padded[i : i + len(x)] * taps[i] for i in range(TAPS)) + bias)


def recurrence(q: Array, k: Array, v: Array, decay: Array, strength: Any) -> tuple[Array, Array]:
    """Return the outputs [T, N, HV] and the states [N, H, HV] after the last token of one row."""
    states, y = np.zeros((N, H, HV)), np.zeros(v.shape)
    for t, n in np.ndindex(*v.shape[:2]):
        key, query = k[t, n // (N // K)], q[t, n // (N // K)]
        state = decay[t, n] * states[n]
        written = v[t, n]
        if strength is not None:
            written = strength[t, n] * (v[t, n] - key @ state)
        states[n] = state + np.outer(key, written)
        y[t, n] = query @ states[n]
    return y, states


def expected_delta(x: Array, w: Any) -> tuple[Array, Array]:
    q, k, v = (convolved(x, w, name) for name in ("query", "key", "value"))
    q, k = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (q, k))
    gate, beta, rate = (np.tensordot(x, w[name], 1) for name in ("output_gate", "beta", "decay"))
    step = np.log1p(np.exp(rate + w["dt_bias"]))
    decay = np.exp(-np.exp(w["a_log"]) * step).reshape(T, N)
    y, states = recurrence(q / math.sqrt(H), k, v, decay, 1 / (1 + np.exp(-beta.reshape(T, N))))
    y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 1e-5) * w["norm"]["gain"] * silu(gate)
    return np.tensordot(y, w["output"], 2), states


def expected_mamba(x: Array, w: Any) -> tuple[Array, Array]:
    q, k, v = (convolved(x, w, name) for name in ("query", "key", "value"))
    gate, rate = (
        np.tensordot(x, w[name], 1) + w[f"{name}_bias"] for name in ("output_gate", "step")
    )
    step = np.log1p(np.exp(rate + w["dt_bias"]))
    decay = np.exp(-np.exp(w["a_log"]) * step)
    y, states = recurrence(q, k, v * step[..., None], decay, None)
    y = (y + w["skip"][:, None] * v) * silu(gate)
    grouped = y.reshape(T, K, -1)
    grouped = grouped / np.sqrt(np.mean(grouped**2, axis=-1, keepdims=True) + 1e-5)
    y = grouped.reshape(y.shape) * w["norm_gain"]
    return np.tensordot(y, w["output"], 2) + w["output_bias"], states


@pytest.mark.parametrize(("config", "expected"), [(DELTA, expected_delta), (MAMBA, expected_mamba)])
def test_matches_the_recurrence(config: MixerConfig, expected: Any) -> None:
    mixer, w = make_mixer(config, D)
    x = normal(0, B, T, D)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), w)
    rows = [expected(row.astype(np.float64), wide) for row in x]
    result = apply_mixer(mixer, w, x, mask=CAUSAL, cache=mixer.init_cache(B, T))
    assert_close(result.y, np.stack([y for y, _ in rows]))
    assert_close(result.cache.state, np.stack([states for _, states in rows]))
    assert_close(apply_mixer(mixer, w, x).y, result.y)  # causal without a mask too


def test_a_new_document_forgets_a_cached_one() -> None:
    """The state is of a first document. Two more of its tokens follow, then another document."""
    for config in (DELTA, MAMBA):
        mixer, w = make_mixer(config, D)
        x, y = normal(0, B, T, D), normal(1, B, T, D)
        cache = apply_mixer(mixer, w, x, mask=CAUSAL, cache=mixer.init_cache(B, T)).cache
        both = np.concatenate([x[:, :2], y], axis=1)
        positions = np.concatenate([[T, T + 1], np.arange(T)])[None]
        result = apply_mixer(mixer, w, both, mask=CAUSAL, cache=cache, positions=positions)
        alone = apply_mixer(mixer, w, y, mask=CAUSAL, cache=mixer.init_cache(B, T))
        assert_close(result.y[:, 2:], alone.y)
        assert_close(result.cache.state, alone.cache.state)


def test_small_decays_after_a_large_one_keep_their_digits() -> None:
    """A difference of cumulative sums near 1e6 would round a logarithm of 0.1 to a sixteenth."""
    q, k, v = normal(0, 1, 4, 1, H), normal(1, 1, 4, 1, H), normal(2, 1, 4, 1, HV)
    log_decay = jnp.array([-1e6, -1e6, -0.1, -0.2]).reshape(1, 4, 1)
    y, _ = scan_chunks(q, k, v, log_decay, None, None)
    weights = np.exp([-0.3, -0.2, 0]) * (k[0, 1:, 0] @ q[0, 3, 0])
    assert_close(y[0, 3, 0], weights @ v[0, 1:, 0])


def test_padding_leaves_the_state_as_it_is() -> None:
    q, k, v = normal(0, 1, T, 1, H), normal(1, 1, T, 1, H), normal(2, 1, T, 1, HV)
    log_decay, strength = -np.abs(normal(3, 1, T, 1)), np.abs(normal(4, 1, T, 1))
    is_token = np.arange(T)[None] < 7
    boundaries = DocumentBoundaries(jnp.zeros((1, T), bool), jnp.asarray(is_token))
    y, state = scan_chunks(q, k, v, log_decay, strength, boundaries)
    q, k, v, log_decay, strength = (each[:, :7] for each in (q, k, v, log_decay, strength))
    expected, alone = scan_chunks(q, k, v, log_decay, strength, None)
    assert_close(y, np.concatenate([expected, np.zeros((1, T - 7, 1, HV))], axis=1))
    assert_close(state, alone)


def test_states_are_wide_in_bfloat16() -> None:
    """Steps of one 512th: a state in bfloat16 would stop at 1."""
    tokens = 1024
    ones = np.ones((1, tokens, 1, 1))
    low = jnp.bfloat16(ones)
    decay = jnp.zeros((1, tokens, 1))
    _, state = scan_chunks(low, low, low / 512, decay, None, None)
    assert state.dtype == np.float32
    assert_close(state, np.full((1, 1, 1, 1), 2.0))


def test_axes_and_settings() -> None:
    found = axes(DELTA, D)
    assert found["query"] == ("embed", "kv_heads", "head")
    assert found["value"] == found["output_gate"] == ("embed", "heads", "head")
    assert found["beta"] == ("embed", "kv_heads", "group")
    assert axes(MAMBA, D)["a_log"] == ("heads",)
    for name, build in (
        ("num_key_heads 3", lambda: GatedDeltaConfig(num_heads=4, num_key_heads=3)),
        ("num_heads 4", lambda: GatedDeltaConfig(num_heads=4).check_d_model(D)),
        ("num_groups 3", lambda: Mamba2Config(num_heads=4, num_groups=3)),
        ("num_heads 5", lambda: Mamba2Config(num_heads=5).check_d_model(D)),
    ):
        with pytest.raises(ValueError, match=f"{name}: does not divide .*; give a divisor"):
            build()


def test_first_steps_are_within_their_range() -> None:
    bias = np.asarray(step_bias_initializer(jax.random.key(0), (1000,), np.float32), np.float64)
    step = np.log1p(np.exp(bias))
    assert 0.99e-3 < step.min() < 2e-3
    assert 0.09 < step.max() < 0.101
