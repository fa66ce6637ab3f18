from typing import Any

import pytest

from train.data.data_config import SourceConfig, StreamingConfig, TextDataConfig, TokenizerConfig
from train.errors import UsageError


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (TextDataConfig, {"split_method": "half"}, r"^data\.split_method half: .* documents, t"),
        (TextDataConfig, {"validation_fraction": 1.0}, "validation_fraction 1.0: give "),
        (TextDataConfig, {"validation_fraction": 0.0}, "validation_fraction 0.0: give "),
        (TextDataConfig, {"sequence_length": 0}, "sequence_length 0: give "),
        (TextDataConfig, {"max_bytes": -1}, "max_bytes -1: give "),
        (TextDataConfig, {"text_field": ""}, "text_field"),
        (TokenizerConfig, {"kind": "bp"}, "tokenizer.kind bp"),
        (TokenizerConfig, {"kind": "file"}, "tokenizer.path: is empty"),
        (TokenizerConfig, {"path": "x"}, "tokenizer.path: x has no effect"),
        (TokenizerConfig, {"kind": "file", "path": "x", "lowercase": True}, "tokenizer.lowercase"),
        (TokenizerConfig, {"vocab_size": 256}, "vocab_size: 256 is too small; bpe needs 257"),
        (TokenizerConfig, {"training_characters": 0}, "training_characters 0: give "),
        (SourceConfig, {"weight": 0.0}, "weight 0.0: give "),
        (SourceConfig, {"weight": float("nan")}, "weight nan"),
        (SourceConfig, {"weight": float("inf")}, "weight inf"),
        (SourceConfig, {"name": "a/b"}, "name: 'a/b'"),
        (SourceConfig, {"text_field": ""}, "text_field"),
        (SourceConfig, {"max_epochs": -1}, "max_epochs -1: give "),
        (StreamingConfig, {"readers": 0}, "readers 0: give "),
        (StreamingConfig, {"shuffle_window": 0}, "shuffle_window 0: give "),
        (StreamingConfig, {"validation_documents": 0}, "validation_documents 0: give "),
    ],
)
def test_invalid_values(config: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**settings)


def test_smallest_settings_are_accepted() -> None:
    TextDataConfig(sequence_length=1, max_bytes=0)
    TokenizerConfig("bpe", vocab_size=257, training_characters=1)
    SourceConfig(max_bytes=0, max_epochs=0)
    StreamingConfig(readers=1, shuffle_window=1, validation_documents=1)
