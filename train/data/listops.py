"""ListOps: expressions of nested operations on digits, and their values.

    [MAX 4 [MED 5 1 7 ] 2 ]

Nangia and Bowman 2018, as the Long Range Arena draws them (Tay et al. 2021, section 2.2.1): a node
is an operator with a chance of one in four and a digit otherwise, down to a depth at which all are
digits; expressions whose length is not as wanted are thrown away.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from train.data.classification import (
    ClassificationSplit,
    LabeledText,
    make_classification_corpus,
    read_labeled_texts,
)
from train.data.example_configs import ClassificationDataConfig, ListOpsDataConfig
from train.data.examples import ExampleCorpus, read_splits
from train.data.tokenizer import Tokenizer
from train.errors import UserError

OPERATOR_PROBABILITY = 0.25


MAX_FAILED_DRAWS = 100_000
"""So many drawn in a row of which none could be used: it is taken that there are no more."""


DIGITS = tuple("0123456789")


def median(values: Sequence[int]) -> int:
    """The middle one; of two in the middle their mean, rounded down."""
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
    """Draws an expression, adds its tokens to those given, and returns its value.

    It is given up where there are too many tokens already, and then neither is of use.
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
    """Expressions without end, none of them twice; the seed decides them on every machine.

    Raises:
      UserError: There are not as many of such a length, or hardly.
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
                f"data.min_length {config.min_length}: of {MAX_FAILED_DRAWS:,} expressions drawn in a row "
                f"none was new, longer, and shorter than data.max_length {config.max_length}; give "
                "less, or fewer data.train_examples"
            )
        seen.add(text)
        yield LabeledText(DIGITS[value], text, f"expression {len(seen)}")


def prepare_listops(
    config: ListOpsDataConfig,
    tokenizer: Tokenizer | None = None,
    labels: Sequence[str] | None = None,
) -> ExampleCorpus[ClassificationSplit]:
    """Draws or reads the expressions, and encodes them.

    Args:
      config: How many and how long, or which files.
      tokenizer: Used in place of what ``config.tokenizer`` describes.
      labels: The names of the values by number; the digits, if None.

    Raises:
      UserError: A file cannot be used, or there are not enough expressions of such a length.
    """

    def read(setting: str, path: str) -> list[LabeledText]:
        columns = ClassificationDataConfig(label_column="Target", text_column="Source")
        found = read_labeled_texts(columns, setting, path)
        return [each._replace(text=remove_parentheses(each.text)) for each in found]

    splits = read_splits(config, read) if config.path else _drawn(config)
    return make_classification_corpus(config, splits, labels or DIGITS, tokenizer)


def remove_parentheses(text: str) -> str:
    """An expression as it is drawn here: the arena's files put pairs of its tokens in them."""
    return " ".join(text.replace("(", " ").replace(")", " ").split())


def _drawn(config: ListOpsDataConfig) -> dict[str, Sequence[LabeledText]]:
    """The splits. What is tested on is drawn first, so that more to train on does not change it."""
    examples = generate_examples(config)
    test = [next(examples) for _ in range(config.test_examples)]
    validation = [next(examples) for _ in range(config.validation_examples)]
    train = [next(examples) for _ in range(config.train_examples)]
    return {"train": train, "validation": validation, "test": test}
