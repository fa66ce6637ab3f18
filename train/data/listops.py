"""ListOps: expressions of nested operations on digits, labeled by their values.

    [MAX 4 [MED 5 1 7 ] 2 ]

Nangia and Bowman 2018, generated as in the Long Range Arena (Tay et al. 2021, section 2.2.1): a
node is an operator with probability 1/4 and a digit otherwise, and always a digit at the maximum
depth. Expressions that are too short or too long are rejected.
"""

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

from train.data.data_config import TokenizerConfig
from train.data.examples import ExampleCorpus, ExampleDataConfig, ExampleSplits
from train.data.text_labels import (
    ClassificationDataConfig,
    ClassificationSplit,
    LabeledText,
    make_classification_corpus,
    read_labeled_texts,
)
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError
from train.settings import HostSeed
from transformer.validation import Bounds, Mark, NonNegativeInt, PositiveInt


@dataclasses.dataclass(frozen=True)
class ListOpsDataConfig(ExampleDataConfig):
    """ListOps: nested operations on digits, labeled by their value. ``[MAX 4 [MIN 5 1 ] 2 ]`` is 4.

    Nangia and Bowman 2018, with the lengths of the Long Range Arena (Tay et al. 2021, section
    2.2.1) as defaults. Expressions are generated from a seed, without duplicates; with a path they
    are read from files.
    """

    path: Annotated[str, Mark.RESUMABLE, Mark.COMMON] = ""
    """File as the arena publishes it, with columns Source and Target; likewise validation_path and
    test_path. Empty: expressions are generated."""

    train_examples: PositiveInt = 96_000
    """Number of training expressions to generate."""

    validation_examples: PositiveInt = 2000
    """Number of validation expressions to generate."""

    test_examples: PositiveInt = 2000
    """Number of test expressions to generate."""

    min_length: NonNegativeInt = 500
    """Generated expressions have more tokens than this. Operators, digits and ] are one token."""

    max_length: Annotated[int, Bounds(2), Mark.COMMON] = 2000
    """Generated expressions have fewer tokens than this, so that they fit with the start token.
    Longer ones in files are truncated."""

    max_depth: Annotated[int, Bounds(2, 500)] = 10
    """Maximum depth of nesting: operators stand at smaller depths, and digits alone at this one."""

    max_arguments: Annotated[int, Bounds(2, 2**16)] = 10
    """Maximum number of arguments of an operator; the minimum is 2."""

    generator_seed: HostSeed = 0
    """Seed of the generated expressions."""

    tokenizer: TokenizerConfig = TokenizerConfig(
        "word", vocab_size=32, training_characters=1_000_000
    )
    """Settings of the tokenizer. The first million characters have all 15 words."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # Both bounds are exclusive: one length has to lie between them.
        if self.max_length - self.min_length < 2:
            raise UsageError(
                f"data.min_length: no expression is longer than {self.min_length} tokens and "
                f"shorter than data.max_length {self.max_length}; give less"
            )
        for name in ("validation_path", "test_path"):
            if getattr(self, name) and not self.path:
                raise UsageError(
                    f"data.{name}: has no effect while expressions are generated; set data.path too"
                )


OPERATOR_PROBABILITY = 0.25


MAX_FAILED_DRAWS = 100_000
"""Rejected expressions in a row after which generation stops: none of such a length may be left."""


DIGITS = tuple("0123456789")


def median(values: Sequence[int]) -> int:
    """Return the median; of two middle values their mean, rounded down."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) // 2


OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": median,
    "[SM": lambda values: sum(values) % 10,
}


OPERATOR_NAMES = tuple(OPERATORS)


def draw_expression(
    uniform: Callable[[], float],  # numbers in [0, 1)
    config: ListOpsDataConfig,
    tokens: list[str],
    depth: int = 1,
) -> int:
    """Generate an expression, append its tokens to ``tokens``, and return its value.

    Generation stops once there are too many tokens. Tokens and value are then of no use.
    """
    if len(tokens) >= config.max_length:
        return 0
    if depth >= config.max_depth or uniform() >= OPERATOR_PROBABILITY:
        digit = int(uniform() * 10)
        tokens.append(DIGITS[digit])
        return digit
    name = OPERATOR_NAMES[int(uniform() * len(OPERATOR_NAMES))]
    count = 2 + int(uniform() * (config.max_arguments - 1))
    tokens.append(name)
    values = [draw_expression(uniform, config, tokens, depth + 1) for _ in range(count)]
    tokens.append("]")
    return OPERATORS[name](values)


def generate_examples(config: ListOpsDataConfig) -> Iterator[LabeledText]:
    """Yield expressions without end and without duplicates, the same on every machine.

    Raises:
      UserError: No more expressions of such a length were found.
    """
    # Of a generator's methods it is this one whose numbers Python promises never to change.
    draw = random.Random(config.generator_seed).random
    seen: set[str] = set()
    while True:
        for _ in range(MAX_FAILED_DRAWS):
            tokens: list[str] = []
            value = draw_expression(draw, config, tokens)
            fits = config.min_length < len(tokens) < config.max_length
            if fits and (text := " ".join(tokens)) not in seen:
                break
        else:
            raise UserError(
                f"data.min_length {config.min_length}: none of {MAX_FAILED_DRAWS:,} expressions "
                f"drawn in a row was new and between this and data.max_length {config.max_length} "
                "tokens long; lower it, or data.train_examples"
            )
        seen.add(text)
        yield LabeledText(DIGITS[value], text, f"expression {len(seen)}")


def prepare_listops(
    config: ListOpsDataConfig,
    tokenizer: Tokenizer | None = None,
    labels: Sequence[str] | None = None,
) -> ExampleCorpus[ClassificationSplit]:
    """Generate or read the expressions, and tokenize them.

    A `tokenizer` and `labels` take the place of the configured one and of the digits.

    Raises:
      UserError: A file cannot be used, or there are too few expressions of such a length.
    """
    names = labels or DIGITS
    if not config.path:
        return make_classification_corpus(config, _drawn(config), names, tokenizer)
    columns = ClassificationDataConfig(label_column="Target", text_column="Source")
    read = read_labeled_texts(config, columns)
    splits = {
        split: [each._replace(text=remove_parentheses(each.text)) for each in examples]
        for split, examples in read.items()
    }
    return make_classification_corpus(config, ExampleSplits(splits, read.notes), names, tokenizer)


def remove_parentheses(text: str) -> str:
    """Remove the parentheses that the arena's files put around pairs of tokens."""
    return " ".join(text.replace("(", " ").replace(")", " ").split())


def _drawn(config: ListOpsDataConfig) -> ExampleSplits[LabeledText]:
    """Generate the splits."""
    examples = generate_examples(config)
    test = [next(examples) for _ in range(config.test_examples)]
    validation = [next(examples) for _ in range(config.validation_examples)]
    train = [next(examples) for _ in range(config.train_examples)]
    return ExampleSplits({"train": train, "validation": validation, "test": test})
