"""Window lengths are compared on the same text."""

import numpy as np
import pytest

from bench import small_runs
from bench.small_runs import held_out
from train.data.token_file import TokenStream

STREAM = TokenStream("validation", np.arange(1001), np.array([0, 300, 512, 900]), num_bytes=4000)


def targets(length: int, **size: int) -> np.ndarray:
    """Return the targets that count, in order."""
    batches = held_out(STREAM, length, segments=False, **size)
    return np.concatenate([rows["targets"][rows["weights"] > 0] for rows in batches])


@pytest.mark.parametrize("length", [32, 64, 128])
def test_any_length_evaluates_the_same_targets(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small_runs, "TOKENS_AT_ONCE", 128)
    np.testing.assert_array_equal(targets(length, tokens=512), np.arange(1, 513))


def test_limited_windows_are_spread_over_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_runs, "TOKENS_AT_ONCE", 100)
    actual = targets(50, windows=4)
    assert len(actual) == 200
    assert actual.max() > 700


def test_short_text_is_evaluated_completely() -> None:
    assert sorted(targets(64)) == [
        0,
        *range(1, 1000),
    ]  # a stream starts and ends with the separator
