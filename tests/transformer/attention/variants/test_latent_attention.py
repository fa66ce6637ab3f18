"""Latent attention against the equations of DeepSeek-V2, with all sizes different."""

import math
from typing import Any

import jax
import numpy as np
import pytest

from tests.transformer.formulas import Array, assert_close, normal
from tests.transformer.mixers import apply_mixer, axes, inputs, make_mixer
from transformer import (
    LanguageModel,
    LatentAttentionConfig,
    Mask,
    MaskPattern,
    NormConfig,
    RoPE,
    TransformerConfig,
    YaRNScaling,
)
from transformer.attention.rope import apply_rope
from transformer.flops import count_token_flops
from transformer.models.block import BlockConfig
from transformer.parameter_counts import cache_bytes
from transformer.taps import Taps

B, T, D, N = 2, 7, 6, 3
RANK, QUERY_RANK, NOPE, ROPE, VALUE = 10, 8, 5, 4, 9
ROTARY = RoPE(
    theta=50.0,
    layout="interleaved",
    scaling=YaRNScaling(4.0, 8, mscale=0.9, mscale_all_dim=0.6),
)
CONFIG = LatentAttentionConfig(
    num_heads=N,
    kv_rank=RANK,
    query_rank=QUERY_RANK,
    nope_head_dim=NOPE,
    rope_head_dim=ROPE,
    value_head_dim=VALUE,
    bias=True,
    norm=NormConfig("rms", epsilon=0.1),
    position=ROTARY,
)
CAUSAL = Mask(MaskPattern(causal=True))
rotate = jax.jit(apply_rope, static_argnums=2)


def expected_heads(params: Any, x: Array) -> tuple[Array, Array, Array]:
    """Return queries, keys and values by equations 9 to 18 (appendix C of the report)."""

    def latent(name: str) -> Array:
        c = x @ params[name] + params[f"{name}_bias"]
        c = c / np.sqrt((c**2).mean(-1, keepdims=True) + 0.1)
        return np.asarray(c * params[f"{name}_norm"]["gain"])

    def rotated(heads: Array) -> Array:
        return np.asarray(rotate(np.float32(heads), np.arange(T)[None], ROTARY))

    c = latent("latent")
    q = np.einsum("BTR,RNH->BTNH", latent("query_latent"), params["query"])
    shared = rotated((x @ params["rope_key"] + params["rope_key_bias"])[:, :, None])
    k = np.einsum("BTR,RNH->BTNH", c, params["key"])
    k = np.concatenate([k, np.repeat(shared, N, axis=2)], axis=-1)
    v = np.einsum("BTR,RNH->BTNH", c, params["value"])
    return np.concatenate([q[..., :NOPE], rotated(q[..., NOPE:])], axis=-1), k, v


def test_output_follows_the_equations() -> None:
    mixer, params = make_mixer(CONFIG, D)
    x = normal(1, B, T, D)
    output = apply_mixer(mixer, params, x, frozenset({"weights"}), mask=CAUSAL)
    q, k, v = expected_heads(params, x)
    # YaRN's factor of all scores, as DeepSeek's code has it.
    scale = (0.1 * 0.6 * math.log(4) + 1) ** 2 / math.sqrt(NOPE + ROPE)
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) * scale
    scores = np.where(np.tri(T, dtype=bool), np.exp(scores), 0)
    weights = scores / scores.sum(-1, keepdims=True)
    assert_close(output.aux["weights"], weights)
    y = np.einsum("BNTS,BSNH->BTNH", weights, v)
    assert_close(output.y, np.einsum("BTNH,NHD->BTD", y, params["output"]) + params["output_bias"])


def test_amplitude_of_rotations_is_the_quotient_of_both_factors() -> None:
    """DeepSeek-V2 and V3 have equal ones, and rotations that do not scale."""
    assert YaRNScaling(40.0, mscale=0.707, mscale_all_dim=0.707).amplitude == 1
    assert ROTARY.scaling.amplitude == pytest.approx(
        (0.1 * 0.9 * math.log(4) + 1) / (0.1 * 0.6 * math.log(4) + 1)
    )


@pytest.mark.parametrize("rank", [RANK, 2])
def test_absorbed_projections_equal_expanded_keys(rank: int) -> None:
    """Taps ask for the expanded form, whose keys they show; wide latents for it in a prefill."""
    config = LatentAttentionConfig(N, kv_rank=rank, nope_head_dim=NOPE, position=ROTARY)
    mixer, params = make_mixer(config, D)
    x = normal(2, B, T, D)
    full = apply_mixer(mixer, params, x, mask=CAUSAL).y
    caches = [mixer.init_cache(B, T + 2) for _ in range(2)]
    for tokens in (slice(0, 4), slice(4, 5), slice(5, 7)):
        positions: Any = np.arange(T)[None, tokens].repeat(B, 0)
        here = {"positions": positions, "mask": CAUSAL.replace(positions=positions)}
        absorbed, expanded = (
            apply_mixer(mixer, params, x[:, tokens], cache=cache, taps=taps, **here)
            for cache, taps in zip(caches, (None, Taps(outputs=frozenset({"keys"}))), strict=True)
        )
        assert expanded.aux["keys"].shape == (B, T + 2, N, NOPE + 2)
        assert_close(absorbed.y, full[:, tokens])
        assert_close(expanded.y, full[:, tokens])
        assert_close(absorbed.cache.latents, expanded.cache.latents)
        caches = [absorbed.cache, expanded.cache]


def test_decoding_has_no_keys_of_all_heads() -> None:
    length = 1000
    mixer, params = make_mixer(CONFIG, D)
    given = inputs(
        1, mask=CAUSAL, cache=mixer.init_cache(1, length), positions=np.array([[length - 1]])
    )
    program = jax.make_jaxpr(lambda x: mixer.apply({"params": params}, x, given))(
        np.zeros((1, 1, D), np.float32)
    )
    sizes = [out.aval.size for eqn in program.eqns for out in eqn.outvars]
    assert max(sizes) == length * (RANK + ROPE)


def test_axes_flops_and_cache() -> None:
    names = axes(CONFIG, D)
    assert names["key"] == ("latent", "heads", "head")
    assert names["query_latent"] == ("embed", "query_latent")
    assert names["latent_norm/gain"] == ("latent",)
    block = BlockConfig(mixer=CONFIG, feed_forward=None)
    model = LanguageModel(
        TransformerConfig(vocab_size=17, d_model=D, num_layers=1, layer_pattern=(block,))
    )
    flops = count_token_flops(model, T)
    queries = D * QUERY_RANK + QUERY_RANK * N * (NOPE + ROPE)
    others = D * (RANK + ROPE) + RANK * N * (NOPE + VALUE) + N * VALUE * D
    assert flops.projections == 2 * (queries + others)
    assert flops.scores == 2 * N * (NOPE + ROPE + VALUE) * T
    assert flops.scores_causal == N * (NOPE + ROPE + VALUE) * (T + 1)
    assert cache_bytes(model, 100) == 4 * 100 * (RANK + ROPE)
