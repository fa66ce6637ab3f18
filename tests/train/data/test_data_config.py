import subprocess
import sys

import pytest

from train.data.data_config import TextDataConfig, TokenizerConfig
from train.errors import UsageError


@pytest.mark.parametrize(
    ("config", "setting", "value", "message"),
    [
        (TextDataConfig, "split_method", "half", "data.split_method: 'half' .* documents, tail"),
        (
            TextDataConfig,
            "validation_fraction",
            1.0,
            "data.validation_fraction: 1.0 .* between 0 and 1",
        ),
        (TextDataConfig, "validation_fraction", 0.0, "data.validation_fraction: 0.0"),
        (TextDataConfig, "sequence_length", 0, "data.sequence_length: 0 .* 1 or more"),
        (TextDataConfig, "max_bytes", -1, "data.max_bytes: -1"),
        (TextDataConfig, "text_field", "", "data.text_field: is empty"),
        (TokenizerConfig, "kind", "bp", "data.tokenizer.kind: 'bp' .* byte, character, word, bpe"),
        (TokenizerConfig, "kind", "file", "data.tokenizer.path: is empty"),
        (TokenizerConfig, "path", "x", "data.tokenizer.path: x has no effect; set data.tok"),
        (TokenizerConfig, "vocab_size", 256, "vocab_size: 256 is too small; bpe needs 257"),
        (TokenizerConfig, "training_characters", 0, "data.tokenizer.training_characters: 0"),
    ],
)
def test_invalid_values(config: type, setting: str, value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**{setting: value})


def test_tokenizer_file_keeps_its_own_case() -> None:
    with pytest.raises(UsageError, match=r"data\.tokenizer\.lowercase"):
        TokenizerConfig("file", path="tokenizer.json", lowercase=True)


def test_settings_import_nothing_heavy() -> None:
    heavy = "{'numpy', 'grain', 'tokenizers', 'etils', 'jax'}"
    script = f"import sys, train.data.data_config; print({heavy} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_data_imports_no_jax() -> None:
    script = (
        "import importlib, pkgutil, sys, train.data\n"
        "for module in pkgutil.iter_modules(train.data.__path__):\n"
        "    importlib.import_module(f'train.data.{module.name}')\n"
        "print('jax' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
