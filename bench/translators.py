"""BLEU of the translation systems on Multi30k by source length.

    python -m bench.translators [--systems seq2seq luong] [--steps 3000] [--seeds 3]
        [--data $DATA/multi30k]

Claims under test: an LSTM that passes one vector to the decoder fails on long sentences, attention
does not (Bahdanau et al. 2015, figure 2); a non-autoregressive decoder is worse than an
autoregressive one (Gu et al. 2018). All systems train on the same sentences with the recipes of
`configs/` for the same number of steps, without intermediate evaluations or averaging.
"""

import dataclasses
import itertools
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from configs.multi30k import EXPERIMENTS as MULTI30K
from configs.multi30k_parallel import EXPERIMENTS as PARALLEL
from configs.multi30k_recurrent import EXPERIMENTS as RECURRENT
from train.data.example_configs import BitextDataConfig
from train.engine import make_engine
from train.evaluation.metrics import sacre_bleu
from train.experiment import Experiment
from train.optim.schedules import ScheduleConfig
from train.runtime.local_hardware import local_hardware
from train.tasks.translation import TranslationTask

SYSTEMS = {
    **RECURRENT,
    "transformer": MULTI30K["multi30k"],
    "parallel": PARALLEL["multi30k_parallel"],
}
DATA = Path(os.environ.get("TRANSFORMER_DATA", ".")) / "multi30k"
BEYOND = (10, 14, 18)
"""Source lengths in words at which the next group begins."""


def with_data(experiment: Experiment, folder: Path, steps: int, seed: int = 0) -> Experiment:
    """Return the experiment for the text in a folder, with `steps` steps and a seed."""
    assert isinstance(experiment.data, BitextDataConfig)
    data = dataclasses.replace(
        experiment.data,
        path=str(folder / "raw" / "train"),
        validation_path=str(folder / "raw" / "val"),
        test_path=str(folder / "raw" / "test_2016_flickr"),
    )
    assert isinstance(experiment.schedule, ScheduleConfig)
    warmup = min(experiment.schedule.warmup_steps, steps // 5)
    schedule = dataclasses.replace(experiment.schedule, warmup_steps=warmup)
    return dataclasses.replace(experiment, data=data, schedule=schedule, steps=steps, seed=seed)


def by_length(
    sources: Sequence[str], translations: Sequence[str], references: Sequence[str]
) -> list[float]:  # BLEU of the sources below each of `BEYOND`, and of the rest
    """Return the BLEU of each length group."""
    groups = np.digitize([len(source.split()) for source in sources], BEYOND)
    scores = []
    for group in range(len(BEYOND) + 1):
        [chosen] = np.nonzero(groups == group)
        own = [[texts[int(number)] for number in chosen] for texts in (translations, references)]
        scores.append(sacre_bleu(*own).score)
    return scores


def measure(experiment: Experiment, pairs: int) -> tuple[list[float], float, float]:
    """Train, then translate `pairs` test sentences; 0: all.

    Returns BLEU of all and of each group, and the seconds of training and of translating.
    """
    corpus = TranslationTask(experiment).prepare_corpus()
    task = TranslationTask(TranslationTask(experiment).resolve_experiment(corpus))
    engine, batches = make_engine(task.experiment, local_hardware()), task.training_batches(corpus)
    state, start, skipped = engine.init(), time.perf_counter(), jnp.float32(0)
    for cursor in range(task.experiment.steps):
        state, metrics = engine.step(state, engine.put_batch(batches.host_batch(cursor, 0, 1)))
        skipped += metrics["skipped"]
        if cursor % 100 == 99:
            metrics_text = (
                f"loss {float(metrics['loss']):.3f}, {float(skipped):.0f} updates skipped"
            )
            print(f"  step {cursor + 1}: {metrics_text}", file=sys.stderr, flush=True)
    trained = time.perf_counter()
    test = corpus.split("test")
    chosen = test.pairs[: pairs or None]
    sources = [test.source[number] for number in range(len(chosen))]
    translations = task.translate_sources(engine.model, state.params, corpus.tokenizer, sources)
    references = [pair.target for pair in chosen]
    words = [pair.source for pair in chosen]
    scores = [
        sacre_bleu(translations, references).score,
        *by_length(words, translations, references),
    ]
    return scores, trained - start, time.perf_counter() - trained


def summarize(values: Sequence[float], digits: int = 1) -> str:
    """Return the mean, and of several values the lowest and the highest."""
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main(
    systems: tuple[str, ...] = tuple(SYSTEMS),
    steps: int = 3000,
    seeds: int = 1,
    data: Path = DATA,
    pairs: int = 0,
) -> None:
    """Print a table, and each run's row on standard error as soon as it is known.

    Args:
      systems: Systems to train.
      steps: Steps of each.
      seeds: Number of runs of each; of several, the mean and the range are printed.
      data: Folder of Multi30k.
      pairs: Number of test sentences to translate; 0: all.
    """
    bounds = [f"below {BEYOND[0]}"]
    bounds += [f"{low} to {high - 1}" for low, high in itertools.pairwise(BEYOND)]
    bounds += [f"{BEYOND[-1]} and more"]
    columns = ("system", "BLEU", *bounds, "training s", "translating s")
    title = f"{steps} steps, {seeds} {'seed' if seeds == 1 else 'seeds'}; BLEU by words"
    table = Table(*columns, title=f"{title} of the source")
    for name in systems:
        runs = []
        for seed in range(seeds):
            experiment = with_data(SYSTEMS[name], data, steps, seed)
            scores, training, translating = measure(experiment, pairs)
            runs.append((*scores, training, translating))
            shown = (*(f"{score:.1f}" for score in scores), f"{training:.0f}", f"{translating:.0f}")
            print(name, f"seed {seed}:", *shown, file=sys.stderr, flush=True)
        *scores_of, training_of, translating_of = zip(*runs, strict=True)
        seconds = (summarize(each, 0) for each in (training_of, translating_of))
        table.add_row(name, *map(summarize, scores_of), *seconds)
    Console(width=140).print(table)


if __name__ == "__main__":
    tyro.cli(main)
