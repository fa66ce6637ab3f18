"""Sizes that the data decide: the vocabulary of the tokenizer, and the labels of the data."""

import dataclasses

from train.data.tokenizer import Tokenizer
from train.errors import UserError
from transformer.models.config import TransformerConfig

Labels = tuple[str, ...]
"""Names of labels or tags by index."""


def resolve_vocab_size(model: TransformerConfig, tokenizer: Tokenizer) -> TransformerConfig:
    """Return the settings with `vocab_size` set to the tokenizer's size if it was 0.

    Raises UserError if it was set to another size.
    """
    if not model.vocab_size:
        model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
    check_vocab_size(model, tokenizer, "data.tokenizer")
    return model


def resolve_num_labels(num_labels: int, labels: Labels) -> int:
    """Return the number of labels. Raises UserError if `task.num_labels` was set to another."""
    if num_labels not in (0, len(labels)):
        raise UserError(
            f"task.num_labels {num_labels}: the data have {len(labels)} "
            f"({', '.join(labels)}); leave it out"
        )
    return len(labels)


def check_vocab_size(
    model: TransformerConfig, tokenizer: Tokenizer, source: str, *, padded: bool = False
) -> None:
    """Raise UserError if the model's vocabulary is not the tokenizer's, read from `source`.

    With `padded` the model may have more rows than the tokenizer has tokens, as many published
    models do.
    """
    rows, tokens = model.vocab_size, tokenizer.vocab_size
    if tokens > rows or (tokens < rows and not padded):
        raise UserError(
            f"{source}: has {tokens} tokens and the model {rows}; give the tokenizer that the "
            "model was trained with, or set model.vocab_size to 0 and train again"
        )
    own_rows = model.encoder.vocab_size if model.encoder is not None else 0
    if own_rows and (tokens > own_rows or (tokens < own_rows and not padded)):
        raise UserError(
            f"model.encoder.vocab_size {own_rows}: {source} has {tokens} tokens, for both "
            f"languages; give {tokens} for a table of the source's own, or 0 to share the target's"
        )
