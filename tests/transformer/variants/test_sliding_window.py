"""The sliding window is softmax attention under the window, decoded from a ring."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import array, assert_close, normal
from transformer import Hardware, Mask, NormConfig, Pattern, Rotary, SlidingWindowConfig
from transformer.mixers import NOTHING
from transformer.testing import Trial, check_mixer, make_trial
from transformer.testing.abilities import packed
from transformer.testing.trial import run
from transformer.variants.sliding_window import NOWHERE, RingCache


def on_trial(config: SlidingWindowConfig, length: int = 67) -> Trial:
    return make_trial(config, 12, length, (length,), Hardware())


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        SlidingWindowConfig(heads=2, window=7, form="blockwise", position=Rotary()),
        SlidingWindowConfig(heads=4, kv_heads=2, window=5, dilation=3, dropout=0.1, bias=False),
        SlidingWindowConfig(heads=2, window=1, qk_norm=NormConfig("rms")),
    ],
)
def test_it_keeps_the_contract(config: SlidingWindowConfig) -> None:
    check_mixer(config, width=12, length=67, lengths=(1, 67, 71))


def test_the_window_by_hand() -> None:
    """Three steps of two positions: a query sees itself and those two and four behind it."""
    trial = on_trial(SlidingWindowConfig(heads=2, window=3, dilation=2), 7)
    seen = trial.mixer.apply(
        {}, trial.inputs(0), positions=np.arange(7)[None], mask=Mask(), method="select"
    )
    behind = np.tril(np.asarray(seen)[0, 0])
    assert [np.flatnonzero(row).tolist() for row in behind] == [
        [0],
        [1],
        [0, 2],
        [1, 3],
        [0, 2, 4],
        [1, 3, 5],
        [2, 4, 6],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_tiles_are_those_of_the_formula(causal: bool) -> None:
    """At a length that is no multiple of anything, with documents packed and padding."""
    segments, positions = map(array, packed(67))
    mask = Mask(Pattern(causal=causal), positions=positions, segments=segments)
    results = []
    for form in ("blockwise", "reference"):
        trial = on_trial(
            SlidingWindowConfig(heads=3, window=9, form=form, sinks=True, soft_cap=4.0)
        )
        arguments = trial.arguments(67, mask=mask, positions=positions)

        def total(params: Any, x: Any, trial: Trial = trial, arguments: Any = arguments) -> Any:
            y = run(trial.mixer, params, x, NOTHING, arguments).y
            return (y * normal(5, *y.shape)).sum()

        results.append(jax.jit(jax.value_and_grad(total, (0, 1)))(trial.params, trial.inputs(0)))
    for got, expected in zip(*(jax.tree.leaves(each) for each in results), strict=True):
        assert_close(got, expected)


def test_the_ring_does_not_grow() -> None:
    mixer = on_trial(SlidingWindowConfig(heads=2, window=5, dilation=2)).mixer
    sizes = [mixer.init_cache(3, length).keys.shape[1] for length in (4, 9, 100_000)]
    assert sizes == [4, 9, 9]


def test_the_ring_by_hand() -> None:
    """Five tokens into three slots: the last three stay, each at its position modulo three."""
    zeros = jnp.zeros((2, 3, 1, 1))
    ring = RingCache(zeros, zeros, jnp.full((2, 3), NOWHERE))
    new = jnp.arange(10.0).reshape(2, 5, 1, 1)
    positions = array([[0, 1, 2, 3, 4], [0, 1, NOWHERE, NOWHERE, NOWHERE]])
    ring = ring.write(new, 10 * new, positions)
    assert np.asarray(ring.keys)[..., 0, 0].tolist() == [[3, 4, 2], [5, 6, 0]]
    assert np.asarray(ring.values)[..., 0, 0].tolist() == [[30, 40, 20], [50, 60, 0]]
    assert np.asarray(ring.positions).tolist() == [[3, 4, 2], [0, 1, NOWHERE]]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("window", 0, "sliding_window.window 0: give 1 or more"),
        ("dilation", 0, "sliding_window.dilation 0: give 1 or more"),
        ("dropout", 1.0, r"sliding_window.dropout 1.0: give a share in \[0, 1\)"),
        ("form", "fast", "sliding_window.form fast: is not known"),
    ],
)
def test_bad_settings_are_named(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlidingWindowConfig(**{field: value})


def test_what_it_refuses() -> None:
    trial = on_trial(SlidingWindowConfig(heads=2, window=5))
    with pytest.raises(ValueError, match=r"^mixer sliding_window: has a window of its own"):
        trial.trace(trial.inputs(0), mask=Mask(Pattern(causal=True, window=3)))
    cache = trial.mixer.init_cache(3, 67)
    with pytest.raises(ValueError, match=r"^mixer sliding_window: decodes under a causal mask"):
        trial.trace(trial.inputs(0), mask=Mask(), cache=cache)
