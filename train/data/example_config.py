"""What the data settings of tasks with separate examples have in common. Imports nothing heavy."""

import dataclasses

from train.data.config import TokenizerConfig, require


@dataclasses.dataclass(frozen=True)
class ExampleDataConfig:
    """Which examples are read, what is held out of them, and how their text becomes tokens.

    A path may be remote (gs://...); ``~`` and ``$NAME`` are expanded; one that does not exist as
    given is looked for under ``$TRANSFORMER_DATA``. Files are UTF-8 text, gzip if they end in .gz.
    """

    path: str = ""
    """The examples to train on, less what is held out of them."""

    validation_path: str = ""
    """The validation examples. Empty: they are held out of path."""

    test_path: str = ""
    """The test examples. Empty: there is no test split."""

    validation_fraction: float = 0.1
    """The part of the examples of path that is held out, if there is no validation_path."""

    split_seed: int = 0
    """Decides which examples are held out."""

    max_length: int = 128
    """The most tokens of an example that the model is shown."""

    max_buckets: int = 8
    """Examples are padded to at most so many lengths, each of which is a program to be compiled; 1:
    all to that of the longest."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """How text becomes tokens. What is learned is learned from the training split."""

    def __post_init__(self) -> None:
        require(
            0 < self.validation_fraction < 1,
            f"data.validation_fraction: {self.validation_fraction} is not a part of the examples; "
            "give a number between 0 and 1",
        )
        require(
            self.split_seed >= 0,
            f"data.split_seed: {self.split_seed} is negative; give 0 or more",
        )
        require(
            self.max_length >= 2, f"data.max_length: {self.max_length} is too short; give 2 or more"
        )
        require(self.max_buckets >= 1, f"data.shapes: {self.max_buckets} is none; give 1 or more")
