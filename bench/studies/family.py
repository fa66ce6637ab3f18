"""Comparison of every causal mixer and the systems that transformers replaced, at equal parameters.

    python -m bench.studies.family [--language-steps 200] [--recall-steps 600] [--seeds 3]

Two tasks, on the resumable queue:

- language: the quickstart's text in windows of 128 tokens, 2 layers of width 128; held-out loss.
- recall: `bench.studies.recall`, sequences of 128 tokens with 16 pairs, width 64; accuracy. The
  first layer is a convolution of three taps, which joins each value to the key before it, and the
  second the mixer, as Arora et al. 2023 compare them: two layers of attention alone stay at the
  level of guessing one value in 16 for more steps than this study has.

Attention has rotary positions; recurrences and convolutions know the order by construction. The
width of the feed-forward layers is fitted so that all have as many parameters as `full` within 2%.
Windows and numbers of keys are a quarter of the sequence. The learning rate is the same for all
mixers of a task: none is tuned to one of them.

Afterwards training steps of all mixers are timed in turns, in this process, and the memory of a
step is the compiler's. `--rounds 0` skips the timing.
"""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from bench.small_runs import small
from bench.studies.recall import AssociativeRecall
from bench.studies.record import (
    RESULTS,
    markdown_table,
    open_records,
    run_study,
    single_run,
    train_all,
    write_record,
)
from train.assembly import make_engine, make_task, training_options, with_task
from train.data.arrays import ArrayDataConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment, SampleConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.runtime.local_hardware import local_hardware
from train.scaling.design import count_without_embeddings
from train.sweep.grid import SweepRun, run_name
from train.sweep.sweep_folder import RunResult
from transformer import (
    AttentionConfig,
    BigBirdConfig,
    BlockConfig,
    ChengConfig,
    ConvolutionConfig,
    ElmanConfig,
    FeedForwardConfig,
    GatedDeltaConfig,
    IdentityConfig,
    Initialization,
    LatentAttentionConfig,
    LinearAttentionConfig,
    LongformerConfig,
    LSTMConfig,
    Mamba2Config,
    MixerConfig,
    NormConfig,
    PerformerConfig,
    PrimerConfig,
    ReformerConfig,
    RoPE,
    RoutingAttentionConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
    TopKConfig,
    TransformerConfig,
)

HEADS, LAYERS = 4, 2
TASKS = ("language", "recall")
RECALL = AssociativeRecall(pairs=16, keys=16)
RECALL_LENGTH, RECALL_BATCH, RECALL_WIDTH, LANGUAGE_WIDTH = 128, 8, 64, 128


def mixers(length: int, width: int) -> dict[str, MixerConfig]:
    """Return every causal mixer by name, for sequences of T tokens and models of width D."""
    keys, root = length // 4, math.isqrt(length)
    heads: dict[str, Any] = {"num_heads": HEADS, "position": RoPE()}
    return {
        "full": AttentionConfig(**heads),
        "multi_query": AttentionConfig(**heads, num_kv_heads=1),
        "latent": LatentAttentionConfig(**heads, kv_rank=width // 2),
        "primer": PrimerConfig(**heads),
        "sliding_window": SlidingWindowConfig(**heads, window=keys),
        "longformer": LongformerConfig(**heads, one_sided_window=keys),
        "bigbird": BigBirdConfig(**heads, block_size=keys // 4, random_block_span=length),
        "sparse": SparseTransformerConfig(**heads, stride=root),
        "top_k": TopKConfig(**heads, keys_per_query=keys),
        "routing": RoutingAttentionConfig(**heads, num_clusters=root // 2, window=keys),
        "reformer": ReformerConfig(
            **heads, num_buckets=root // 2 * 2, num_hashes=2, window=keys // 2
        ),
        "performer": PerformerConfig(**heads, num_features=4 * width // HEADS),
        "linear": LinearAttentionConfig(**heads),
        "gated_delta": GatedDeltaConfig(HEADS),
        "mamba2": Mamba2Config(HEADS, state_dim=2 * width // HEADS),
        "convolution": ConvolutionConfig(kernel_size=5),
        "lstm": LSTMConfig(),
        "cheng": ChengConfig(),
        "elman": ElmanConfig(),
        "identity": IdentityConfig(),
    }


def model_with(task: str, mixer: MixerConfig, width: int, feed_forward: int) -> TransformerConfig:
    """Return a decoder of two layers with this mixer, or of a convolution and the mixer."""
    block = BlockConfig(
        mixer=mixer,
        feed_forward=FeedForwardConfig(feed_forward, activation="gelu"),
        norm=NormConfig("layer"),
    )
    first = mixer
    if task == "recall":
        first = ConvolutionConfig(kernel_size=3)
    elif isinstance(mixer, RoutingAttentionConfig):
        # Its paper combines it with windows (Roy et al. 2021, section 4.1).
        first = SlidingWindowConfig(HEADS, position=RoPE(), window=mixer.window)
    pattern = (block,) if first == mixer else (dataclasses.replace(block, mixer=first), block)
    # With deviations of 0.02 the scores of a model this narrow are almost equal at first, and full
    # attention is still guessing after 400 steps of 32 sequences; with these it answers after 150.
    start = Initialization(std=0, embedding_std=1 / math.sqrt(width))
    return TransformerConfig(
        d_model=width, num_layers=LAYERS, layer_pattern=pattern, initialization=start
    )


def same_size(
    task: str, mixer: MixerConfig, width: int, vocab_size: int, size: int
) -> TransformerConfig:
    """Return a model whose feed-forward width brings its size as close as possible to `size`.

    The count is linear in the width, so two models determine the width of the third.
    """
    count = lambda config: count_without_embeddings(  # noqa: E731
        dataclasses.replace(config, vocab_size=vocab_size)
    )
    small_count, large_count = (
        count(model_with(task, mixer, width, f)) for f in (width, 2 * width)
    )
    per_unit = (large_count - small_count) / width
    return model_with(task, mixer, width, max(1, width + round((size - small_count) / per_unit)))


def experiment(task: str, name: str, steps: int, seed: int) -> Experiment:
    """Return the run of a mixer on a task."""
    if task == "language":
        base, width = small(steps), LANGUAGE_WIDTH
        vocab_size, learning_rate = 4096, 2e-3
    else:
        vocab_size, width = RECALL.vocab_size, RECALL_WIDTH
        data = ArrayDataConfig(length=RECALL_LENGTH)
        base = Experiment(
            "recall", RECALL, TransformerConfig(vocab_size), data, batch_size=RECALL_BATCH
        )
        learning_rate = 3e-3
    choices = mixers(base.sequence_length, width)
    full = model_with(task, choices["full"], width, 4 * width)
    size = count_without_embeddings(dataclasses.replace(full, vocab_size=vocab_size))
    model = same_size(task, choices[name], width, vocab_size, size)
    return dataclasses.replace(
        base,
        name=f"{task}-{name}",
        model=dataclasses.replace(model, vocab_size=base.model.vocab_size),
        optimizer=AdamW(beta2=0.98, weight_decay=0.1),
        schedule=ScheduleConfig(
            "cosine", learning_rate=learning_rate, warmup_steps=steps // 10, min_lr_ratio=0.05
        ),
        steps=steps,
        seed=seed,
        evaluation=EvaluationConfig(every=0, batch_size=32),
        sample=SampleConfig(),
        checkpoint=CheckpointConfig(every=200, keep_last=1),
    )


class Cost(NamedTuple):
    """Cost of a training step."""

    tokens_per_second: float  # median of the turns
    ratio: float  # relative to `full`, median over turns
    memory: int  # bytes besides arguments and results


def measure_costs(experiments: Mapping[str, Experiment], rounds: int) -> dict[str, Cost]:
    """Time training steps of all experiments in turns, so that all share the machine's noise."""
    programs: dict[str, Any] = {}
    for name, each in experiments.items():
        task = make_task(each)
        corpus = task.prepare_corpus()
        task = task.resolve(corpus)
        engine = make_engine(with_task(each, task), local_hardware())
        batches = task.training_batches(corpus, training_options(each))
        batch, state = engine.put_batch(batches.host_batch(0, 0, 1)), engine.init()
        step = engine.lower_step(state, batch).compile()
        programs[name] = [step, state, batch, engine.frozen]
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(rounds + 1):
        for name, program in programs.items():
            step, state, batch, frozen = program
            start = time.perf_counter()
            for _ in range(3):
                state, _ = step(state, batch, frozen)
            jax.block_until_ready(state)
            program[1] = state
            if turn:  # The first one warms up.
                seconds[name].append((time.perf_counter() - start) / 3)
    costs = {}
    for name, times in seconds.items():
        each = experiments[name]
        tokens = each.batch_size * each.sequence_length
        ratios = np.array(seconds["full"]) / np.array(times)
        memory = programs[name][0].memory_analysis().temp_size_in_bytes
        costs[name] = Cost(tokens / float(np.median(times)), float(np.median(ratios)), int(memory))
    return costs


def score(result: RunResult, task: str) -> float:
    """Return the held-out loss in nats per token, or the accuracy in percent."""
    return result.metrics["loss"] if task == "language" else 100 * result.metrics["accuracy"]


def draw(scores: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draw a panel of losses and one of accuracies, a row per mixer: the mean and every seed."""
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(TASKS), sharey=True)
    names = sorted(scores, key=lambda name: -float(np.mean(scores[name]["language"])))
    labels = ("language: held-out loss (nats per token)", "recall: accuracy (%)")
    for axes, task, label in zip(panels, TASKS, labels, strict=True):
        for row, name in enumerate(names):
            values = scores[name][task]
            axes.plot(values, [row] * len(values), "o", color="C0", ms=3, alpha=0.5)
            axes.plot(np.mean(values), row, "|", color="black", ms=11)
        axes.set(xlabel=label, yticks=range(len(names)), yticklabels=names)
        axes.grid(visible=True, alpha=0.3)
    panels[1].axvline(100 / RECALL.pairs, color="grey", lw=0.8, ls="--")
    panels[1].annotate(
        "guess", (100 / RECALL.pairs, len(names) - 1), xytext=(3, 4), textcoords="offset points"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(
    language_steps: int = 200,
    recall_steps: int = 600,
    seeds: int = 3,
    names: tuple[str, ...] = tuple(mixers(RECALL_LENGTH, RECALL_WIDTH)),
    rounds: int = 7,
    workdir: Path = Path("runs/family"),
    output: Path = RESULTS,
    processes: int = 1,
    minutes: float = 0,
) -> None:
    """Train what is missing, and write family.md, family.json and family.png."""
    steps = dict(zip(TASKS, (language_steps, recall_steps), strict=True))
    runs: dict[tuple[str, str, int], SweepRun] = {}
    for seed in range(seeds):
        for name in names:
            for task in TASKS:
                settings = {"task": task, "mixer": name}
                made = experiment(task, name, steps[task], seed)
                runs[task, name, seed] = single_run(run_name(settings, seed), settings, made)
    records = open_records("family", output)
    results = train_all([*runs.values()], workdir, records, processes=processes, minutes=minutes)
    scores = {
        name: {
            task: [score(results[runs[task, name, seed].name], task) for seed in range(seeds)]
            for task in TASKS
        }
        for name in names
    }
    # Costs are measured on the language task, which has the longer sequences.
    timed = {name: runs["language", name, 0].experiment for name in names}
    costs = measure_costs(timed, rounds) if rounds and "full" in names else {}
    rows = []
    for name in names:
        cells = [name]
        for task, digits in zip(TASKS, (3, 1), strict=True):
            values = np.array(scores[name][task])
            spread = f" ± {values.std(ddof=1):.{digits}f}" if seeds > 1 else ""
            cells.append(f"{values.mean():.{digits}f}{spread}")
        if name in costs:
            speed, ratio, memory = costs[name]
            cells += [f"{speed:,.0f}", f"{ratio:.2f}", f"{memory / 2**20:,.0f}"]
        rows.append(cells)
    header = ["mixer", "language: loss (nats)", "recall: accuracy (%)"]
    if costs:
        header += ["tokens/s", "× `full`", "MiB of a step"]
    draw(scores, output / "family.png")
    window = runs["language", names[0], 0].experiment.sequence_length
    scale = (
        f"Two layers. Language: width {LANGUAGE_WIDTH}, {language_steps} steps on windows of "
        f"{window} tokens. Recall: width {RECALL_WIDTH}, {recall_steps} steps of "
        f"{RECALL_BATCH} sequences of "
        f"{RECALL_LENGTH} tokens with {RECALL.pairs} pairs, where a guess among the values of a "
        f"sequence is right in {100 / RECALL.pairs:.1f}%. {seeds} seeds: mean and standard "
        "deviation. Equal parameters within 2%, one learning rate for all mixers of a task. The "
        "findings hold at this scale only."
    )
    body = f"{scale}\n\n{markdown_table(header, rows)}"
    data = {"scores": scores, "costs": {name: cost._asdict() for name, cost in costs.items()}}
    write_record(
        "family",
        "The family of mixers compared",
        body,
        data,
        results,
        trained_on=records.describe_machines([*runs.values()]),
        folder=output,
    )


if __name__ == "__main__":
    run_study(main)
