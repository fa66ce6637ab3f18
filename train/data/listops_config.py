"""The data settings of ListOps. Imports nothing heavy."""

import dataclasses

from train.data.config import TokenizerConfig, require
from train.data.example_config import ExampleDataConfig


@dataclasses.dataclass(frozen=True)
class ListOpsDataConfig(ExampleDataConfig):
    """Nested operations on digits, of which the value is told: ``[MAX 4 [MED 5 1 7 ] 2 ]`` is 5.

    Nangia and Bowman 2018, at the lengths of the Long Range Arena (Tay et al. 2021, section
    2.2.1), which the defaults are. Expressions are drawn from a seed, no two alike; with a path
    they are read from files.
    """

    path: str = ""
    """A file as the arena publishes them, with columns Source and Target; validation_path and
    test_path likewise. Empty: expressions are drawn."""

    train_examples: int = 96_000
    """How many are drawn to train on."""

    validation_examples: int = 2000
    """How many are drawn to validate on."""

    test_examples: int = 2000
    """How many are drawn to test on."""

    min_length: int = 500
    """Expressions drawn have more tokens than this. Operators, digits and ] are one token each."""

    max_length: int = 2000
    """Expressions drawn have fewer tokens than this: with the one put before them, at most so many.
    Longer ones in files are cut."""

    max_depth: int = 10
    """Operators stand within fewer others than this less one: at this depth there are digits."""

    max_arguments: int = 10
    """An operator has 2 to so many arguments."""

    generator_seed: int = 0
    """Decides what is drawn."""

    tokenizer: TokenizerConfig = TokenizerConfig(
        "word", vocab_size=32, training_characters=1_000_000
    )
    """How text becomes tokens. The first million characters have all 15 words."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (
            ("examples", 1),
            ("validation_examples", 1),
            ("test_examples", 1),
            ("min_length", 0),
            ("max_depth", 2),
            ("max_arguments", 2),
            ("draw_seed", 0),
        ):
            value = getattr(self, name)
            require(value >= least, f"data.{name}: {value} is too little; give {least} or more")
        require(
            self.max_length - self.min_length >= 2,
            f"data.min_length: no expression has more than {self.min_length} tokens and fewer than "
            f"data.max_length {self.max_length}; give less",
        )
        for name in () if self.path else ("validation_path", "test_path"):
            require(
                not getattr(self, name),
                f"data.{name}: would not be read, as expressions are drawn; set data.path too",
            )
