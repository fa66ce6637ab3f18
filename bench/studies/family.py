"""Every causal mixer and the systems that transformers replaced, at equal parameters.

Two tasks:

- language: the quickstart's text in windows of 128 tokens, 2 layers of width 128; held-out loss.
- recall: `bench.studies.recall`, sequences of 128 tokens with 16 pairs, width 64; accuracy. The
  first layer is a convolution of three taps, which joins each value to the key before it, and the
  second the mixer, as Arora et al. 2023 compare them: two layers of attention alone stay at the
  level of guessing one value in 16 for more steps than this study has.

Attention has rotary positions; recurrences and convolutions know the order by construction. The
width of the feed-forward layers is fitted so that all have as many parameters as `full` within 2%.
Windows and numbers of keys are a quarter of the sequence. The learning rate is the same for all
mixers of a task: none is tuned to one of them. Their speed: `python -m bench attention_costs`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bench.claims.small_runs import small
from bench.results import over_seeds
from bench.studies.recall import AssociativeRecall
from bench.studies.record import Study, at_the_end, markdown_table, sweep_run
from train.data.arrays import ArrayDataConfig
from train.experiment import Experiment
from train.figures import BLACK, BLUE, GREY
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.scaling.design import count_without_embeddings
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
RECALL_LENGTH, RECALL_BATCH, RECALL_WIDTH, RECALL_STEPS = 128, 8, 64, 600
LANGUAGE_WIDTH = 128


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
    task: str, mixer: MixerConfig, full: MixerConfig, width: int, vocab_size: int
) -> TransformerConfig:
    """Return a model whose feed-forward width brings its size as close as possible to `full`'s.

    The count is linear in the width, so two models determine the width of the third.
    """

    def count(mixer: MixerConfig, feed_forward: int) -> int:
        config = model_with(task, mixer, width, feed_forward)
        return count_without_embeddings(dataclasses.replace(config, vocab_size=vocab_size))

    size, small_count = count(full, 4 * width), count(mixer, width)
    per_unit = (count(mixer, 2 * width) - small_count) / width
    found = model_with(task, mixer, width, max(1, width + round((size - small_count) / per_unit)))
    return dataclasses.replace(found, vocab_size=vocab_size)


def experiment(task: str, name: str, steps: int, seed: int) -> Experiment:
    """Return the run of a mixer on a task."""
    if task == "language":
        base, width, vocab_size, rate = small(steps), LANGUAGE_WIDTH, 4096, 2e-3
    else:
        width, vocab_size, rate = RECALL_WIDTH, RECALL.vocab_size, 3e-3
        data, empty = ArrayDataConfig(length=RECALL_LENGTH), TransformerConfig(vocab_size)
        base = Experiment("recall", RECALL, empty, data, batch_size=RECALL_BATCH)
    choices = mixers(base.sequence_length, width)
    model = same_size(task, choices[name], choices["full"], width, vocab_size)
    schedule = ScheduleConfig(
        "cosine", learning_rate=rate, warmup_steps=steps // 10, min_lr_ratio=0.05
    )
    made = dataclasses.replace(
        base,
        name=f"{task}-{name}",
        model=dataclasses.replace(model, vocab_size=base.model.vocab_size),
        optimizer=AdamW(beta2=0.98, weight_decay=0.1),
        schedule=schedule,
        steps=steps,
    )
    return at_the_end(made, seed, batch_size=32)


def draw(scores: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draw a panel of losses and one of accuracies, a row per mixer: the mean and every seed."""
    figure = Figure(figsize=(8, 5.5))
    panels = figure.subplots(1, len(TASKS), sharey=True)
    names = sorted(scores, key=lambda name: -float(np.mean(scores[name]["language"])))
    labels = ("language: held-out loss (nats per token)", "recall: accuracy (%)")
    for axes, task, label in zip(panels, TASKS, labels, strict=True):
        for row, name in enumerate(names):
            values = scores[name][task]
            axes.plot(values, [row] * len(values), "o", color=BLUE, alpha=0.6)
            axes.plot(np.mean(values), row, "|", color=BLACK, markersize=12)
        axes.set(xlabel=label, yticks=range(len(names)), yticklabels=names)
    guess = 100 / RECALL.pairs
    panels[1].axvline(guess, color=GREY, linewidth=1, linestyle="--")
    panels[1].annotate("guess", (guess, len(names) - 1), (4, 4), textcoords="offset points")
    return figure


def main(
    language_steps: int = 200,
    seeds: int = 3,
    names: tuple[str, ...] = tuple(mixers(RECALL_LENGTH, RECALL_WIDTH)),
    minutes: float = 0,
) -> None:
    """What do causal mixers and recurrent networks reach at equal parameters?"""
    study = Study("family", minutes)
    steps = dict(zip(TASKS, (language_steps, RECALL_STEPS), strict=True))
    runs = {
        (task, name, seed): sweep_run(
            {"task": task, "mixer": name}, experiment(task, name, steps[task], seed)
        )
        for seed in range(seeds)
        for name in names
        for task in TASKS
    }
    found = study.train([*runs.values()])

    def metrics(task: str, name: str, metric: str) -> list[float]:
        of_seeds = (runs[task, name, seed].name for seed in range(seeds))
        return [found[each].result.metrics[metric] for each in of_seeds]

    scores = {
        name: {
            "language": metrics("language", name, "loss"),
            "recall": [100 * each for each in metrics("recall", name, "accuracy")],
        }
        for name in names
    }
    rows = [
        [name, over_seeds(each["language"], 3), over_seeds(each["recall"], 1)]
        for name, each in scores.items()
    ]
    table = markdown_table(["mixer", "language: loss (nats)", "recall: accuracy (%)"], rows)
    study.write([table], draw(scores), {"scores": scores})
