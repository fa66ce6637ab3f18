"""`bench.longformer` compares equal results, with equal settings on both sides."""

import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import longformer
from bench.contender import Record
from bench.longformer import Options, check, inputs, main
from bench.longformer_race import Shape, contenders, exponent, growth
from bench.window_forms import FORMS
from train.errors import UserError


@pytest.mark.parametrize("form", FORMS)
def test_every_implementation_is_softmax_over_the_window(form: str) -> None:
    window, length, width = 3, 15, 5
    q, k, v = (np.asarray(each) for each in inputs(length, 2, width))
    scores = np.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(width)
    index = np.arange(length)
    near = np.abs(index[:, None] - index[None]) <= window
    exp_scores = np.where(near, np.exp(scores), 0)
    expected = np.einsum("BNTS,BSNH->BTNH", exp_scores / exp_scores.sum(-1, keepdims=True), v)
    actual = np.asarray(FORMS[form](*inputs(length, 2, width), window))
    assert np.abs(actual - expected).max() <= 1e-5 * max(1, np.abs(expected).max())


def test_implementation_with_other_results_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*heads: Any, window: int) -> Any:
        return 1.001 * FORMS["full"](*heads, window)

    monkeypatch.setattr(longformer, "FORMS", {"full": FORMS["full"], "loop": wrong})
    with pytest.raises(AssertionError, match=r"loop: .* off"):
        check()


def test_length_that_is_not_a_multiple_of_chunks_raises() -> None:
    with pytest.raises(UserError, match="shortest 300: chunks are of 256 tokens"):
        main(Options(shortest=300))


def test_both_sides_have_the_same_settings() -> None:
    ours, peer = contenders(Path(sys.executable), "bigbird", 640, Shape())
    assert ours.settings == peer.settings
    assert ours.settings["threads"] == len(os.sched_getaffinity(0))
    assert (ours.settings["mixer"], ours.settings["length"]) == ("bigbird", 640)
    assert ours.command[-1] == "bench.peers.ours_mixer"
    assert peer.command[-1] == "bench.peers.huggingface_long"


def record(name: str, memory: int) -> Record:
    return Record(name, {}, {}, 1.0, (1.0,), (None,), (None,), memory)


def test_quadratic_memory_has_exponent_two() -> None:
    assert exponent([512, 1024], [3, 12]) == "2.00"
    assert exponent([512, 1024], [0, 12]) == "-"
    assert exponent([512], [3]) == "-"
    memory = {t: [record("ours", t), record("theirs", t * t)] for t in (512, 1024)}
    last = growth(memory).columns[-1]
    assert list(last.cells) == ["1.00", "2.00"]
