from typing import Any

import pytest

from train.data.arrays import ArrayDataConfig
from train.data.bitext import BitextDataConfig
from train.data.conversations import ConversationDataConfig
from train.data.data_config import TokenizerConfig
from train.data.examples import ExampleDataConfig
from train.data.features import FeatureDataConfig
from train.data.listops import ListOpsDataConfig
from train.data.preferences import PreferenceDataConfig
from train.data.text_labels import ClassificationDataConfig
from train.data.token_labels import TokenLabelDataConfig
from train.errors import UsageError


@pytest.mark.parametrize(
    "config",
    [
        BitextDataConfig,
        ClassificationDataConfig,
        ConversationDataConfig,
        ListOpsDataConfig,
        PreferenceDataConfig,
        TokenLabelDataConfig,
    ],
)
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("validation_fraction", 1.0),
        ("validation_fraction", 0.0),
        ("split_seed", -1),
        ("max_length", 1),
        ("max_buckets", 0),
    ],
)
def test_invalid_common_settings(config: type[ExampleDataConfig], setting: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"^data\.{setting} {value}: give "):
        config(**{setting: value})


def test_smallest_settings_are_accepted() -> None:
    ClassificationDataConfig(split_seed=0, max_length=2, max_buckets=1)
    BitextDataConfig(batch_tokens=0, batch_size_multiple=1)
    ListOpsDataConfig(max_depth=2, max_arguments=2, generator_seed=0, train_examples=1)
    ClassificationDataConfig(header=False, label_column="1", text_column="0")
    ClassificationDataConfig(header=False, format="label_first")


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (BitextDataConfig, {"source_lang": ""}, "source_lang: is empty"),
        (BitextDataConfig, {"target_lang": "en"}, "target_lang: en is also"),
        (BitextDataConfig, {"batch_size_multiple": 0}, "batch_size_multiple 0: give "),
        (BitextDataConfig, {"batch_tokens": -1}, "batch_tokens -1: give "),
        (ClassificationDataConfig, {"format": "csv"}, "format csv"),
        (ClassificationDataConfig, {"header": False}, "label_column: 'label' is not a column num"),
        (ClassificationDataConfig, {"text_column": "label"}, "text_column: column label"),
        (ClassificationDataConfig, {"encoding": "utf-7.5"}, "encoding: 'utf-7.5'"),
        (ListOpsDataConfig, {"train_examples": 0}, "train_examples 0: give "),
        (ListOpsDataConfig, {"max_depth": 1}, "max_depth 1: give "),
        (ListOpsDataConfig, {"max_arguments": 1}, "max_arguments 1: give "),
        (ListOpsDataConfig, {"generator_seed": -1}, "generator_seed -1: give "),
        (ListOpsDataConfig, {"max_length": 501}, "min_length: no .* 500 .* 501"),
        (ListOpsDataConfig, {"test_path": "x"}, "test_path: has no effect"),
        (ConversationDataConfig, {"tokenizer": TokenizerConfig("word")}, "word cannot tell"),
        (PreferenceDataConfig, {"tokenizer": TokenizerConfig("word")}, "word cannot tell"),
        (TokenLabelDataConfig, {"tag_column": "pos"}, "tag_column pos: .* upos, xpos"),
        (FeatureDataConfig, {"patch_size": -1}, "patch_size -1: give "),
        (FeatureDataConfig, {"scale": 0.0}, "scale 0.0: give "),
        (ArrayDataConfig, {"length": 0}, "length 0: give "),
    ],
)
def test_invalid_values(config: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**settings)
