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
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import train
from bench.studies.record import (
    RESULTS,
    markdown_table,
    open_records,
    run_study,
    train_all,
    write_record,
)
from configs.multi30k import EXPERIMENTS as MULTI30K
from configs.multi30k_parallel import EXPERIMENTS as PARALLEL
from configs.multi30k_recurrent import EXPERIMENTS as RECURRENT
from train.assembly import make_task
from train.data.bitext import BitextDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
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


def make_experiment(system: str, folder: Path, steps: int, seed: int) -> Experiment:
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
    return dataclasses.replace(
        base,
        data=data,
        schedule=dataclasses.replace(base.schedule, warmup_steps=warmup),
        steps=steps,
        seed=seed,
        evaluation=EvaluationConfig(every=0),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=200, keep_last=1),
    )


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


def draw(scores: Mapping[tuple[str, int], np.ndarray], path: Path) -> None:
    """Draw BLEU over the source length, the mean of each system and the range of its seeds.

    Args:
      scores: By system and steps, of each seed and length group [seeds, groups]. Systems trained
        for the steps of their recipe are dashed.
      path: File to write.
    """
    figure = Figure(figsize=(7.5, 4.4), dpi=120, layout="constrained")
    axes = figure.subplots()
    names = group_names()
    for (system, count), each in scores.items():
        mean = each.mean(axis=0)
        color = f"C{list(SYSTEMS).index(system)}"
        style = "--" if count == SYSTEMS[system].steps else "-"
        label = f"{TITLES[system]}, {count:,} steps"
        axes.plot(names, mean, style, color=color, marker="o", ms=4, label=label)
        axes.fill_between(names, each.min(axis=0), each.max(axis=0), color=color, alpha=0.15)
    axes.set(xlabel="words of the source", ylabel="BLEU", ylim=(0, None))
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    data: Path,
    systems: tuple[str, ...] = tuple(SYSTEMS),
    steps: int = 1000,
    transformer_steps: int = 400,
    seeds: int = 3,
    whole: tuple[str, ...] | None = None,
    workdir: Path = Path("runs/translators"),
    output: Path = RESULTS,
    processes: int = 1,
    minutes: float = 0,
) -> None:
    """Train what is missing, and write translators.md, translators.json and translators.png.

    Args:
      data: Folder that has Multi30k in `multi30k/raw`.
      systems: Systems to train.
      steps: Steps of the recurrent systems.
      transformer_steps: Steps of the transformers.
      seeds: Number of runs of each.
      whole: Systems to train for the steps of their recipe as well, one seed. By default the
        recurrent ones among `systems`.
      workdir: Folder of the runs.
      output: Folder of the page.
      processes: Runs at once.
      minutes: Time after which the command stops, and can be repeated to go on; 0: no limit.
    """
    folder = data.resolve() / "multi30k"
    runs = []
    usual = {name: steps if name in RECURRENT else transformer_steps for name in SYSTEMS}
    plan = [(seed, system, usual[system]) for seed in range(seeds) for system in systems]
    if whole is None:
        whole = tuple(name for name in systems if name in RECURRENT)
    plan += [(0, system, SYSTEMS[system].steps) for system in whole]
    for seed, system, count in dict.fromkeys(plan):
        settings = {"system": system, "steps": str(count)}
        made = make_experiment(system, folder, count, seed)
        runs.append(SweepRun(run_name(settings, seed), settings, made, float(count)))
    records = open_records("translators", output)
    results = train_all(
        runs, workdir, records, measure=measure, processes=processes, minutes=minutes
    )
    found: dict[tuple[str, int], list[SweepRun]] = {}
    for run in runs:
        found.setdefault((run.settings["system"], run.experiment.steps), []).append(run)
    header = ["system", "steps", "seeds", "BLEU", *group_names(), "validation loss"]
    header += ["training (s)", "translating (s)", "on"]
    rows, groups = [], {}
    for key, own in found.items():
        measured = [records.measured(run) for run in own]
        groups[key] = np.array([each["by_length"] for each in measured])
        scores = np.column_stack([[each["bleu"] for each in measured], groups[key]])
        trained = [results[run.name] for run in own]
        losses = np.array([[each.metrics["loss"]] for each in trained])
        seconds = [np.median([each.seconds for each in trained])]
        seconds.append(np.median([each["translating"] for each in measured]))
        row = [TITLES[key[0]], f"{key[1]:,}", str(len(own))]
        row += [*summaries(scores, 1), *summaries(losses, 3), *(f"{each:.0f}" for each in seconds)]
        found_on = {finished.machine: None for run in own if (finished := records.find(run))}
        rows.append([*row, ", ".join(found_on)])
    draw(groups, output / "translators.png")
    scale = (
        "Multi30k, English to German, by the recipes of `multi30k_recurrent`, `multi30k_parallel` "
        "and `multi30k`, their schedules over the given number of steps of at most 4,096 tokens, "
        "without averaging of weights. sacreBLEU of test 2016, lower-cased, whole and by the words "
        "of the source; beam search except for the non-autoregressive model. Several seeds: mean "
        "and standard deviation (in the figure mean and range). Seconds are those of a run and of "
        "translating 1,000 sentences, the median over seeds, beside other runs; the first of a "
        "system also compiles. Translating word by word, without any context, has a BLEU of 11.7 "
        "(`python -m bench.baselines multi30k`)."
    )
    body = f"{scale}\n\n{markdown_table(header, rows)}"
    by_system = {f"{system},{count}": each.tolist() for (system, count), each in groups.items()}
    write_record(
        "translators",
        "Translation systems by source length",
        body,
        {"bleu_by_length": by_system},
        results,
        trained_on=records.describe_machines(runs),
        folder=output,
    )


def summaries(
    values: np.ndarray,  # [seeds, columns]
    digits: int,
) -> list[str]:  # [columns]
    """Return the mean of each column, and of several seeds the standard deviation."""
    means = [f"{mean:.{digits}f}" for mean in values.mean(axis=0)]
    if len(values) == 1:
        return means
    deviations = values.std(axis=0, ddof=1)
    return [f"{mean} ± {each:.{digits}f}" for mean, each in zip(means, deviations, strict=True)]


if __name__ == "__main__":
    run_study(main)
