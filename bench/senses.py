"""One word, several senses: from which layer on do hidden states of equal tokens differ by sense?

    python -m train fit quickstart --workdir W
    python -m bench.senses W [--figure docs/figures/senses.png]

In Python's own library, words such as "for", "in" and "is" stand in code, as keywords, and in
comments and docstrings, as English. The embedding of both is the same vector. For occurrences in
held-out files, as many of each sense, the nearest neighbour of a hidden state (by cosine, in
another file) has the same sense in half of the cases by chance; the more often, the better a layer
tells the senses apart. The sense of an occurrence is what Python's `tokenize` says. Random weights
mix the context too: the same of an untrained model stands beside it.
"""

import bisect
import io
import itertools
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import train
from train.assembly import make_task
from train.data.token_file import TokenStream
from train.run import Run
from transformer.inspection import layer_values

WORDS = ("in", "is", "for", "not", "with", "as", "and", "if", "or", "from", "return", "import")
"""Keywords of Python that are words of English too."""

LENGTH = 128  # tokens of a window
STATES = frozenset({"residual_pre", "residual_post"})


class Occurrence(NamedTuple):
    """A token in held-out text."""

    document: int
    window: int
    """Number of its window in the list of windows."""
    place: int
    """Place in the window, from 0."""
    is_code: bool
    context: str
    """Text around it."""


def prose_spans(source: str) -> list[tuple[int, int]]:
    """Return the ranges of characters of comments and strings, in order.

    Raises:
      SyntaxError: It is no Python that this interpreter can read (also as `tokenize.TokenError`).
    """
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    spans = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
            spans.append((begin, end))
    return spans


def is_prose(spans: Sequence[tuple[int, int]], offset: int) -> bool:
    """Return True if a character is inside one of the ranges."""
    index = bisect.bisect(spans, (offset, np.inf)) - 1
    return index >= 0 and spans[index][0] <= offset < spans[index][1]


def find_occurrences(
    run: Run, stream: TokenStream, tokens_of_words: Mapping[int, str], limit: int
) -> tuple[list[np.ndarray], dict[str, list[Occurrence]]]:
    """Return windows of held-out text, and where the words are in them, at most `limit` a sense."""
    tokenizer = run.tokenizer
    assert tokenizer is not None
    windows: list[np.ndarray] = []
    found: dict[str, list[Occurrence]] = {word: [] for word in tokens_of_words.values()}
    missing = {(word, sense): limit for word in found for sense in (False, True)}
    ends = np.append(stream.document_starts[1:], len(stream.tokens) - 1)
    for document, (begin, end) in enumerate(zip(stream.document_starts, ends, strict=True)):
        tokens = np.asarray(stream.tokens[begin:end], np.int32)  # the separator first
        text = tokenizer.decode(tokens[1:])
        pieces = [len(tokenizer.decode([token])) for token in tokens[1:].tolist()]
        # Characters of several bytes may be divided over tokens: offsets would not be known.
        if not text.isascii() or sum(pieces) != len(text):
            continue
        try:
            spans = prose_spans(text)
        except (SyntaxError, tokenize.TokenError):
            continue
        offsets = np.cumsum([0, *pieces])
        for start in range(0, len(tokens) - LENGTH + 1, LENGTH):
            row, kept = tokens[start : start + LENGTH], False
            for place in range(1, LENGTH):
                word = tokens_of_words.get(int(row[place]))
                if word is None:
                    continue
                index = start + place - 1  # without the separator
                last = int(offsets[index + 1]) - 1
                code = not is_prose(spans, last)
                if not missing[word, code]:
                    continue
                missing[word, code] -= 1
                kept = True
                context = text[max(0, last - 40) : last + 20]
                found[word].append(Occurrence(document, len(windows), place, code, context))
            if kept:
                windows.append(row)
        if not any(missing.values()):
            break
    return windows, found


def hidden_states(run: Run, params: Any, windows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the hidden states [L + 1, T, D] of each window: the embeddings, then every layer's."""
    model: Any = run.model

    @jax.jit
    def states(params: Any, tokens: jax.Array) -> jax.Array:  # [L + 1, T, D]
        output = model.apply({"params": params}, tokens, outputs=STATES)
        before = layer_values(output, "residual_pre")[:1, 0]
        return jax.numpy.concatenate([before, layer_values(output, "residual_post")[:, 0]])

    for row in windows:
        yield np.asarray(states(params, row[None]))


def nearest(
    states: np.ndarray,  # [n, D]
    groups: np.ndarray,  # [n] neighbours of the same group are not taken
) -> np.ndarray:  # [n] indices
    """Return the nearest neighbour of each state by cosine, in another group."""
    unit = states / np.linalg.norm(states, axis=1, keepdims=True)
    similarity = unit @ unit.T
    similarity[groups[:, None] == groups[None]] = -np.inf
    # Equal states, as embeddings are, must not all have the first one for their neighbour.
    noise = np.random.default_rng(0).uniform(0, 1e-6, similarity.shape)
    best: np.ndarray = (similarity + noise).argmax(axis=1)
    return best


def balance(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Return as many occurrences of each sense, the first ones."""
    senses = [[each for each in occurrences if each.is_code is sense] for sense in (False, True)]
    count = min(map(len, senses))
    return [each for sense in senses for each in sense[:count]]


def same_sense(
    found: Mapping[str, Sequence[Occurrence]], states: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:  # [L + 1] by word
    """Return the share of neighbours with the same sense, by word and layer.

    Args:
      found: Occurrences by word.
      states: Their hidden states by word [L + 1, n, D].
    """
    shares = {}
    for word, occurrences in found.items():
        senses = np.array([each.is_code for each in occurrences])
        groups = np.array([each.document for each in occurrences])
        chosen = [senses[nearest(layer, groups)] == senses for layer in states[word]]
        shares[word] = np.array([each.mean() for each in chosen])
    return shares


def draw(
    shares: Mapping[str, np.ndarray],
    untrained: np.ndarray,  # [L + 1]
    path: Path,
) -> None:
    """Draw the share of neighbours of the same sense over layers, and its mean over words."""
    figure = Figure(figsize=(6.5, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    for word, values in shares.items():
        axes.plot(100 * values, lw=0.8, alpha=0.7, label=word)
    axes.plot(100 * np.mean([*shares.values()], axis=0), "ko-", lw=2, label="mean")
    axes.plot(100 * untrained, "k:", lw=2, label="mean, untrained")
    axes.axhline(50, color="grey", ls="--", lw=0.8)
    axes.set(
        xlabel="layer (0: embedding)",
        ylabel="nearest neighbour has the same sense (%)",
        xticks=range(len(next(iter(shares.values())))),
    )
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    workdir: tyro.conf.Positional[str],
    limit: int = 150,
    figure: Path = Path("docs/figures/senses.png"),
) -> None:
    """Print the shares by layer and some neighbours, and draw the figure.

    Args:
      workdir: A run of `quickstart`.
      limit: Occurrences of each word in each sense.
      figure: Path of the figure.
    """
    run = train.load(workdir)
    assert run.tokenizer is not None
    corpus: Any = make_task(run.experiment).prepare_corpus(run.tokenizer)
    single = {
        int(tokens[0]): word
        for word in WORDS
        for tokens in [run.tokenizer.encode(f" {word}")]
        if len(tokens) == 1
    }
    windows, found = find_occurrences(run, corpus.split("validation"), single, limit)
    balanced = {word: balance(each) for word, each in found.items()}
    kept = {word: each for word, each in balanced.items() if len(each) >= 20}

    def states_of(params: Any) -> dict[str, np.ndarray]:  # [L + 1, n, D] by word
        by_window = list(hidden_states(run, params, windows))
        return {
            word: np.stack([by_window[each.window][:, each.place] for each in places], axis=1)
            for word, places in kept.items()
        }

    states = states_of(run.params)
    shares = same_sense(kept, states)
    start = run.model.init_params(jax.random.key(0))
    untrained = np.mean([*same_sense(kept, states_of(start)).values()], axis=0)
    layers = len(next(iter(states.values())))
    names = ("embedding", *(f"layer {index}" for index in range(1, layers)))
    table = Table("word", "of each sense", *names)
    for word, values in shares.items():
        table.add_row(word, str(len(kept[word]) // 2), *(f"{100 * value:.0f}" for value in values))
    mean = np.mean([*shares.values()], axis=0)
    table.add_row("mean", "", *(f"{100 * value:.1f}" for value in mean))
    table.add_row("untrained", "", *(f"{100 * value:.1f}" for value in untrained))
    console = Console(width=140)
    console.print(table)
    word = next(iter(kept))
    occurrences = kept[word]
    groups = np.array([each.document for each in occurrences])
    for name, layer in (("embedding", 0), (names[-1], layers - 1)):
        chosen = nearest(states[word][layer], groups)
        for index in (0, len(occurrences) // 2):
            one, other = occurrences[index], occurrences[chosen[index]]
            console.print(f"{name}: {one.context!r} -> {other.context!r}", markup=False)
    draw(shares, untrained, figure)
    console.print(f"figure: {figure}")


if __name__ == "__main__":
    tyro.cli(main)
