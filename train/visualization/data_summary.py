"""Summary of an experiment's data: splits, lengths, and training examples with their loss."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from train.assembly import make_task, training_options
from train.data.tokenizer import Tokenizer
from train.errors import printable
from train.experiment import Experiment

MAX_CHARACTERS = 600
"""Longest text of an example that is printed."""

DOCUMENT_SEPARATOR = "\n--\n"
"""Stands between the documents of a packed row: the two answers of a preference, for example."""

SPARSE_LOSS = 0.5
"""Fraction of tokens in the loss below which targets are written out instead."""


def summarize_data(experiment: Experiment, num_examples: int) -> dict[str, Any]:
    """Return a summary as JSON.

    Args:
      experiment: Experiment whose data are prepared as training prepares them.
      num_examples: Examples of the first training batch to show.

    Raises:
      UserError: The data are missing, empty or damaged.
    """
    task = make_task(experiment)
    corpus = task.prepare_corpus()
    # The same order as in `fit`: the data decide sizes that batches depend on.
    task = task.resolve(corpus)
    tokenizer: Any = corpus.tokenizer
    summary: dict[str, Any] = {
        "name": experiment.name,
        "task": type(experiment.task).__name__,
        "training_data": task.describe_training_data(corpus),
        "vocab_size": tokenizer.vocab_size if tokenizer is not None else None,
        "labels": list(corpus.labels),
        "notes": list(corpus.notes),
        "splits": {name: summarize_split(split) for name, split in _splits(corpus).items()},
        "examples": [],
    }
    if num_examples:
        batch = task.training_batches(corpus, training_options(experiment)).host_batch(0, 0, 1)
        summary["batch"] = {name: list(array.shape) for name, array in sorted(batch.items())}
        rows = min(num_examples, len(next(iter(batch.values()))))
        summary["examples"] = [
            describe_example(
                {name: array[row] for name, array in batch.items()}, tokenizer, corpus.labels
            )
            for row in range(rows)
            if "segments" not in batch or batch["segments"][row].any()  # else an unused row
        ]
    return summary


def _splits(corpus: Any) -> dict[str, Any]:
    """Return the splits of a corpus; none of a user's corpus that keeps them elsewhere."""
    splits = getattr(corpus, "streams", None) or getattr(corpus, "splits", None)
    return dict(splits) if isinstance(splits, dict) else {}


def summarize_split(split: Any) -> dict[str, Any]:
    """Return the number of examples, tokens and bytes of a split, and the lengths in tokens."""
    if isinstance(split, dict):  # arrays with a row for each example
        shapes = {name: list(array.shape[1:]) for name, array in split.items()}
        return {"examples": len(next(iter(split.values()))), "arrays": shapes}
    if hasattr(split, "document_starts"):
        starts = np.asarray(split.document_starts)
        end = len(split.tokens) - (not split.first)
        lengths = np.diff(np.append(starts, end)) - 1 - len(split.first)  # without the frame
        num_tokens, num_bytes = len(split.tokens), int(split.num_bytes)
        sizes = {"documents": len(starts), "tokens": num_tokens, "bytes": num_bytes}
        return sizes | {"lengths": describe_lengths(lengths)}
    lengths = np.asarray(split.lengths)  # [n, sides]
    sides = ("source", "target") if lengths.shape[1] == 2 else ("text",)
    return {
        "examples": len(lengths),
        "tokens": int(lengths.sum()),
        **{f"{side} lengths": describe_lengths(lengths[:, i]) for i, side in enumerate(sides)},
    }


def describe_lengths(lengths: np.ndarray) -> dict[str, float]:
    """Return the distribution of lengths in tokens."""
    if not len(lengths):
        return {}
    quantiles = np.quantile(lengths, [0, 0.5, 0.95, 1])
    names = ("shortest", "median", "95%", "longest")
    return {"mean": round(float(np.mean(lengths)), 1)} | {
        name: round(float(value), 1) for name, value in zip(names, quantiles, strict=True)
    }


def describe_example(
    row: dict[str, np.ndarray], tokenizer: Tokenizer | None, labels: Sequence[str]
) -> dict[str, Any]:
    """Return one row of a batch as text, with what its loss counts."""
    if tokenizer is None or "tokens" not in row:
        arrays = {name: np.asarray(value).tolist() for name, value in row.items()}
        return {"arrays": {name: value for name, value in arrays.items() if name != "examples"}}
    summary: dict[str, Any] = {}
    if "source" in row:
        summary["source"] = tokenizer.decode(row["source"][row["source_segments"] != 0]).strip()
    real = row["segments"] != 0 if "segments" in row else np.ones(len(row["tokens"]), bool)
    tokens, weights, targets = row["tokens"][real], np.asarray(row["weights"]), row["targets"]
    summary["tokens"] = int(real.sum())
    summary["padding"] = int((~real).sum())
    if "segments" in row:
        summary["documents"] = len(np.unique(row["segments"][real]))
    if not targets.ndim:  # a label for the whole text
        summary |= {"text": tokenizer.decode(tokens).strip(), "label": _label(int(targets), labels)}
        return summary
    weights, targets = weights[real] > 0, targets[real]
    summary["in_loss"] = int(weights.sum())
    if len(labels):
        names = [_label(int(each), labels) for each in targets]
        summary["text"] = _with_targets(tokenizer, tokens, weights, names)
    elif weights.mean() < SPARSE_LOSS and not _are_next_tokens(tokens, targets):
        names = [tokenizer.decode([each]) for each in targets]
        summary["text"] = _with_targets(tokenizer, tokens, weights, names)
    else:
        documents = row["segments"][real] if "segments" in row else np.zeros(len(tokens))
        text = DOCUMENT_SEPARATOR.join(
            _with_brackets(tokenizer, targets[documents == each], weights[documents == each])
            for each in np.unique(documents)
        )
        summary["text"] = text.strip() if "source" in row else text
    return summary


def _are_next_tokens(tokens: np.ndarray, targets: np.ndarray) -> bool:
    """Return True if most targets are the tokens that follow: all but those at ends of texts."""
    return bool(len(tokens) > 1 and np.mean(tokens[1:] == targets[:-1]) > 0.5)


def _label(index: int, labels: Sequence[str]) -> str:
    return labels[index] if index < len(labels) else str(index)


def _with_targets(
    tokenizer: Tokenizer, tokens: np.ndarray, weights: np.ndarray, targets: Sequence[str]
) -> str:
    """Return a text in which each token that counts is followed by its target: `cat{NOUN}`."""
    parts, start = [], 0
    names = {token: name for name, token in tokenizer.vocabulary.items()}
    for index in np.flatnonzero(weights).tolist():
        before, own = tokens[start:index], int(tokens[index])
        token_text = tokenizer.decode([own]) or names.get(own, "")  # a mask token has no text
        target = targets[index].strip() or repr(targets[index])  # a space or a line end
        parts += [tokenizer.decode(before), f"{token_text}{{{target}}}"]
        start = index + 1
    parts.append(tokenizer.decode(tokens[start:]))
    return " ".join(part.strip() for part in parts if part.strip())


def _with_brackets(tokenizer: Tokenizer, targets: np.ndarray, weights: np.ndarray) -> str:
    """Return the targets as text, in [[double brackets]] where they have no part in the loss."""
    # Decoded in stretches and not token by token: one character may take several tokens.
    edges = np.flatnonzero(np.diff(weights.astype(np.int8))) + 1
    text = ""
    for tokens, counted in zip(np.split(targets, edges), np.split(weights, edges), strict=True):
        part = tokenizer.decode(tokens)
        text += part if counted[0] else f"[[{part}]]"
    return text


def print_summary(summary: dict[str, Any]) -> None:
    """Print a summary: a table of the splits, and the examples below it."""
    console = Console(highlight=False, markup=False, emoji=False)
    size = summary["vocab_size"]
    vocabulary = f", {size:,} tokens in the vocabulary" if size else ""
    console.print(f"{summary['name']}: {summary['training_data']}{vocabulary}")
    if summary["labels"]:
        console.print(printable(f"labels: {', '.join(summary['labels'])}"))
    for note in summary["notes"]:
        console.print(printable(note))
    rows = [_split_cells(name, split) for name, split in summary["splits"].items()]
    if rows:
        table = Table(*dict.fromkeys(name for row in rows for name in row), box=box.SIMPLE)
        for row in rows:
            table.add_row(*(row.get(str(column.header), "") for column in table.columns))
        console.print(table)
    for number, example in enumerate(summary["examples"], start=1):
        counts = ", ".join(
            f"{value} {name.replace('_', ' ')}"
            for name, value in example.items()
            if isinstance(value, int) and (name, value) != ("documents", 1)
        )
        console.print(f"--- training example {number}: {counts}")
        for name in ("source", "text", "label", "arrays"):
            if name in example:
                text = printable(str(example[name]))
                cut = text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} ..."
                title = "target" if name == "text" and "source" in example else name
                console.print(cut if title == "text" else f"{title}: {cut}", soft_wrap=True)


def _split_cells(name: str, split: dict[str, Any]) -> dict[str, str]:
    """Return the cells of a split's row, by column."""
    cells = {"split": name}
    for key, value in split.items():
        if isinstance(value, int):
            cells[key] = f"{value:,}"
        elif "lengths" in key and value:
            shown = (f"{value[each]:,.1f}" for each in ("shortest", "median", "longest"))
            spread = " / ".join(each.removesuffix(".0") for each in shown)
            cells[f"{key}, min / median / max"] = spread
        elif key == "arrays":
            cells[key] = ", ".join(f"{array} {shape}" for array, shape in value.items())
    return cells
