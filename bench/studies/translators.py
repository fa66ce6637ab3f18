"""The translation systems of 2014 to 2018 on Multi30k: BLEU by source length.

    python -m bench.studies.translators --data DATA [--systems seq2seq luong] [--minutes 10]

Claims under test: an LSTM that passes one vector to the decoder fails on long sentences, attention
does not (Bahdanau et al. 2015, figure 2); many LSTM layers with attention beat one (Wu et al.
2016); a non-autoregressive decoder is worse than an autoregressive one (Gu et al. 2018). All
systems train on the same sentences by their recipes in `configs/`, without intermediate evaluations
or averaging: the recurrent ones for 1,000 steps, and one run of each for the 3,000 of its recipe;
the transformers, which learn faster, for 400.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import train
from bench.command import command
from bench.studies.record import (
    NO_LIMIT,
    Page,
    QueueFlags,
    Study,
    at_the_end,
    markdown_table,
    over_seeds,
)
from configs.multi30k import EXPERIMENTS as MULTI30K
from configs.multi30k_parallel import EXPERIMENTS as PARALLEL
from configs.multi30k_recurrent import EXPERIMENTS as RECURRENT
from train.assembly import make_task
from train.data.bitext import BitextDataConfig
from train.experiment import Experiment
from train.figures import COLORS, DASHES
from train.optim.schedules import ScheduleConfig
from train.sweep.grid import SweepRun, run_name
from train.tasks.metrics import sacre_bleu
from train.tasks.translation import TranslationTask

SYSTEMS = {
    **RECURRENT,
    "parallel": PARALLEL["multi30k_parallel"],
    "transformer": MULTI30K["multi30k"],
}
TITLES = {
    "seq2seq": "LSTMs, one vector",
    "bahdanau": "LSTMs and a GRU, Bahdanau's attention",
    "luong": "LSTMs, Luong's attention",
    "gnmt": "GNMT",
    "parallel": "transformer, non-autoregressive",
    "transformer": "transformer",
}
BEYOND = (10, 14, 18)
"""Source lengths in words at which the next group begins."""


def make_experiment(system: str, folder: Path, steps: int) -> Experiment:
    """Return the run of a system on the text in a folder."""
    base = SYSTEMS[system]
    assert isinstance(base.data, BitextDataConfig)
    assert isinstance(base.schedule, ScheduleConfig)
    data = dataclasses.replace(
        base.data,
        path=str(folder / "raw" / "train"),
        validation_path=str(folder / "raw" / "val"),
        test_path=str(folder / "raw" / "test_2016_flickr"),
    )
    warmup = min(base.schedule.warmup_steps, steps // 5)
    schedule = dataclasses.replace(base.schedule, warmup_steps=warmup)
    return dataclasses.replace(base, data=data, schedule=schedule, steps=steps)


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


def measure(run: SweepRun, folder: Path) -> dict[str, Any]:
    """Translate the test sentences; return BLEU of all and of each group, and the seconds."""
    loaded = train.load(str(folder))
    assert loaded.tokenizer is not None
    task = make_task(loaded.experiment)
    assert isinstance(task, TranslationTask)
    test = task.prepare_corpus(loaded.tokenizer).split("test")
    sources = [test.source[number] for number in range(len(test.pairs))]
    start = time.perf_counter()
    translations = task.translate_sources(loaded.model, loaded.params, loaded.tokenizer, sources)
    seconds = time.perf_counter() - start
    references = [pair.target for pair in test.pairs]
    groups = by_length([pair.source for pair in test.pairs], translations, references)
    return {
        "bleu": round(sacre_bleu(translations, references).score, 2),
        "by_length": [round(score, 2) for score in groups],
        "translating": round(seconds, 1),
    }


def group_names() -> list[str]:
    """Return the name of each length group."""
    between = [f"{low} to {high - 1}" for low, high in itertools.pairwise(BEYOND)]
    return [f"below {BEYOND[0]}", *between, f"{BEYOND[-1]} and more"]


def draw(scores: Mapping[tuple[str, int], np.ndarray]) -> Figure:
    """Draw BLEU over the source length, the mean of each system and the range of its seeds.

    Args:
      scores: By system and steps, of each seed and length group [seeds, groups]. Systems trained
        for the steps of their recipe have filled marks and a panel of their own.
    """
    figure = Figure(figsize=(9, 5))
    short, whole = figure.subplots(1, 2, sharey=True)
    names = group_names()
    for (system, count), each in scores.items():
        axes = whole if count == SYSTEMS[system].steps else short
        number = list(SYSTEMS).index(system)
        look = {"color": COLORS[number], "linestyle": DASHES[number], "marker": "o"}
        axes.plot(names, each.mean(axis=0), label=TITLES[system], **look)
        axes.fill_between(names, each.min(axis=0), each.max(axis=0), color=look["color"], alpha=0.2)
    for axes, title in ((short, "short runs"), (whole, "the steps of the recipe")):
        axes.set(xlabel="words of the source", title=title, ylim=(0, None))
        axes.tick_params(axis="x", labelsize="small")
    short.set_ylabel("BLEU")
    figure.legend(*short.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@command
def main(
    data: Path,
    systems: tuple[str, ...] = tuple(SYSTEMS),
    steps: int = 1000,
    transformer_steps: int = 400,
    seeds: int = 3,
    whole: tuple[str, ...] | None = None,
    queue: QueueFlags = NO_LIMIT,
) -> None:
    """What BLEU do the translation systems of 2014 to 2018 reach, by the length of the source?

    Args:
      data: Folder that has Multi30k in `multi30k/raw`.
      systems: Systems to train.
      steps: Steps of the recurrent systems.
      transformer_steps: Steps of the transformers.
      seeds: Number of runs of each.
      whole: Systems to train for the steps of their recipe as well, one seed. By default the
        recurrent ones among `systems`.
      queue: Where and how long to train.
    """
    folder = data.resolve() / "multi30k"
    usual = {name: steps if name in RECURRENT else transformer_steps for name in SYSTEMS}
    plan = [(seed, system, usual[system]) for seed in range(seeds) for system in systems]
    if whole is None:
        whole = tuple(name for name in systems if name in RECURRENT)
    plan += [(0, system, SYSTEMS[system].steps) for system in whole]
    runs = []
    for seed, system, count in dict.fromkeys(plan):
        settings = {"system": system, "steps": str(count)}
        made = at_the_end(make_experiment(system, folder, count), seed)
        runs.append(SweepRun(run_name(settings, seed), settings, made, float(count)))
    study = Study("translators", queue)
    results = study.train(runs, measure=measure)
    found: dict[tuple[str, int], list[SweepRun]] = {}
    for run in runs:
        found.setdefault((run.settings["system"], run.experiment.steps), []).append(run)
    rows, times, groups, falls = [], [], {}, []
    for key, own in found.items():
        measured = [study.measured(run) for run in own]
        groups[key] = np.array([each["by_length"] for each in measured])
        bleu = np.column_stack([[each["bleu"] for each in measured], groups[key]])
        title, trained = [TITLES[key[0]], f"{key[1]:,}"], [results[run.name] for run in own]
        rows.append([*title, str(len(own)), *(over_seeds(column, 1) for column in bleu.T)])
        loss = over_seeds([each.metrics["loss"] for each in trained], 3)
        seconds = [np.median([each.seconds for each in trained])]
        seconds.append(np.median([each["translating"] for each in measured]))
        found_on = {finished.machine: None for run in own if (finished := study.records.find(run))}
        times.append([*title, loss, *(f"{each:.0f}" for each in seconds), ", ".join(found_on)])
        if key[1] == SYSTEMS[key[0]].steps:
            first, last = groups[key].mean(axis=0)[[0, -1]]
            falls.append(f"{first:.1f} to {last:.1f} ({TITLES[key[0]]}, {last / first - 1:+.0%})")
    page = Page(
        title="Translation systems by source length",
        question="What BLEU do translation systems reach on Multi30k, by the length of the source?",
        answer=(
            f"After the steps of their recipes, from sources {group_names()[0]} words to those "
            f"of {group_names()[-1]}: {'; '.join(falls)}. Translating word by word, without any "
            "context, has 11.7 (`python -m bench baselines multi30k`)."
        ),
        table=markdown_table(["system", "steps", "seeds", "BLEU", *group_names()], rows),
        settings=(
            "sacreBLEU of test 2016, lower-cased, whole and by the words of the source; of several "
            "seeds mean and standard deviation (in the figure mean and range). Multi30k, English "
            "to German, by the recipes of `multi30k_recurrent`, `multi30k_parallel` and "
            "`multi30k`, their schedules over the given number of steps of at most 4,096 tokens, "
            "without averaging of weights; beam search except for the non-autoregressive model. "
            "Seconds are those of a run and of translating 1,000 sentences, the median over seeds, "
            "beside other runs; the first of a system also compiles."
        ),
        more=[
            markdown_table(
                [*("system", "steps", "validation loss", "training (s)", "translating (s)"), "on"],
                times,
            )
        ],
    )
    by_system = {f"{system},{count}": each.tolist() for (system, count), each in groups.items()}
    study.write(page, draw(groups), {"bleu_by_length": by_system})


if __name__ == "__main__":
    sys.exit(main())
