from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer import formulas
from tests.transformer.formulas import assert_close, normal
from transformer.layers.moe_dispatch import load_balance_loss, route_tokens, router_z_loss

B, T, E, C = 3, 7, 5, 2
route = jax.jit(
    route_tokens,
    static_argnums=1,
    static_argnames=("normalize_gates", "score", "num_groups", "num_groups_per_token"),
)
REAL: Any = np.arange(T)[None] < np.array([T, 4, 1])[:, None]


def test_renormalized_gates_are_softmax_over_selected_logits() -> None:
    """Shazeer et al. 2017, equations 3 and 5, without the noise; padding has no gates."""
    logits: Any = normal(0, B, T, E)
    routing = route(logits, C, normalize_gates=True, token_mask=REAL)
    plain = route(logits, C, normalize_gates=False)
    for b, t in np.ndindex(B, T):
        likeliest = np.argsort(-logits[b, t])[:C]
        assert routing.expert_indices[b, t].tolist() == likeliest.tolist()
        gates = formulas.softmax(logits[b, t, likeliest]) * REAL[b, t]
        assert_close(routing.gates[b, t], gates, 1e-6)
        assert_close(plain.gates[b, t], formulas.softmax(logits[b, t])[likeliest], 1e-6)


def test_ties_select_the_first_experts() -> None:
    routing = route(np.zeros((1, 1, E), np.float32), 3, normalize_gates=True)
    assert routing.expert_indices.tolist() == [[[0, 1, 2]]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_experts_come_from_the_best_groups(score: Any) -> None:
    """DeepSeek-V2, section 2.2.2: groups by their best expert; V3: by the two best, with the bias.

    The bias decides about the choice alone: gates are scores without it.
    """
    groups, chosen_groups, size = 4, 2, 3
    logits = normal(0, B, T, groups * size)
    bias: Any = 3 * normal(1, groups * size) if score == "sigmoid" else None
    routing = route(
        logits,
        C,
        normalize_gates=score == "sigmoid",
        score=score,
        selection_bias=bias,
        num_groups=groups,
        num_groups_per_token=chosen_groups,
    )
    for b, t in np.ndindex(B, T):
        scores = formulas.softmax(logits[b, t])
        if score == "sigmoid":
            scores = 1 / (1 + np.exp(-logits[b, t]))
        ranking = scores if bias is None else scores + bias
        best = np.sort(ranking.reshape(groups, size))[:, -1 if bias is None else -2 :].sum(-1)
        allowed = np.isin(np.arange(groups * size) // size, np.argsort(-best)[:chosen_groups])
        experts = np.argsort(np.where(allowed, -ranking, np.inf))[:C]
        assert routing.expert_indices[b, t].tolist() == experts.tolist()
        gates = scores[experts] / (1 if bias is None else scores[experts].sum())
        assert_close(routing.gates[b, t], gates, 1e-6)
        assert_close(routing.probabilities[b, t], scores / scores.sum(), 1e-6)


def expected_balance_loss(probabilities: Any, experts: Any, real: Any) -> float:
    """Compute equation 4 of Fedus et al. 2022 per example; return the token-weighted mean."""
    total = 0.0
    for b in range(B):
        tokens = np.flatnonzero(real[b])
        for e in range(E):
            f = np.mean([np.mean(experts[b, t] == e) for t in tokens])
            total += len(tokens) * E * f * np.mean(probabilities[b, tokens, e])
    return total / real.sum()


@pytest.mark.parametrize("real", [REAL, np.ones((B, T), bool)], ids=["padded", "full"])
def test_losses_match_numpy(real: Any) -> None:
    logits = normal(0, B, T, E)
    routing = route(logits, C, normalize_gates=True, token_mask=real)
    expected = expected_balance_loss(
        np.asarray(routing.probabilities), np.asarray(routing.expert_indices), real
    )
    assert_close(jax.jit(load_balance_loss)(routing), np.float64(expected))
    squares = np.log(np.exp(logits.astype(np.float64)).sum(-1)) ** 2
    assert_close(jax.jit(router_z_loss)(logits, real), squares[real].mean())


@jax.jit
def losses(logits: Any, mask: Any) -> jax.Array:  # [2]
    routing = route_tokens(logits, C, normalize_gates=True, token_mask=mask)
    return jnp.stack([load_balance_loss(routing), router_z_loss(logits, routing.token_mask)])


def test_a_mask_for_all_rows_counts_for_each() -> None:
    logits = normal(0, B, T, E)
    one, each = (losses(logits, mask) for mask in (REAL[:1], np.repeat(REAL[:1], B, axis=0)))
    assert_close(one, each)


def test_batch_of_padding_has_no_losses() -> None:
    assert losses(normal(0, B, T, E), np.zeros((B, T), bool)).tolist() == [0, 0]
