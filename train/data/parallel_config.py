"""The data settings of translation. Imports nothing heavy."""

import dataclasses

from train.data.config import TokenizerConfig, require
from train.data.example_config import ExampleDataConfig


@dataclasses.dataclass(frozen=True)
class BitextDataConfig(ExampleDataConfig):
    """Sentences and their translations: two files with as many lines, in the same order.

    A path is what the names of both files begin with: ``multi30k/raw/train`` with source "en" and
    target "de" reads ``multi30k/raw/train.en`` and ``multi30k/raw/train.de``, or those files with
    .gz after their names. Both languages share one tokenizer, learned from both.
    """

    source_lang: str = "en"
    """How the name of a file in the source language ends."""

    target_lang: str = "de"
    """How the name of a file in the target language ends. It is taken as the language's code when
    translations are scored."""

    max_length: int = 128
    """The most tokens of a sentence, its end included. Longer pairs are left out of the training
    split; elsewhere they are cut. How many is reported."""

    batch_tokens: int = 0
    """The most tokens in a batch: its rows times the longer of its two sides, padding included. So
    a batch has more of the shorter pairs, up to batch_size (0: no such limit). 0: every batch has
    batch_size pairs, however long they are."""

    batch_size_multiple: int = 8
    """With batch_tokens, rows of a batch are a multiple of this, so that they divide among devices
    and microbatches. A setting, and not what there is of them: the order of the data must not
    depend on that."""

    tokenizer: TokenizerConfig = TokenizerConfig("bpe", vocab_size=10_000, lowercase=True)
    """How text becomes tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("source", "target"):
            require(bool(getattr(self, name)), f"data.{name}: is empty; give en, say")
        require(
            self.source_lang != self.target_lang,
            f"data.target: {self.target_lang} is the source too; give the ending of the other files",
        )
        require(
            self.batch_tokens >= 0,
            f"data.batch_tokens: {self.batch_tokens} is negative; give 0 for none, or more",
        )
        require(
            self.batch_size_multiple >= 1,
            f"data.row_multiple: {self.batch_size_multiple} is no number of rows; give 1 or more",
        )
