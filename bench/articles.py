"""Translation of the article by gender: does a translator look at the noun before it writes "the"?

    python -m train fit multi30k --data.path DATA/train ... --workdir W
    python -m bench.articles W

English has one definite and one indefinite article, German has one for each gender and case: *the*
becomes "der" before a man, "die" before a woman, "das" before a girl. The decoder writes it before
the noun, so only attention to the source can tell it which.

Two tables. The first is of held-out sentences: wherever the reference has an article, the model,
given the reference before it, chooses among the forms of that article. Beside it is the most
frequent form, and the choice with the source of another sentence: what the German before the
article tells by itself (a preposition tells the case, nothing tells the gender). The second is of
nouns by gender, the first word of the translation of "the NOUN is outside .", also with an
adjective between.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import train
from train.assembly import make_task
from train.data.bitext import encode_sentences
from train.data.tokenizer import Tokenizer
from train.run import Run
from train.tasks.translation import TranslationTask

ARTICLES: Mapping[str, tuple[str, ...]] = {
    "indefinite": ("ein", "eine", "einen", "einem", "einer", "eines"),
    "definite": ("der", "die", "das", "den", "dem", "des"),
}

NOUNS: Mapping[str, tuple[str, ...]] = {
    "der": (
        *("man", "boy", "dog", "player", "worker", "soldier", "bus", "train", "ball", "tree"),
        *("singer", "park", "beach", "table", "chair", "bird", "skier", "cyclist", "farmer"),
        *("clown",),
    ),
    "die": (
        *("woman", "lady", "cat", "group", "band", "street", "family", "crowd", "guitar", "bridge"),
        *("cow", "flag", "camera", "bench", "wall", "mother", "grandmother", "city", "church"),
        *("bottle",),
    ),
    "das": (
        *("girl", "child", "baby", "couple", "horse", "car", "boat", "house", "sign", "animal"),
        *("building", "field", "motorcycle", "picture", "water", "bicycle", "airplane", "book"),
        *("bike", "window"),
    ),
}
"""Nouns of captions by the nominative article of their usual translation; "window" is "Fenster"."""

INDEFINITE = {"der": "ein", "die": "eine", "das": "ein"}

TEMPLATES = ("{} {} is outside .", "{} {} is in the background .", "{} small {} is outside .")


class Choice(NamedTuple):
    """One article of the references."""

    kind: str
    is_first: bool
    """True if it is the first word."""
    reference: str
    chosen: str
    blind: str
    """Choice with the source of another sentence."""


def article_tokens(tokenizer: Tokenizer) -> dict[str, dict[str, int]]:
    """Return the tokens of the articles that are one token each, by kind and article."""
    found: dict[str, dict[str, int]] = {}
    for kind, articles in ARTICLES.items():
        encoded = {each: tokenizer.encode(f" {each}") for each in articles}
        found[kind] = {
            each: int(row[0])
            for each, row in encoded.items()
            if len(row) == 1 and tokenizer.decode(row).strip() == each  # not an unknown word
        }
    return found


def choices_of(
    logits: np.ndarray,  # [B, T, V]
    blind: np.ndarray,  # [B, T, V] with other sources
    targets: np.ndarray,  # [B, T]
    weights: np.ndarray,  # [B, T] 0 for padding
    tokens: Mapping[str, Mapping[str, int]],
) -> Iterator[Choice]:
    """Yield what is chosen among the forms of each article of the references."""
    for kind, forms in tokens.items():
        names, ids = list(forms), np.array(list(forms.values()))
        for row, place in np.argwhere(np.isin(targets, ids) & (weights > 0)):
            reference = names[int(np.flatnonzero(ids == targets[row, place])[0])]
            picked = [names[int(each[row, place, ids].argmax())] for each in (logits, blind)]
            yield Choice(kind, bool(place == 0), reference, *picked)


def held_out_choices(run: Run, split: str) -> list[Choice]:
    """Return the choices at the articles of a split's references."""
    assert run.tokenizer is not None
    task = make_task(run.experiment)
    assert isinstance(task, TranslationTask)
    pairs = task.prepare_corpus(run.tokenizer).split(split)
    tokens = article_tokens(run.tokenizer)
    apply = _logits_of(run)
    found: list[Choice] = []
    for bucket in task.make_buckets(pairs, run.experiment.batch_size or 32, 1):
        for start in range(0, len(bucket.examples), 32):
            chosen = bucket.examples[start : start + 32]
            indices = np.concatenate([chosen, np.full(32 - len(chosen), -1)])
            batch = pairs.batch(indices, bucket.lengths)
            arrays = {name: batch[name] for name in ("tokens", "segments")}
            sources = [batch["source"], batch["source_segments"]]
            # The source of the row above, among those that are not padding.
            others = [np.array(each) for each in sources]
            for each in others:
                each[: len(chosen)] = np.roll(each[: len(chosen)], 1, axis=0)
            logits, blind = (np.asarray(apply(*each, **arrays)) for each in (sources, others))
            found += choices_of(logits, blind, batch["targets"], batch["weights"], tokens)
    return found


def first_articles(run: Run, english: str) -> dict[str, dict[str, list[str]]]:
    """Return the first word chosen for each noun, by the noun's article, in each template."""
    assert run.tokenizer is not None
    kind = "definite" if english == "the" else "indefinite"
    names = ("der", "die", "das") if english == "the" else ("ein", "eine")
    tokens = article_tokens(run.tokenizer)[kind]
    ids = np.array([tokens[name] for name in names])
    apply, start = _logits_of(run), np.array([[run.tokenizer.eos_token_id]], np.int32)
    found: dict[str, dict[str, list[str]]] = {}
    for article, nouns in NOUNS.items():
        found[article] = {}
        for noun in nouns:
            sources = encode_sentences(
                run.tokenizer, [template.format(english, noun) for template in TEMPLATES]
            )
            logits = [
                apply(each[None], np.ones_like(each[None]), tokens=start, segments=start * 0 + 1)
                for each in sources
            ]
            found[article][noun] = [names[int(each[0, 0, ids].argmax())] for each in logits]
    return found


def _logits_of(run: Run) -> Callable[..., Any]:
    model: Any = run.model

    @jax.jit
    def apply(source: Any, source_segments: Any, *, tokens: Any, segments: Any) -> Any:
        return model.apply(
            {"params": run.params},
            source,
            tokens,
            source_segments=source_segments,
            segments=segments,
        ).logits

    return apply


def accuracy_rows(choices: Sequence[Choice]) -> Iterator[tuple[str, int, float, float, float]]:
    """Yield name, count, and the accuracies in percent: the model, most frequent form, blind."""
    for kind in ARTICLES:
        for name, firsts in (("first word", (True,)), ("anywhere", (True, False))):
            rows = [each for each in choices if each.kind == kind and each.is_first in firsts]
            if not rows:
                continue
            most = Counter(each.reference for each in rows).most_common(1)[0][1]
            right = sum(each.chosen == each.reference for each in rows)
            blind = sum(each.blind == each.reference for each in rows)
            percent = 100 / len(rows)
            yield f"{kind}, {name}", len(rows), percent * right, percent * most, percent * blind


def main(workdir: tyro.conf.Positional[str], split: str = "test") -> None:
    """Print both tables.

    Args:
      workdir: A run of `multi30k`.
      split: Split of the run's data for the first table.
    """
    run = train.load(workdir)
    console = Console(width=120)
    table = Table("article", "number", "right (%)", "most frequent form", "source of another")
    for name, count, *values in accuracy_rows(held_out_choices(run, split)):
        table.add_row(name, str(count), *(f"{value:.1f}" for value in values))
    console.print(table)
    table = Table("English", "article", "nouns", "right (%)", "nouns with an error")
    for english in ("the", "a"):
        for article, nouns in first_articles(run, english).items():
            expected = article if english == "the" else INDEFINITE[article]
            right = [each == expected for found in nouns.values() for each in found]
            wrong = [noun for noun, found in nouns.items() if set(found) != {expected}]
            row = (english, expected, str(len(nouns)), f"{100 * np.mean(right):.1f}")
            table.add_row(*row, ", ".join(wrong))
    console.print(table)


if __name__ == "__main__":
    tyro.cli(main)
