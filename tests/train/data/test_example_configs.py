import subprocess
import sys
from typing import Any

import pytest

from train.data.data_config import TokenizerConfig
from train.data.example_configs import (
    BitextDataConfig,
    ClassificationDataConfig,
    ExampleDataConfig,
    ListOpsDataConfig,
    TokenLabelDataConfig,
)
from train.errors import UsageError


@pytest.mark.parametrize(
    "config", [BitextDataConfig, ClassificationDataConfig, ListOpsDataConfig, TokenLabelDataConfig]
)
@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("validation_fraction", 1.0, "data.validation_fraction: 1.0 .* between 0 and 1"),
        ("split_seed", -1, "data.split_seed: -1 is negative; give 0"),
        ("max_length", 1, "data.max_length: 1 is too short; give 2 or more"),
        ("max_buckets", 0, "data.max_buckets: 0 is too few; give 1 or more"),
    ],
)
def test_invalid_common_settings(
    config: type[ExampleDataConfig], setting: str, value: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        config(**{setting: value})


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (BitextDataConfig, {"source_lang": ""}, "data.source_lang: is empty; give a file ending"),
        (BitextDataConfig, {"target_lang": "en"}, "data.target_lang: en is also data.source_lang"),
        (
            BitextDataConfig,
            {"batch_size_multiple": 0},
            "data.batch_size_multiple: 0 is too small",
        ),
        (BitextDataConfig, {"batch_tokens": -1}, "data.batch_tokens: -1 is negative"),
        (ClassificationDataConfig, {"format": "csv"}, "data.format: 'csv' .* tsv, label_first"),
        (
            ClassificationDataConfig,
            {"header": False},
            "data.label_column: 'label' is not a column number",
        ),
        (
            ClassificationDataConfig,
            {"text_column": "label"},
            "data.text_column: column label is",
        ),
        (
            ClassificationDataConfig,
            {"encoding": "utf-7.5"},
            "data.encoding: 'utf-7.5' is not known",
        ),
        (
            ListOpsDataConfig,
            {"train_examples": 0},
            "data.train_examples: 0 is too small",
        ),
        (ListOpsDataConfig, {"max_depth": 1}, "data.max_depth: 1 is too small; give 2 or more"),
        (ListOpsDataConfig, {"max_arguments": 1}, "data.max_arguments: 1 .* give 2 or more"),
        (ListOpsDataConfig, {"generator_seed": -1}, "data.generator_seed: -1 .* give 0 or more"),
        (ListOpsDataConfig, {"max_length": 501}, "data.min_length: no .* 500 .* 501; give less"),
        (ListOpsDataConfig, {"test_path": "x"}, "data.test_path: has no effect.*data.path too"),
        (TokenLabelDataConfig, {"tag_column": "pos"}, "data.tag_column: 'pos' .* upos, xpos"),
    ],
)
def test_invalid_values(
    config: type[ExampleDataConfig], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        config(**settings)


def test_formats_without_header() -> None:
    assert (
        ClassificationDataConfig(header=False, label_column="1", text_column="0").label_column
        == "1"
    )
    assert ClassificationDataConfig(header=False, format="label_first").format == "label_first"


def test_default_tokenizer_of_each_task() -> None:
    expected = TokenizerConfig("bpe", vocab_size=10_000, lowercase=True)
    assert BitextDataConfig().tokenizer == expected


def test_settings_import_nothing_heavy() -> None:
    heavy = "{'numpy', 'grain', 'tokenizers', 'etils', 'jax', 'sacrebleu', 'sacremoses'}"
    files = (
        "import train.data.example_configs, train.data.example_configs, "
        "train.data.example_configs, train.data.example_configs"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {files}; print({heavy} & set(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set()"
