"""Effect of pretrained word vectors on a classifier with few examples.

    python -m bench.word_vectors [--text $TRANSFORMER_DATA/wikitext-2/train.txt --seeds 3]
        [--classifier sst2] [--save FILE]

`examples/word_vectors.py` trains vectors of any texts, without a classifier.

Skip-gram with negative samples (Mikolov et al. 2013) is trained on the text and on the training
texts of a classifier, by default TREC's questions. Its vectors initialize the embeddings of a bag
and of an LSTM, which are compared with the same models from random embeddings of the same size.
"""

import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from configs.trec import EXPERIMENTS as TREC
from train.assembly import make_engine, make_task, training_options, with_task
from train.config.experiment_files import find_experiment
from train.evaluation.evaluator import evaluate_split
from train.experiment import Experiment
from train.runtime.local_hardware import local_hardware
from train.warm_start.skip_gram import train_word_vectors
from train.warm_start.word_vectors import write_word_vectors
from transformer import TransformerConfig
from transformer.baselines.word_vectors import replace_embeddings

TEXT = Path(os.environ.get("TRANSFORMER_DATA", ".")) / "wikitext-2" / "train.txt"


def lstm(bag: TransformerConfig) -> TransformerConfig:
    """Return the model with a bidirectional LSTM in place of the bag's MLP."""
    block, _ = TREC["hybrid"].model.layer_pattern
    return dataclasses.replace(bag, layer_pattern=(block,), embedding_dropout=0.5)


def accuracy(experiment: Experiment, vectors: np.ndarray | None) -> float:
    """Return the test accuracy after training from random embeddings or from vectors."""
    corpus = make_task(experiment).prepare_corpus()
    task = make_task(experiment).resolve(corpus)
    experiment = with_task(experiment, task)
    engine = make_engine(experiment, local_hardware())
    state = engine.init()
    if vectors is not None:
        scale = float(jnp.std(state.params["embedding"])) / vectors.std()
        state = state.replace(params=replace_embeddings(state.params, jnp.asarray(vectors * scale)))
    batches = task.training_batches(corpus, training_options(experiment))
    for cursor in range(experiment.steps):
        state, _ = engine.step(state, engine.put_batch(batches.host_batch(cursor, 0, 1)))
    metrics = evaluate_split(experiment, engine, state.params, corpus, "test", whole=True)
    return metrics["accuracy"]


def read(experiment: Experiment, text: Path) -> list[np.ndarray]:  # each [n]
    """Return the lines of a text and the training questions as sequences of known words."""
    corpus: Any = make_task(experiment).prepare_corpus()
    lines = text.read_text(encoding="utf-8").splitlines()
    texts = [*lines, *corpus.split("train").texts]
    [unknown] = corpus.tokenizer.encode("<unk>")
    encoded = (each[each != unknown] for each in corpus.tokenizer.encode_documents(texts))
    return [each for each in encoded if len(each)]


def main(
    text: Path = TEXT,
    steps: int = 10_000,
    seeds: int = 3,
    classifier: Literal["trec", "sst2"] = "trec",
    save: Path | None = None,
) -> None:
    """Print the accuracy on the test texts, TREC's 500 questions: mean and range over seeds.

    Args:
      text: Text on which vectors are trained, beside the classifier's own training texts.
      steps: Steps of that training.
      seeds: Number of classifiers of each kind. 0: only the vectors.
      classifier: Config whose texts and words are used.
      save: File to write the vectors to, in the format of word2vec, for `fit --init-from`.
    """
    bag = dataclasses.replace(TREC["bag"], data=find_experiment(classifier).data)
    models = {"bag": bag.model, "LSTM, both ways": lstm(bag.model)}
    corpus: Any = make_task(bag).prepare_corpus()
    words = make_task(bag).resolve(corpus).model_config.vocab_size
    vectors = train_word_vectors(read(bag, text), words, bag.model.d_model, steps=steps)
    if save:
        write_word_vectors(save, corpus.tokenizer.vocabulary, vectors)
    if not seeds:
        return
    table = Table("model", "embeddings", "accuracy", "least", "most", title=f"{seeds} seeds")
    for name, model in models.items():
        for start, initial_vectors in (("random", None), ("skip-gram", vectors)):
            accuracies = []
            for seed in range(seeds):
                accuracies.append(
                    accuracy(dataclasses.replace(bag, model=model, seed=seed), initial_vectors)
                )
                print(f"{name}, {start}, seed {seed}: {accuracies[-1]:.3f}", file=sys.stderr)
            shown = (statistics.mean(accuracies), min(accuracies), max(accuracies))
            table.add_row(name, start, *(f"{100 * each:.1f}" for each in shown))
    Console().print(table)


if __name__ == "__main__":
    tyro.cli(main)
