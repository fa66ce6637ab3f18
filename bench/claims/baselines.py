"""Counting models: simple baselines for every score in RESULTS.md.

A baseline learns from the training split of a config and is scored on the same examples as the
model. Nothing is tuned: smoothing and discounts come from the formulas.
"""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.naive_bayes import MultinomialNB
from sklearn.pipeline import make_pipeline

from train.assembly import make_task
from train.config.experiment_files import find_experiment
from train.data.bitext import BitextDataConfig, SentencePair, read_sentence_pairs
from train.data.token_labels import TokenLabelDataConfig, read_tagged_sentences
from train.experiment import Experiment
from train.tasks.metrics import sacre_bleu

Scores = dict[str, str]
"""A baseline's name and its score, as printed."""


def unigrams(text: str) -> list[str]:
    """Return the words of a text, in lower case, split at white space."""
    return text.lower().split()


def unigrams_and_bigrams(text: str) -> list[str]:
    """Return the words of a text and its pairs of neighbouring words."""
    words = unigrams(text)
    return [*words, *map(" ".join, itertools.pairwise(words))]


class MostFrequentTag:
    """Tag each word with its most frequent tag in training.

    An unknown word gets the most frequent tag of words that occur once in training, which resemble
    unknown ones.
    """

    def __init__(self, words: Iterable[tuple[str, str]]) -> None:
        """Count the tags of (word, tag) pairs."""
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for word, tag in words:
            counts[word][tag] += 1
        once = Counter(next(iter(tags)) for tags in counts.values() if tags.total() == 1)
        every = sum(counts.values(), Counter[str]())
        self.unknown = (once or every).most_common(1)[0][0]
        self.tags = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}

    def predict(self, word: str) -> str:
        """Return the tag of a word."""
        return self.tags.get(word, self.unknown)


class KneserNey:
    """Interpolated Kneser-Ney n-gram model over token numbers (Chen and Goodman 1999, section 2.7).

    P_n(w | h) = (max(c(h w) - D_n, 0) + D_n * types(h) * P_{n-1}(w | h')) / c(h)

    where h' is h without its first token and types(h) the number of distinct tokens after h. At the
    highest order c counts occurrences; below, it counts the distinct tokens before an n-gram. Each
    order has one discount, D = n1 / (n1 + 2 n2), from how many n-grams have a count of 1 and of 2.
    P_0 is uniform. A context that training has not seen leaves the decision to the order below.
    """

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int) -> None:
        """Count n-grams of up to `order` tokens of a stream [N]."""
        self.vocab_size = vocab_size
        tokens = np.asarray(tokens, np.int64)
        # An n-gram's key is (number of its first n - 1 tokens among all (n-1)-grams) * V + its last
        # token, so that keys fit into 64 bits at any order.
        self.keys: list[np.ndarray] = []
        ends: list[np.ndarray] = []  # where each distinct n-gram first ends in the stream
        numbers: list[np.ndarray] = []  # which n-gram ends at each position, from n - 1 on
        occurrences = np.zeros(0, np.int64)
        context = np.zeros(len(tokens), np.int64)  # the only 0-gram is the empty one
        for n in range(1, order + 1):
            key = context * vocab_size + tokens[n - 1 :]
            keys, first, number, occurrences = np.unique(
                key, return_index=True, return_inverse=True, return_counts=True
            )
            self.keys.append(keys)
            ends.append(first + n - 1)
            numbers.append(number)
            context = number[:-1]
        self.counts = []
        # Distinct previous tokens: one for each (n + 1)-gram that ends with the n-gram.
        for n in range(1, order):
            suffixes = numbers[n - 1][ends[n] - (n - 1)]
            self.counts.append(np.bincount(suffixes, minlength=len(self.keys[n - 1])))
        self.counts.append(occurrences)
        self.discounts = [_discount(counts) for counts in self.counts]

    def probabilities(self, tokens: np.ndarray) -> np.ndarray:  # [N - 1]
        """Return P of each token of a stream [N] but the first, given the tokens before it."""
        tokens = np.asarray(tokens, np.int64)
        probs = np.full(len(tokens), 1 / self.vocab_size)
        context = np.zeros(len(tokens), np.int64)  # per position; -1 for unknown
        for n, keys in enumerate(self.keys, start=1):
            counts, discount = self.counts[n - 1], self.discounts[n - 1]
            contexts = len(self.keys[n - 2]) if n > 1 else 1
            owner = keys // self.vocab_size
            totals = np.bincount(owner, counts, contexts)
            types = np.bincount(owner, counts > 0, contexts)
            index = _lookup(keys, np.where(context >= 0, context * self.vocab_size + tokens, -1))
            count = np.where(index >= 0, counts[index], 0)
            usable = (context >= 0) & (totals[context] > 0)
            total = np.where(usable, totals[context], 1)
            higher = (np.maximum(count - discount, 0) + discount * types[context] * probs) / total
            probs = np.where(usable, higher, probs)
            # The n-gram that ends at a position is the context of the next position.
            context = np.concatenate([[-1], index[:-1]])
        return probs[1:]

    def loss(self, tokens: np.ndarray) -> float:
        """Return the mean negative log probability of the stream's tokens, in nats."""
        return float(-np.log(self.probabilities(tokens)).mean())


def _discount(counts: np.ndarray) -> float:
    """Return n1 / (n1 + 2 n2); 0.5 if no n-gram has a count of 1."""
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    return once / (once + 2 * twice) if once else 0.5


def _lookup(keys: np.ndarray, keys_to_find: np.ndarray) -> np.ndarray:
    """Return the index of each wanted number among sorted keys, -1 where it is missing."""
    index = np.minimum(np.searchsorted(keys, keys_to_find), len(keys) - 1)
    return np.where(keys[index] == keys_to_find, index, -1)


class WordByWord:
    """Translate each word alone, by IBM model 1 without a null word (Brown et al. 1993).

    Expectation maximization over t(f | e), the probability that source word e becomes f:
    a target word f is owed to each source word e of its sentence in proportion to t(f | e).
    """

    def __init__(
        self, pairs: Iterable[tuple[Sequence[str], Sequence[str]]], iterations: int = 10
    ) -> None:
        """Learn the table from sentences in words."""
        sources: dict[str, int] = {}
        targets: dict[str, int] = {}
        links, cells, cell = [], [], 0
        for source, target in pairs:
            e = np.array([sources.setdefault(word, len(sources)) for word in source], np.int64)
            f = np.array([targets.setdefault(word, len(targets)) for word in target], np.int64)
            links.append((e[None, :] << 32 | f[:, None]).ravel())
            cells.append(np.repeat(np.arange(cell, cell + len(f)), len(e)))
            cell += len(f)
        # A link joins a source word to a target word of its sentence; a cell is one target word's
        # occurrence, over whose links its count is divided.
        known, link = np.unique(np.concatenate(links), return_inverse=True)
        owner, of_cell = known >> 32, np.concatenate(cells)
        table = np.ones(len(known))
        for _ in range(iterations):
            weight = table[link]
            weight = weight / np.bincount(of_cell, weight)[of_cell]
            count = np.bincount(link, weight, len(known))
            table = count / np.bincount(owner, count)[owner]
        names = list(targets)
        by_number: dict[int, tuple[float, str]] = {}
        for e, f, probability in zip(owner, known & 0xFFFFFFFF, table, strict=True):
            best = by_number.get(int(e), (0.0, ""))
            by_number[int(e)] = max(best, (float(probability), names[int(f)]))
        self.best = {word: by_number[number][1] for word, number in sources.items()}

    def translate(self, words: Iterable[str]) -> list[str]:
        """Return the most probable word for each word; unknown words are copied."""
        return [self.best.get(word, word) for word in words]


def classification(experiment: Experiment) -> Scores:
    """Score class guesses and naive Bayes by accuracy on the test split."""
    corpus: Any = make_task(experiment).prepare_corpus()
    train, validation, test = (corpus.split(n) for n in ("train", "validation", "test"))
    most_frequent = np.bincount(train.targets).argmax()
    predictions = {"most frequent class": np.full(len(test.targets), most_frequent)}
    for name, features in (("words", unigrams), ("words and bigrams", unigrams_and_bigrams)):
        # Nothing is selected on the validation split here, so its examples can be counted too.
        for title, splits in (
            (f"naive Bayes, {name}", [train]),
            (f"naive Bayes, {name}, validation split added", [train, validation]),
        ):
            # Multinomial with Laplace smoothing (Manning et al. 2008, section 13.2).
            model = make_pipeline(CountVectorizer(analyzer=features), MultinomialNB())
            texts = list(itertools.chain(*(split.texts for split in splits)))
            model.fit(texts, np.concatenate([split.targets for split in splits]))
            predictions[title] = model.predict(list(test.texts))
    return {
        name: f"test accuracy {100 * np.mean(test.targets == found):.1f}%"
        for name, found in predictions.items()
    }


def tagging(experiment: Experiment) -> Scores:
    """Score the most frequent tag of each word by accuracy on the test split's words."""
    config = experiment.data
    assert isinstance(config, TokenLabelDataConfig)
    splits = read_tagged_sentences(config)
    words = {
        name: [(word.text, word.tag) for sentence in sentences for word in sentence]
        for name, sentences in splits.items()
    }
    model = MostFrequentTag(words["train"])
    right = [model.predict(word) == tag for word, tag in words["test"]]
    return {"most frequent tag of the word": f"test accuracy {100 * np.mean(right):.1f}%"}


def language(experiment: Experiment) -> Scores:
    """Score Kneser-Ney models of some orders by loss on the split that RESULTS.md reports."""
    corpus: Any = make_task(experiment).prepare_corpus()
    split = "test" if experiment.text_data.test_path else "validation"
    stream = corpus.split(split)
    scores = {}
    for order in ORDERS:
        model = KneserNey(corpus.split("train").tokens, corpus.tokenizer.vocab_size, order)
        loss = model.loss(stream.tokens)
        bits = loss * stream.num_targets / stream.num_bytes / math.log(2)
        scores[f"Kneser-Ney, {order}-gram"] = (
            f"{split} loss {loss:.3f}, perplexity {math.exp(loss):.1f}, {bits:.3f} bits per byte"
        )
    return scores


def masked(experiment: Experiment) -> Scores:
    """Score word frequencies and n-grams of the words before, over all validation tokens."""
    corpus: Any = make_task(experiment).prepare_corpus()
    train, held_out = corpus.split("train").tokens, corpus.split("validation").tokens
    frequent = np.bincount(train).argmax()
    scores = {"most frequent word": f"accuracy {100 * np.mean(held_out[1:] == frequent):.1f}%"}
    for order in ORDERS:
        model = KneserNey(train, corpus.tokenizer.vocab_size, order)
        scores[f"Kneser-Ney, {order}-gram"] = f"validation loss {model.loss(held_out):.3f}"
    return scores


def translation(experiment: Experiment) -> Scores:
    """Score copies and translations word by word by sacreBLEU, in lower case, on the test split."""
    config = experiment.data
    assert isinstance(config, BitextDataConfig)
    splits = read_sentence_pairs(config)
    model = WordByWord((_words(pair.source), _words(pair.target)) for pair in splits["train"])
    test: Sequence[SentencePair] = splits["test"]
    references = [pair.target for pair in test]
    translations = {
        "source copied": [pair.source for pair in test],
        "word by word": [" ".join(model.translate(_words(pair.source))) for pair in test],
    }
    return {
        name: f"test BLEU {sacre_bleu(t, references).score:.1f}" for name, t in translations.items()
    }


def _words(text: str) -> list[str]:
    """Return words and punctuation marks, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


ORDERS = (1, 3, 5, 7)
"""Orders of the n-gram models."""

TASKS: dict[str, Callable[[Experiment], Scores]] = {
    "trec": classification,
    "sst2": classification,
    "sst2:bag": classification,
    "ud_ewt": tagging,
    "multi30k": translation,
    "quickstart": language,
    "shakespeare_char_cpu": language,
    "wikitext2": language,
    "bert_tiny": masked,
    "listops": classification,
    "byte_text": classification,
}


def baselines(tasks: tyro.conf.Positional[tuple[str, ...]] = tuple(TASKS)) -> None:
    """Print the score of each baseline for the named configs.

    Classification: the most frequent class, and naive Bayes. Tagging: the most frequent tag of each
    word. Language modeling: interpolated Kneser-Ney n-grams over the model's own tokens.
    Translation: copying the source, and translating word by word with the table of IBM model 1.
    """
    table = Table("config", "baseline", "score")
    for task in tasks:
        for baseline, score in TASKS[task](find_experiment(task)).items():
            table.add_row(task, baseline, score)
    Console(width=120).print(table)
