"""The translation systems of 2014 to 2018 on Multi30k: BLEU by source length.

Claims under test: an LSTM that passes one vector to the decoder fails on long sentences, attention
does not (Bahdanau et al. 2015, figure 2); many LSTM layers with attention beat one (Wu et al.
2016); a non-autoregressive decoder is worse than an autoregressive one (Gu et al. 2018). All
systems train on the same sentences by their recipes in `configs/`, without intermediate evaluations
or averaging: the recurrent ones for 1,000 steps, and one run of each for the 3,000 of its recipe;
the transformers, which learn faster, for 400.
"""

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import train
from bench.results import over_seeds
from bench.studies.record import Study, at_the_end, markdown_table
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


def main(data: Path, seeds: int = 3, minutes: float = 0) -> None:
    """What BLEU do the translation systems of 2014 to 2018 reach, by the length of the source?

    Args:
      data: Folder that has Multi30k in `multi30k/raw`.
      seeds: Number of short runs of each system. The recurrent ones are also trained once for the
        steps of their recipe.
      minutes: Time after which the command stops, and can be repeated to go on. 0: no limit.
    """
    folder = data.resolve() / "multi30k"
    short = {name: 1000 if name in RECURRENT else 400 for name in SYSTEMS}
    plan = [(seed, system, short[system]) for seed in range(seeds) for system in SYSTEMS]
    plan += [(0, system, SYSTEMS[system].steps) for system in RECURRENT]
    all_runs: list[SweepRun] = []
    runs: dict[tuple[str, int], list[SweepRun]] = {}
    for seed, system, steps in plan:
        settings = {"system": system, "steps": str(steps)}
        made = at_the_end(make_experiment(system, folder, steps), seed)
        all_runs.append(SweepRun(run_name(settings, seed), settings, made, float(steps)))
        runs.setdefault((system, steps), []).append(all_runs[-1])
    study = Study("translators", minutes)
    finished = study.train(all_runs, measure=measure)
    scores, times, groups = [], [], {}
    for (system, steps), own in runs.items():
        found = [finished[run.name] for run in own]
        groups[system, steps] = np.array([each.measured["by_length"] for each in found])
        bleu = [each.measured["bleu"] for each in found]
        columns = [bleu, *groups[system, steps].T]
        title = [TITLES[system], f"{steps:,}"]
        scores.append([*title, str(len(own)), *(over_seeds(column, 1) for column in columns)])
        loss = over_seeds([each.result.metrics["loss"] for each in found], 3)
        training = np.median([each.result.seconds for each in found])
        translating = np.median([each.measured["translating"] for each in found])
        machines = ", ".join(dict.fromkeys(each.machine for each in found))
        times.append([*title, loss, f"{training:.0f}", f"{translating:.0f}", machines])
    tables = [
        markdown_table(["system", "steps", "seeds", "BLEU", *group_names()], scores),
        markdown_table(
            [*("system", "steps", "validation loss", "training (s)", "translating (s)"), "on"],
            times,
        ),
    ]
    by_system = {f"{system},{steps}": each.tolist() for (system, steps), each in groups.items()}
    study.write(tables, draw(groups), {"bleu_by_length": by_system})
