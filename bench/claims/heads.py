"""What heads attend to, in trained models: how far back, and from a verb to its complement."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import train
from train.assembly import make_task
from train.data.batches import TextEvaluationBatches
from train.run import Run
from transformer.attention_maps import attention_maps

# ---- Heads of a language model ----


def reaches_and_distances(
    weights: jax.Array,  # [L, B, N, T, S]
) -> tuple[jax.Array, jax.Array]:  # [L, N] tokens, [L]
    """Return the mean attention distance of each head, and how different two heads of a layer are.

    The difference is the total variation distance, the mean over all pairs and queries.
    """
    _, batch, heads, length, _ = weights.shape
    back = jnp.arange(length)[:, None] - jnp.arange(length)[None]
    reach = jnp.einsum("LBNTS,TS->LN", weights, back) / (batch * length)
    pairs = [
        jnp.abs(weights[:, :, i] - weights[:, :, j]).sum(-1).mean((1, 2))
        for i, j in itertools.combinations(range(heads), 2)
    ]
    return reach, sum(pairs, start=jnp.zeros(len(weights))) / (2 * len(pairs))


def mean_patterns(run: Run, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return reaches [L, N] and distances [L] over held-out windows."""
    corpus: Any = make_task(run.experiment).prepare_corpus()
    batches = TextEvaluationBatches(
        corpus.split("validation"),
        batch_size=1,
        sequence_length=run.experiment.sequence_length,
        document_masking=False,
        max_batches=32,
    )

    @jax.jit
    def one(params: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        output = run.model.apply({"params": params}, tokens, outputs=frozenset({"weights"}))
        return reaches_and_distances(jnp.concatenate([each["weights"] for each in output.aux]))

    results = [one(params, batches.host_batch(n, 0, 1)["tokens"]) for n in range(len(batches))]
    reach, distance = (np.mean(jax.device_get(each), axis=0) for each in zip(*results, strict=True))
    return reach, distance


def head_patterns(workdir: tyro.conf.Positional[str]) -> None:
    """Print how far back each head attends, and how different heads are, trained and at first.

    Args:
      workdir: Folder of a language model's run with only softmax attention layers.
    """
    run = train.load(workdir)
    first = run.model.init_params(jax.random.key(run.experiment.seed))
    table = Table("layer", "apart", "apart at first", "tokens back, each head")
    reach, apart = mean_patterns(run, run.params)
    _, before = mean_patterns(run, first)
    for layer, (each, distance) in enumerate(zip(reach, apart, strict=True)):
        looks = ", ".join(f"{tokens:.1f}" for tokens in sorted(each))
        table.add_row(str(layer), f"{distance:.2f}", f"{before[layer]:.2f}", looks)
    Console().print(table)


# ---- "making ... more difficult" ----

VERB = "making"
FRAMES = ("the new law is making {} {} .", "two men are making {} {} for a friend .")
OBJECTS = (
    *("the game", "the music", "the food for the children", "the house on the other side"),
    *("the long way to the city", "the street", "the water in the park", "the work of the women"),
)
# Complements and adverbs. The head is chosen by the first pair and reported on the second. No word
# is in both: a head that likes a certain word would keep its preference.
CHOSEN_ON = (
    ("more difficult", "more expensive", "more common", "more important"),
    ("once again", "every day", "last year", "all night"),
)
REPORTED_ON = (
    ("much easier", "very popular", "quite dangerous", "completely different"),
    ("right now", "these days", "this week", "at home"),
)


def tokens_of(pieces: Sequence[str], text: str, words: str) -> list[int]:
    """Return the numbers of the tokens that overlap the first occurrence of words in a text.

    Args:
      pieces: Text of each token; marks of word pieces (`##`, `▁`) and spaces are ignored.
      text: The text.
      words: Part of it.
    """
    letters = text.replace(" ", "")
    begin = letters.index(words.replace(" ", ""))
    end = begin + len(words.replace(" ", ""))
    found, place = [], 0
    for number, piece in enumerate(pieces):
        own = piece.strip().removeprefix("##").replace("▁", "").replace(" ", "")
        if not own or not letters.startswith(own, place):
            continue  # a special token
        if place < end and place + len(own) > begin:
            found.append(number)
        place += len(own)
    return found


class Sentence(NamedTuple):
    """A sentence as a model reads it, and the tokens of the verb and the phrase in it."""

    arguments: dict[str, Any]  # of the model, for a batch of one
    length: int  # tokens
    verb: int
    phrase: list[int]


def read_sentence(run: Run, text: str, phrase: str) -> Sentence:
    """Return a sentence with a phrase as the run's model reads it."""
    translates = run.experiment.model.encoder is not None
    inputs = make_task(run.experiment).model_inputs(run, text, "." if translates else None)
    tokenizer, read = run.tokenizer, inputs.sources or inputs.tokens
    assert tokenizer is not None
    pieces = [tokenizer.decode([int(token)]) for token in read]
    verb = tokens_of(pieces, text, VERB)[-1]
    return Sentence(dict(inputs.arguments), len(read), verb, tokens_of(pieces, text, phrase))


def phrase_weights(
    run: Run, params: Any, sentences: Sequence[Sentence]
) -> np.ndarray:  # [sentences, L, N]
    """Return the weight from the verb to the phrase, of each head of the encoder."""
    results: dict[int, np.ndarray] = {}
    by_length: dict[int, list[int]] = {}
    for number, sentence in enumerate(sentences):
        by_length.setdefault(sentence.length, []).append(number)
    for numbers in by_length.values():  # sentences of one length are a batch
        batch = jax.tree.map(
            lambda *rows: np.concatenate(rows), *(sentences[n].arguments for n in numbers)
        )
        maps = attention_maps(run.model, params, **batch)
        weights = np.stack([each.weights for each in maps if each.stage == "encoder"])
        for row, number in enumerate(numbers):  # of weights [L, B, N, T, S]
            sentence = sentences[number]
            results[number] = weights[:, row, :, sentence.verb][..., sentence.phrase].sum(-1)
    return np.stack([results[number] for number in range(len(sentences))])


def distant_phrases(workdir: tyro.conf.Positional[str]) -> None:
    """Print the weight from "making" to a distant complement, and to an adverb in its place.

    Heads of an encoder lead from the verb to "more difficult" (Vaswani et al. 2017, figure 3). One
    that looks at the end of every sentence draws the same picture, so the weight is compared with
    that to an adverb in the same place ("making the music once again"), for the head where they
    differ most on other phrases. Random weights stand beside it, and even weights.

    Args:
      workdir: A run of a masked language model or of a translation model, with softmax attention.
    """
    run = train.load(workdir)
    parts = [
        [
            read_sentence(run, frame.format(thing, phrase), phrase)
            for thing, frame, phrase in itertools.product(OBJECTS, FRAMES, phrases)
        ]
        for phrases in (*CHOSEN_ON, *REPORTED_ON)
    ]
    sentences = [sentence for part in parts for sentence in part]
    even = np.mean([len(each.phrase) / each.length for each in sentences])
    columns = ("weights", "layer", "head", "to the complement", "to the adverb", "even weights")
    table = Table(*columns, title=f'Weight from "{VERB}", in %')
    first = run.model.init_params(jax.random.key(run.experiment.seed))
    for name, params in (("trained", run.params), ("random", first)):
        weights = phrase_weights(run, params, sentences)
        means = weights.reshape(len(parts), -1, *weights.shape[1:]).mean(1)  # [4, L, N]
        difference = means[0] - means[1]
        layer, head = np.unravel_index(difference.argmax(), difference.shape)
        shown = (f"{100 * mean[layer, head]:.1f}" for mean in means[2:])
        table.add_row(name, str(layer), str(head), *shown, f"{100 * even:.1f}")
    Console().print(table)
