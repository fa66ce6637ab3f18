"""A verb and its distant complement: do heads link "making" to "more difficult"?

    python -m train fit bert_tiny --steps 4000 --data... --workdir W
    python -m bench.distant_phrases W

Claim under test: attention follows dependencies over long distances, as in "making the registration
or voting process more difficult", where heads of the encoder lead from the verb to the two words
that complete it (Vaswani et al. 2017, figure 3).

A head that looks at the end of every sentence draws the same picture, so the weight from "making"
to the complement is compared with its weight to an adverb in the same place of the same sentence
("making the music more difficult", "making the music once again"). The head with the largest
difference is chosen on some phrases and reported on others. Random weights stand beside it, and
even weights: what a head that looks everywhere alike gives the phrase.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

import train
from train.assembly import make_task
from train.errors import UserError
from train.run import Run
from transformer.attention_maps import attention_maps

VERB = "making"
FRAMES = ("the new law is making {} {} .", "two men are making {} {} for a friend .")
OBJECTS = (
    *("the game", "the music", "the food for the children", "the house on the other side"),
    *("the long way to the city", "the street", "the water in the park", "the work of the women"),
)
CHOSEN_ON = {
    "complement": ("more difficult", "more expensive", "more common", "more important"),
    "adverb": ("once again", "every day", "last year", "all night"),
}
REPORTED_ON = {
    "complement": ("much easier", "very popular", "quite dangerous", "completely different"),
    "adverb": ("right now", "these days", "this week", "at home"),
}
"""No word is in both: a head that likes a certain word would keep its preference."""


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
    """A sentence that a model reads, and where the verb and the phrase are in it."""

    arguments: dict[str, Any]
    """Arguments of the model, for a batch of one."""
    length: int  # tokens
    verb: int
    phrase: tuple[int, ...]


def read_sentence(run: Run, text: str, phrase: str) -> Sentence:
    """Return a sentence with a phrase as the run's model reads it."""
    translates = run.experiment.model.encoder is not None
    inputs = make_task(run.experiment).model_inputs(run, text, "." if translates else None)
    tokenizer, read = run.tokenizer, inputs.sources or inputs.tokens
    assert tokenizer is not None
    pieces = [tokenizer.decode([int(token)]) for token in read]
    verb, words = tokens_of(pieces, text, VERB), tokens_of(pieces, text, phrase)
    return Sentence(dict(inputs.arguments), len(read), verb[-1], tuple(words))


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
        own = np.stack(
            [each.weights for each in maps if each.stage == "encoder"]
        )  # [L, B, N, T, S]
        for row, number in enumerate(numbers):
            _, _, verb, phrase = sentences[number]
            results[number] = own[:, row, :, verb][..., list(phrase)].sum(-1)
    return np.stack([results[number] for number in range(len(sentences))])


def main(workdir: tyro.conf.Positional[str]) -> None:
    """Print a table.

    Args:
      workdir: A run of a masked language model or of a translation model, with softmax attention.
    """
    run = train.load(workdir)
    if run.experiment.model.causal and run.experiment.model.encoder is None:
        raise SystemExit(f"error: {workdir}: its model reads to the left only; give an encoder's")
    parts = [
        [
            read_sentence(run, frame.format(thing, phrase), phrase)
            for thing, frame, phrase in itertools.product(OBJECTS, FRAMES, phrases)
        ]
        for kinds in (CHOSEN_ON, REPORTED_ON)
        for phrases in kinds.values()
    ]
    sentences = [sentence for part in parts for sentence in part]
    even = np.mean([len(each.phrase) / each.length for each in sentences])
    columns = ("weights", "layer", "head", "to the complement", "to the adverb", "even weights")
    table = Table(*columns, title=f'Weight from "{VERB}", in %')
    first = run.model.init_params(jax.random.key(run.experiment.seed))
    for name, params in (("trained", run.params), ("random", first)):
        weights = phrase_weights(run, params, sentences)
        # Equal parts in the order above: means over the sentences of each.
        means = weights.reshape(len(parts), -1, *weights.shape[1:]).mean(1)  # [4, L, N]
        difference = means[0] - means[1]
        layer, head = np.unravel_index(difference.argmax(), difference.shape)
        shown = (f"{100 * mean[layer, head]:.1f}" for mean in means[2:])
        table.add_row(name, str(layer), str(head), *shown, f"{100 * even:.1f}")
    Console().print(table)


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
