"""Design of a scaling sweep: one experiment for each model size and number of training tokens.

The rules, from a config with width D0, depth L0, batch B0, learning rate lr0, and W0 of S0 steps of
warm-up:

- Heads keep their width: their number, and F where it is set, are proportional to D.
- Depth is proportional to width, so that D / L stays D0 / L0 (`aspect_ratio` replaces it).
- Batches keep B0 rows, halved as often as a run would have fewer than `min_steps` steps.
- The warm-up keeps its share W0 / S0 of the steps. Every run decays its learning rate to its own
  last step: a longer run's loss halfway is not that of a shorter run (Hoffmann et al. 2022).
- Learning rate: see `train.scaling.rules`.

N counts all parameters but the tables of tokens and positions and the output matrix (Kaplan et al.
2020, section 2.1).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from train.errors import UsageError
from train.experiment import Experiment
from train.scaling.laws import FLOPS_PER_PARAMETER_AND_TOKEN
from train.scaling.numbers import format_count
from train.scaling.rules import SizeRules, with_learning_rate
from train.sweep.grid import SweepRun, check_names
from transformer.config import BlockConfig, TransformerConfig
from transformer.layers.config import FeedForwardConfig, MoEConfig

NOT_COUNTED = ("embedding", "positions", "output")
"""Parts of a model that N does not count."""


class SizedRun(NamedTuple):
    """A run of a scaling sweep, with the numbers that the laws are fitted to."""

    run: SweepRun
    parameters: int  # N, without embeddings
    tokens: int  # D

    @property
    def flops(self) -> float:
        """Training FLOPs, C = 6 N D."""
        return float(FLOPS_PER_PARAMETER_AND_TOKEN * self.parameters * self.tokens)


def design_runs(
    base: Experiment,
    models: Sequence[TransformerConfig],
    *,
    tokens: Sequence[float] = (),
    budgets: Sequence[float] = (),
    seeds: int = 1,
    rules: SizeRules,
) -> list[SizedRun]:
    """Return the runs of a sweep, in the order of their compute.

    Args:
      base: Experiment that the others are derived from.
      models: Models, from `model_of_width` or `model_of_size`.
      tokens: Training tokens of a run of every model.
      budgets: Training FLOPs of further runs of every model, with C / 6 N tokens each (isoFLOP).
      seeds: Runs of each, with different seeds.
      rules: Learning rate and batch.

    Raises:
      UsageError: The experiment is of another task, or a rule does not suit its optimizer.
    """
    if not base.data.is_text or type(base.task).__name__ != "LanguageModeling":
        raise UsageError(
            f"scaling: learns from running text, and the task of {base.name} is "
            f"{type(base.task).__name__}; give a config of a language model"
        )
    sized = []
    for model in models:
        parameters = count_without_embeddings(model)
        counts = {*tokens, *(c / FLOPS_PER_PARAMETER_AND_TOKEN / parameters for c in budgets)}
        for count in sorted(counts):
            for offset in range(seeds):
                experiment = with_model_and_tokens(base, model, count, rules)
                seed = base.seed + offset
                experiment = dataclasses.replace(experiment, seed=seed)
                seen = experiment.steps * tokens_per_step(experiment)
                settings = {"N": format_count(parameters), "D": format_count(seen)}
                name = ",".join(f"{key}={value}" for key, value in settings.items())
                # The output matrix costs time too, though N does not count it.
                rows = model.vocab_size or getattr(base.data.tokenizer, "vocab_size", 0)
                cost = float((parameters + rows * model.d_model) * seen)
                run = SweepRun(f"{name},seed={seed}", settings, experiment, cost)
                sized.append(SizedRun(run, parameters, seen))
    check_names([each.run for each in sized])
    return sorted(sized, key=lambda each: (each.run.experiment.seed, each.flops))


# ---- Models ----


def model_of_width(base: TransformerConfig, width: int, rules: SizeRules) -> TransformerConfig:
    """Return the model of a width D, with the depth and the heads of the rules.

    Raises:
      UsageError: The width is no multiple of the width of the heads.
    """
    unit = width_unit(base)
    if width < unit or width % unit:
        raise UsageError(
            f"--widths {width}: is no multiple of {unit}, so that heads cannot keep their width; "
            f"give {max(unit, round(width / unit) * unit)}"
        )
    pattern = len(base.layer_pattern)
    aspect_ratio = rules.aspect_ratio or base.d_model / base.num_layers
    depth = max(1, round(width / aspect_ratio / pattern)) * pattern
    blocks = tuple(_scale_block(block, base.d_model, width) for block in base.layer_pattern)
    return dataclasses.replace(base, d_model=width, num_layers=depth, layer_pattern=blocks)


def model_of_size(
    base: TransformerConfig, parameters: float, rules: SizeRules
) -> TransformerConfig:
    """Return the model whose N is closest to a number, by ratio.

    Widths are multiples of `width_unit`, so that small models may be far from it.
    """
    unit = width_unit(base)
    smaller: TransformerConfig | None = None
    for width in _widths(unit, base, parameters):
        model = model_of_width(base, width, rules)
        size = count_without_embeddings(model)
        if size < parameters:
            smaller = model
            continue
        if smaller is None:
            return model
        below = parameters / count_without_embeddings(smaller)
        return model if size / parameters <= below else smaller
    raise UsageError(f"--sizes {parameters:g}: no model is so large")


def _widths(unit: int, base: TransformerConfig, parameters: float) -> Iterator[int]:
    """Yield multiples of the unit from just below a size on, by the estimate N ~ L D^2 ~ D^3."""
    estimate = base.d_model * (parameters / count_without_embeddings(base)) ** (1 / 3)
    first = max(1, int(0.7 * estimate / unit))
    yield from (unit * count for count in range(first, 4 * first + 100))


def width_unit(model: TransformerConfig) -> int:
    """Return the smallest step of D: what all attention layers need to scale their heads.

    One query head for each of N / gcd(N, K), so that N / K and the width of a head stay.
    """
    units = [1]
    for block in model.layer_pattern:
        heads = getattr(block.mixer, "num_heads", None)
        if heads:
            kv_heads = getattr(block.mixer, "num_kv_heads", 0) or heads
            groups = math.gcd(heads, kv_heads)
            units.append(model.d_model // groups if model.d_model % groups == 0 else model.d_model)
    return math.lcm(*units)


def _scale_block(block: BlockConfig, old: int, new: int) -> BlockConfig:
    """Return a block with numbers of heads, and F if it is set, in proportion to D."""
    mixer: Any = block.mixer
    counts = {name: getattr(mixer, name, 0) for name in ("num_heads", "num_kv_heads")}
    scaled = {name: count * new // old for name, count in counts.items() if count}
    feed_forward = block.feed_forward
    if isinstance(feed_forward, MoEConfig):
        expert = _scale_feed_forward(feed_forward.expert, old, new)
        feed_forward = dataclasses.replace(feed_forward, expert=expert)
    elif feed_forward is not None:
        feed_forward = _scale_feed_forward(feed_forward, old, new)
    mixer = dataclasses.replace(mixer, **scaled)
    return dataclasses.replace(block, mixer=mixer, feed_forward=feed_forward)


def _scale_feed_forward(config: FeedForwardConfig, old: int, new: int) -> FeedForwardConfig:
    if not config.d_ff:  # it follows from D
        return config
    return dataclasses.replace(config, d_ff=max(8, round(config.d_ff * new / old / 8) * 8))


def count_without_embeddings(model: TransformerConfig) -> int:
    """Return N, exactly: from the shapes of the parameters."""
    from transformer.models.language_model import LanguageModel
    from transformer.parameter_counts import count_parameters

    # The vocabulary changes only what is not counted; it may not be known yet.
    sized = dataclasses.replace(model, vocab_size=model.vocab_size or 128)
    counts = count_parameters(LanguageModel(sized))
    return counts.total - sum(counts.by_part.get(part, 0) for part in NOT_COUNTED)


# ---- Training ----


def with_model_and_tokens(
    base: Experiment, model: TransformerConfig, tokens: float, rules: SizeRules
) -> Experiment:
    """Return the experiment of a model and a number of training tokens, by the rules."""
    batch_size = base.batch_size
    while tokens / (batch_size * base.sequence_length) < rules.min_steps and batch_size % 2 == 0:
        batch_size //= 2
    steps = max(1, round(tokens / (batch_size * base.sequence_length)))
    experiment = dataclasses.replace(base, steps=steps, batch_size=batch_size)
    experiment = with_learning_rate(experiment, model, rules.lr_rule)
    schedule: Any = experiment.schedule
    warmup = round(schedule.warmup_steps / base.steps * steps)
    warmup = max(1, warmup) if schedule.warmup_steps else 0
    # Evaluations and samples during training have no place in the fits. Checkpoints do: a sweep is
    # stopped and resumed.
    return dataclasses.replace(
        experiment,
        schedule=dataclasses.replace(schedule, warmup_steps=warmup),
        evaluation=dataclasses.replace(base.evaluation, every=0, compression_baselines=False),
        sample=dataclasses.replace(base.sample, every=0),
    )


def tokens_per_step(experiment: Experiment) -> int:
    """Return the tokens of a batch."""
    return experiment.batch_size * experiment.sequence_length
