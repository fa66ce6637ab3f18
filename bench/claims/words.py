"""Words in context: senses, articles of a translation, word vectors, labeled phrases."""

import bisect
import dataclasses
import io
import itertools
import os
import re
import statistics
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import train
from bench.claims.small_runs import train_small
from bench.results import FIGURES, save_figure
from configs.trec import EXPERIMENTS as TREC
from train.assembly import make_task
from train.config.experiment_files import find_experiment
from train.data.bitext import encode_sentences
from train.data.token_file import TokenStream
from train.data.tokenizer import Tokenizer
from train.evaluation.evaluator import evaluate_split
from train.experiment import Experiment
from train.figures import BLACK, GREY
from train.run import Run
from train.tasks.translation import TranslationTask
from train.warm_start.skip_gram import train_word_vectors
from train.warm_start.word_vectors import write_word_vectors
from transformer.baselines.word_vectors import replace_embeddings
from transformer.inspection import layer_values

# ---- Senses ----

WORDS = ("in", "is", "for", "not", "with", "as", "and", "if", "or", "from", "return", "import")
"""Keywords of Python that are words of English too."""

WINDOW = 128  # tokens


class Occurrence(NamedTuple):
    """A token in held-out text."""

    document: int
    window: int
    """Number of its window in the list of windows."""
    place: int
    """Place in the window, from 0."""
    is_code: bool


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
    tokenizer: Tokenizer, stream: TokenStream, tokens_of_words: Mapping[int, str]
) -> tuple[list[np.ndarray], dict[str, list[Occurrence]]]:
    """Return windows of held-out text, and where the words are in them, at most 150 a sense."""
    windows: list[np.ndarray] = []
    found: dict[str, list[Occurrence]] = {word: [] for word in tokens_of_words.values()}
    missing = {(word, sense): 150 for word in found for sense in (False, True)}
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
        for start in range(0, len(tokens) - WINDOW + 1, WINDOW):
            row, kept = tokens[start : start + WINDOW], False
            for place in range(1, WINDOW):
                word = tokens_of_words.get(int(row[place]))
                if word is None:
                    continue
                last = int(offsets[start + place]) - 1  # the tokens' first is the separator
                code = not is_prose(spans, last)
                if not missing[word, code]:
                    continue
                missing[word, code] -= 1
                kept = True
                found[word].append(Occurrence(document, len(windows), place, code))
            if kept:
                windows.append(row)
        if not any(missing.values()):
            break
    return windows, found


def hidden_states(run: Run, params: Any, windows: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the hidden states [L + 1, T, D] of each window: the embeddings, then every layer's."""
    model: Any = run.model
    names = frozenset({"residual_pre", "residual_post"})

    @jax.jit
    def states(params: Any, tokens: jax.Array) -> jax.Array:  # [L + 1, T, D]
        output = model.apply({"params": params}, tokens, outputs=names)
        before = layer_values(output, "residual_pre")[:1, 0]
        return jnp.concatenate([before, layer_values(output, "residual_post")[:, 0]])

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
    parts = [[each for each in occurrences if each.is_code is sense] for sense in (False, True)]
    count = min(map(len, parts))
    return [each for part in parts for each in part[:count]]


def same_sense(
    occurrences: Sequence[Occurrence],
    states: np.ndarray,  # [L + 1, n, D]
) -> np.ndarray:  # [L + 1]
    """Return the share of neighbours with the same sense, after each layer."""
    is_code = np.array([each.is_code for each in occurrences])
    groups = np.array([each.document for each in occurrences])
    return np.array([(is_code[nearest(layer, groups)] == is_code).mean() for layer in states])


def draw_senses(shares: Mapping[str, np.ndarray], untrained: np.ndarray) -> Figure:
    """Draw the share of neighbours of the same sense over layers [L + 1], and its mean."""
    drawn = Figure(figsize=(7, 4.2))
    axes = drawn.subplots()
    for number, values in enumerate(shares.values()):
        label = "one word" if number == 0 else None
        axes.plot(100 * values, "-", color="0.75", linewidth=1, marker="none", label=label)
    mean = 100 * np.mean([*shares.values()], axis=0)
    axes.plot(mean, "o-", color=BLACK, linewidth=2.5, label="mean")
    axes.plot(100 * untrained, "o:", color=BLACK, linewidth=2.5, label="mean, untrained")
    axes.axhline(50, color=GREY, linewidth=0.8)
    axes.annotate("chance", (len(mean) - 1, 50), (0, -13), textcoords="offset points", ha="right")
    axes.set(xlabel="layer (0: embedding)", xticks=range(len(mean)))
    axes.set_ylabel("nearest neighbour has the same sense (%)")
    drawn.legend(loc="outside lower center", ncols=3)
    return drawn


def senses(workdir: tyro.conf.Positional[str]) -> None:
    """Print and draw, by layer, how often the nearest neighbour of a word has the same sense.

    In Python's library, "for" or "in" is a keyword in code and English in comments: the embedding
    of both is the same vector. The neighbour is by cosine, in another file; with as many of each
    sense, chance is a half. Random weights mix the context too, so they stand beside it.

    Args:
      workdir: A run of `quickstart`.
    """
    run = train.load(workdir)
    tokenizer = run.tokenizer
    assert tokenizer is not None
    corpus: Any = make_task(run.experiment).prepare_corpus(tokenizer)
    encoded = {word: tokenizer.encode(f" {word}") for word in WORDS}
    single = {int(tokens[0]): word for word, tokens in encoded.items() if len(tokens) == 1}
    windows, found = find_occurrences(tokenizer, corpus.split("validation"), single)
    balanced = {word: balance(each) for word, each in found.items()}
    kept = {word: each for word, each in balanced.items() if len(each) >= 20}

    def states_of(params: Any) -> dict[str, np.ndarray]:  # [L + 1, n, D] by word
        by_window = list(hidden_states(run, params, windows))
        return {
            word: np.stack([by_window[each.window][:, each.place] for each in places], axis=1)
            for word, places in kept.items()
        }

    states, start = states_of(run.params), states_of(run.model.init_params(jax.random.key(0)))
    shares = {word: same_sense(each, states[word]) for word, each in kept.items()}
    untrained = np.mean([same_sense(each, start[word]) for word, each in kept.items()], axis=0)
    names = ("embedding", *(f"layer {index}" for index in range(1, len(untrained))))
    table = Table("word", "of each sense", *names)
    for word, values in shares.items():
        table.add_row(word, str(len(kept[word]) // 2), *(f"{100 * value:.0f}" for value in values))
    for name, values in (("mean", np.mean([*shares.values()], axis=0)), ("untrained", untrained)):
        table.add_row(name, "", *(f"{100 * value:.1f}" for value in values))
    Console(width=140).print(table)
    save_figure(draw_senses(shares, untrained), FIGURES / "senses.png")


# ---- Articles ----

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
    for kind, forms in ARTICLES.items():
        encoded = {each: tokenizer.encode(f" {each}") for each in forms}
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


def held_out_choices(run: Run, tokenizer: Tokenizer) -> list[Choice]:
    """Return the choices at the articles of the test references."""
    task = make_task(run.experiment)
    assert isinstance(task, TranslationTask)
    pairs = task.prepare_corpus(tokenizer).split("test")
    tokens, apply = article_tokens(tokenizer), logits_of(run)
    found: list[Choice] = []
    for bucket in task.make_buckets(pairs, run.experiment.batch_size or 32, 1):
        for start in range(0, len(bucket.examples), 32):
            chosen = bucket.examples[start : start + 32]
            indices = np.concatenate([chosen, np.full(32 - len(chosen), -1)])
            batch = pairs.batch(indices, bucket.lengths)
            target = batch["tokens"], batch["segments"]
            sources = [batch["source"], batch["source_segments"]]
            # The source of the row above, among those that are not padding.
            others = [np.array(each) for each in sources]
            for each in others:
                each[: len(chosen)] = np.roll(each[: len(chosen)], 1, axis=0)
            logits, blind = (np.asarray(apply(*each, *target)) for each in (sources, others))
            found += choices_of(logits, blind, batch["targets"], batch["weights"], tokens)
    return found


def first_articles(run: Run, tokenizer: Tokenizer, english: str) -> dict[str, dict[str, list[str]]]:
    """Return the first word chosen for each noun, by the noun's article, in each template."""
    kind = "definite" if english == "the" else "indefinite"
    names = ("der", "die", "das") if english == "the" else ("ein", "eine")
    ids = np.array([article_tokens(tokenizer)[kind][name] for name in names])
    apply, start = logits_of(run), np.array([[tokenizer.eos_token_id]], np.int32)

    def first_word(source: np.ndarray) -> str:  # [S]
        logits = apply(source[None], np.ones_like(source[None]), start, np.ones_like(start))
        return names[int(logits[0, 0, ids].argmax())]

    return {
        article: {
            noun: [
                first_word(source)
                for source in encode_sentences(
                    tokenizer, [template.format(english, noun) for template in TEMPLATES]
                )
            ]
            for noun in nouns
        }
        for article, nouns in NOUNS.items()
    }


def logits_of(run: Run) -> Callable[..., Any]:
    """Return a compiled function of source, its segments, target, its segments: logits."""
    model: Any = run.model

    @jax.jit
    def apply(source: Any, source_segments: Any, tokens: Any, segments: Any) -> Any:
        options = {"source_segments": source_segments, "segments": segments}
        return model.apply({"params": run.params}, source, tokens, **options).logits

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


def articles(workdir: tyro.conf.Positional[str]) -> None:
    """Print how often a translator writes the German article that the noun demands.

    The decoder writes it before the noun, so only attention to the source can tell it the gender.
    First at the references' articles, given the reference before them, beside the most frequent
    form and the choice with the source of another sentence; then as the first word of sentences
    about nouns of each gender, also with an adjective between.

    Args:
      workdir: A run of `multi30k`.
    """
    run = train.load(workdir)
    tokenizer = run.tokenizer
    assert tokenizer is not None
    console = Console(width=120)
    table = Table("article", "number", "right (%)", "most frequent form", "source of another")
    for name, count, *values in accuracy_rows(held_out_choices(run, tokenizer)):
        table.add_row(name, str(count), *(f"{value:.1f}" for value in values))
    console.print(table)
    table = Table("English", "article", "nouns", "right (%)", "nouns with an error")
    for english in ("the", "a"):
        for article, nouns in first_articles(run, tokenizer, english).items():
            expected = article if english == "the" else INDEFINITE[article]
            right = [each == expected for found in nouns.values() for each in found]
            wrong = [noun for noun, found in nouns.items() if set(found) != {expected}]
            row = (english, expected, str(len(nouns)), f"{100 * np.mean(right):.1f}")
            table.add_row(*row, ", ".join(wrong))
    console.print(table)


# ---- Word vectors ----

WIKITEXT = Path(os.environ.get("TRANSFORMER_DATA", ".")) / "wikitext-2" / "train.txt"


def test_accuracy(experiment: Experiment, vectors: np.ndarray | None) -> float:
    """Return the test accuracy after training from random embeddings or from vectors."""

    def start(params: Any) -> Any:
        if vectors is None:
            return params
        scale = float(jnp.std(params["embedding"])) / vectors.std()
        return replace_embeddings(params, jnp.asarray(vectors * scale))

    run = train_small(experiment, start)
    found = evaluate_split(run.experiment, run.engine, run.params, run.corpus, "test", whole=True)
    return found["accuracy"]


def known_words(corpus: Any) -> list[np.ndarray]:  # each [n]
    """Return the lines of WikiText-2 and the training texts as sequences of known words."""
    texts = [*WIKITEXT.read_text(encoding="utf-8").splitlines(), *corpus.split("train").texts]
    [unknown] = corpus.tokenizer.encode("<unk>")
    encoded = (each[each != unknown] for each in corpus.tokenizer.encode_documents(texts))
    return [each for each in encoded if len(each)]


def word_vectors(
    steps: int = 10_000,
    seeds: int = 3,
    classifier: Literal["trec", "sst2"] = "trec",
    save: Path | None = None,
) -> None:
    """Print the test accuracy of classifiers from skip-gram vectors and from random embeddings.

    Skip-gram with negative samples (Mikolov et al. 2013); `examples/word_vectors.py` trains vectors
    without a classifier. Mean and range over seeds.

    Args:
      steps: Steps of the training of vectors, on WikiText-2 and the classifier's training texts.
      seeds: Number of classifiers of each kind. 0: only the vectors.
      classifier: Config whose texts and words are used.
      save: File to write the vectors to, in the format of word2vec, for `fit --init-from`.
    """
    bag = dataclasses.replace(TREC["bag"], data=find_experiment(classifier).data)
    lstm_layer, _ = TREC["hybrid"].model.layer_pattern  # in place of the bag's MLP
    lstm = dataclasses.replace(bag.model, layer_pattern=(lstm_layer,), embedding_dropout=0.5)
    corpus: Any = make_task(bag).prepare_corpus()
    words = make_task(bag).resolve(corpus).model_config.vocab_size
    vectors = train_word_vectors(known_words(corpus), words, bag.model.d_model, steps=steps)
    if save:
        write_word_vectors(save, corpus.tokenizer.vocabulary, vectors)
    if not seeds:
        return
    table = Table("model", "embeddings", "accuracy", "least", "most", title=f"{seeds} seeds")
    for name, model in (("bag", bag.model), ("LSTM, both ways", lstm)):
        for start, initial in (("random", None), ("skip-gram", vectors)):
            accuracies = []
            for seed in range(seeds):
                experiment = dataclasses.replace(bag, model=model, seed=seed)
                accuracies.append(test_accuracy(experiment, initial))
            shown = (statistics.mean(accuracies), min(accuracies), max(accuracies))
            table.add_row(name, start, *(f"{100 * each:.1f}" for each in shown))
    Console().print(table)


# ---- Labeled phrases of the Stanford Sentiment Treebank ----

NEUTRAL = 2

# A word with its label, the label of a longer phrase that begins, or the end of one.
TOKEN = re.compile(r"\((\d) ([^()]+)\)|\((\d)\s+|(\))")


def phrases(tree: str) -> list[tuple[str, int]]:
    """Return the phrases of a tree and their labels, 0 to 4; the whole sentence is the last."""
    found: list[tuple[str, int]] = []
    open_phrases: list[tuple[int, list[str]]] = []
    for word_label, word, label, _ in TOKEN.findall(tree):
        if label:
            open_phrases.append((int(label), []))
            continue
        if word:
            text, number = word, int(word_label)
        else:
            number, words = open_phrases.pop()
            text = " ".join(words)
        found.append((text, number))
        if open_phrases:
            open_phrases[-1][1].append(text)
    return found


def as_in_sentences(text: str) -> str:
    """Return a text as the files of sentences have it: lower case, no hyphens, no -LRB-."""
    text = text.lower().replace("\\/", "/").replace("\\*", "*")
    text = re.sub("-(lrb|rrb)-", r"\1", text)
    return " ".join(re.sub(r"(?<=\w)-(?=\w)", " ", text).split())


def letters(text: str) -> str:
    """Return what is compared of two texts: files differ in spaces, punctuation and accents."""
    return re.sub("[^a-z0-9]|lrb|rrb", "", as_in_sentences(text))


def labeled_phrases(
    trees: Iterable[str], held_out: Iterable[str] = ()
) -> Iterator[tuple[str, int]]:
    """Yield distinct phrases and their labels, 0 or 1, of sentences that are not held out."""
    left_out, seen = {letters(text) for text in held_out}, set()
    for tree in trees:
        found = phrases(tree)
        if letters(found[-1][0]) in left_out:
            continue
        for text, label in found:
            phrase = as_in_sentences(text), int(label > NEUTRAL)
            if label != NEUTRAL and letters(text) not in left_out and phrase not in seen:
                seen.add(phrase)
                yield phrase


def treebank_phrases(
    trees: tyro.conf.Positional[Path],
    output: tyro.conf.Positional[Path],
    held_out: tuple[Path, ...] = (),
) -> None:
    """Write the labeled phrases of TREES to OUTPUT, a text and its label a line: for `sst2:bag`.

    The treebank (Socher et al. 2013) has a label for every phrase: 0 and 1 are negative, 2 is
    neutral, 3 and 4 are positive. Models are usually trained on all phrases of the training
    sentences that are not neutral, and tested on sentences (Kim 2014, section 3).

    Args:
      trees: Trees of the training sentences, one a line: `(3 (2 It) (4 (2 works) (2 .)))`.
      output: File to write.
      held_out: Files of trees, or of sentences, a text a line before a tab: none of the phrases of
        these sentences is written. Some copies have the validation sentences among the others.
    """
    lines = trees.read_text(encoding="utf-8").splitlines()
    sentences = [
        phrases(line)[-1][0] if TOKEN.match(line) else line.split("\t")[0]
        for path in held_out
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    rows = [f"{text}\t{label}\n" for text, label in labeled_phrases(lines, sentences)]
    output.write_text("".join(rows), encoding="utf-8")
    print(f"{len(rows):,} phrases of {len(lines):,} trees: {output}")
