import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.data.data_config import TokenizerConfig
from train.data.preferences import PreferenceDataConfig, prepare_preferences
from train.errors import UserError

END = 256


def test_batch_matches_hand_computed_values(tmp_path: Path) -> None:
    reference = {"chosen": -1.5, "rejected": -2.25, "tokens": [3, 2]}
    pairs = [
        {"prompt": "q", "chosen": "ab", "rejected": "c", "reference": reference},
        {"prompt": "q" * 9, "chosen": "a", "rejected": "b"},  # no answer within 7 tokens
        {"prompt": "qr", "chosen": "a", "rejected": "b" * 9},  # cut
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config = PreferenceDataConfig(
        path=str(path),
        validation_path=str(path),
        max_length=15,  # 7 tokens for each sequence of a pair
        tokenizer=TokenizerConfig("byte"),
    )
    corpus = prepare_preferences(config)
    split = corpus.split("train")
    assert split.lengths.tolist() == [[7], [11]]
    assert split.num_targets.tolist() == [[3, 2], [2, 5]]
    assert [note[:28] for note in corpus.notes[:2]] == [
        "the train split: 2 of 3 pair",
        "the train split: 1 of 3 pair",
    ]
    batch = split.batch(np.array([0, -1, 1]), (11,))
    a, b, c, q, r = b"abcqr"
    assert batch["tokens"].tolist() == [
        [END, q, a, b, END, q, c, 0, 0, 0, 0],
        [0] * 11,
        [END, q, r, a, END, q, r, b, b, b, b],
    ]
    assert batch["targets"].tolist() == [
        [q, a, b, END, q, c, END, 0, 0, 0, 0],
        [0] * 11,
        [q, r, a, END, q, r, b, b, b, b, b],
    ]
    assert batch["weights"].tolist() == [
        [0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 0],
        [0] * 11,
        [0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1],
    ]
    assert batch["segments"].tolist() == [
        [1, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0],
        [0] * 11,
        [1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2],
    ]
    assert batch["positions"].tolist() == [
        [0, 1, 2, 3, 0, 1, 2, 0, 0, 0, 0],
        [0] * 11,
        [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6],
    ]
    assert batch["examples"].tolist() == [0, 0, 1]
    assert batch["reference_chosen"][:2].tolist() == [-1.5, 0]
    assert batch["reference_rejected"][:2].tolist() == [-2.25, 0]
    assert np.isnan([batch["reference_chosen"][2], batch["reference_rejected"][2]]).all()
    # The digest is of the pairs, not of their place.
    moved = tmp_path / "moved.jsonl"
    path.rename(moved)
    settings: dict[str, Any] = {"max_length": 15, "tokenizer": TokenizerConfig("byte")}
    again = PreferenceDataConfig(path=str(moved), validation_path=str(moved), **settings)
    assert prepare_preferences(again).digest == corpus.digest
    moved.write_text(moved.read_text().replace("-1.5", "-1.25"))
    assert prepare_preferences(again).digest != corpus.digest
    moved.write_text(json.dumps(pairs[1]) + "\n")
    with pytest.raises(UserError, match="the train split: has no pair of answers"):
        prepare_preferences(again)
