from pathlib import Path

import numpy as np
import pytest

from tests.train.data.conftest import MakeStream
from train.data.batches import TextEvaluationBatches, TextTrainingBatches
from train.data.corpus import prepare_text
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.data.masking import MaskedEvaluationBatches, MaskedTrainingBatches, Masking
from train.data.token_file import HostBatch
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer

MASK, END = 257, 256


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return a tokenizer with bytes 0 to 255, then end of text and mask."""
    return train_tokenizer(TokenizerConfig("byte"), []).with_mask_token()


def some(rows: int, length: int, seed: int = 0) -> HostBatch:
    draw = np.random.default_rng(seed)
    return {
        "tokens": draw.integers(0, 256, (rows, length)).astype(np.int32),
        "segments": np.ones((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "examples": np.arange(rows, dtype=np.uint32),
    }


def test_four_fifths_are_masked_and_a_tenth_replaced(tokenizer: Tokenizer) -> None:
    batch = some(400, 101)
    hidden = Masking(tokenizer).mask_batch(batch)
    chosen = hidden["weights"] == 1
    assert chosen.sum(axis=1).tolist() == [15] * 400  # 0.15 of 101 is 15.15
    np.testing.assert_array_equal(hidden["targets"], batch["tokens"])
    np.testing.assert_array_equal(hidden["tokens"][~chosen], batch["tokens"][~chosen])
    shown, true = hidden["tokens"][chosen], batch["tokens"][chosen]
    assert np.mean(shown == MASK) == pytest.approx(0.8, abs=0.02)
    assert np.mean((shown != MASK) & (shown != true)) == pytest.approx(0.1, abs=0.015)
    assert np.mean(shown == true) == pytest.approx(0.1, abs=0.015)
    assert END not in shown
    places = chosen.mean(axis=0)  # all positions are selected equally often
    assert places.min() > 0.15 - 0.08
    assert places.max() < 0.15 + 0.08
    types = {name: array.dtype.name for name, array in hidden.items()}
    assert [types[name] for name in ("tokens", "targets", "weights")] == ["int32"] * 2 + ["float32"]


def test_fractions_follow_the_settings(tokenizer: Tokenizer) -> None:
    batch = some(7, 20)

    def masked(chosen: float, mask: float, replaced: float) -> HostBatch:
        return Masking(
            tokenizer, mlm_probability=chosen, mask_replace_prob=mask, random_replace_prob=replaced
        ).mask_batch(batch)

    assert (masked(1, 1, 0)["tokens"] == MASK).all()
    none = masked(0.5, 0, 0)
    np.testing.assert_array_equal(none["tokens"], batch["tokens"])
    assert none["weights"].sum(axis=1).tolist() == [10] * 7
    other = masked(1, 0, 1)
    assert np.mean(other["tokens"] != batch["tokens"]) > 0.95
    assert MASK not in other["tokens"]


def test_special_tokens_and_padding_are_never_hidden(tokenizer: Tokenizer) -> None:
    batch = some(50, 11)
    batch["tokens"][:, [0, 4]] = END
    batch["segments"][:, 8:] = 0
    batch["segments"][7] = 0
    batch["tokens"][9] = END
    hidden = Masking(tokenizer, mlm_probability=0.9).mask_batch(batch)
    chosen = hidden["weights"] == 1
    assert not chosen[:, [0, 4, 8, 9, 10]].any()
    assert chosen.sum(axis=1).tolist() == [5 if row not in (7, 9) else 0 for row in range(50)]
    few = Masking(tokenizer, mlm_probability=0.01).mask_batch(batch)["weights"].sum(axis=1)
    assert few.tolist() == [1 if row not in (7, 9) else 0 for row in range(50)]


def test_masks_depend_on_seed_and_example_only(tokenizer: Tokenizer) -> None:
    batch = some(8, 40)
    full = Masking(tokenizer, seed=3).mask_batch(batch)
    part = Masking(tokenizer, seed=3).mask_batch(
        {name: array[5:7] for name, array in batch.items()}
    )
    for name in full:
        np.testing.assert_array_equal(part[name], full[name][5:7])
    other_seed = Masking(tokenizer, seed=4).mask_batch(batch)
    other_epoch = Masking(tokenizer, seed=3).mask_batch(batch | {"examples": batch["examples"] + 8})
    for other in (other_seed, other_epoch):
        assert (other["weights"] != full["weights"]).any(axis=1).all()


def test_masks_match_the_recorded_ones(tokenizer: Tokenizer) -> None:
    """A run resumed with a newer version must keep the masks it started with."""
    hidden = Masking(tokenizer, seed=7).mask_batch(some(2, 20))
    chosen = [np.flatnonzero(row).tolist() for row in hidden["weights"]]
    assert chosen == [[3, 6, 12], [1, 3, 11]]
    assert hidden["tokens"][hidden["weights"] == 1].tolist() == [257, 257, 257, 257, 257, 44]


def test_windows_of_a_stream(make_stream: MakeStream, tokenizer: Tokenizer) -> None:
    stream = make_stream([*range(1, 60)], [*range(60, 120)])
    batches = TextTrainingBatches(
        stream, batch_size=4, sequence_length=13, seed=1, document_masking=True
    )
    masked = MaskedTrainingBatches(batches, Masking(tokenizer))
    halves = [masked.host_batch(3, host, 2) for host in range(2)]
    for name, array in masked.host_batch(3, 0, 1).items():
        np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), array)
    np.testing.assert_array_equal(
        masked.host_batch(3, 0, 1)["targets"], batches.host_batch(3, 0, 1)["tokens"]
    )

    held_out = TextEvaluationBatches(
        stream, batch_size=4, sequence_length=13, document_masking=True
    )
    evaluation = MaskedEvaluationBatches(held_out, Masking(tokenizer))
    assert len(evaluation) == len(held_out) == 3
    last = evaluation.host_batch(2, 0, 1)
    assert last["weights"].sum(axis=1).tolist() == [2, 1, 0, 0]  # with 13 and with 3 words
    np.testing.assert_array_equal(last["tokens"], evaluation.host_batch(2, 0, 1)["tokens"])


def test_corpus_with_mask_token(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three " * 20)
    config = TextDataConfig(f"{tmp_path}/a.txt", tokenizer=TokenizerConfig("word", vocab_size=20))
    plain = prepare_text(config)
    masked = prepare_text(config, tokenizer=plain.tokenizer.with_mask_token())
    assert plain.tokenizer.mask_token_id is None
    assert masked.tokenizer.mask_token_id == masked.tokenizer.vocab_size - 1
    again = prepare_text(config, tokenizer=masked.tokenizer.with_mask_token())
    assert again.digest == masked.digest != plain.digest
