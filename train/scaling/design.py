"""Design of a scaling sweep: one experiment for each model size and number of training tokens.

The rules, from a config with width D0, depth L0, batch B0, learning rate lr0, and W0 of S0 steps of
warm-up:

- Heads keep their width: their number, and F where it is set, are proportional to D.
- Depth is proportional to width, so that D / L stays D0 / L0 (`aspect_ratio` replaces it).
- Batches keep B0 rows, halved as often as a run would have fewer than `min_steps` steps.
- The warm-up keeps its share W0 / S0 of the steps. Every run decays its learning rate to its own
  last step: a longer run's loss halfway is not that of a shorter run (Hoffmann et al. 2022).
- Learning rate: see `LearningRateRule`.

N counts all parameters but the tables of tokens and positions and the output matrix (Kaplan et al.
2020, section 2.1).
"""

import dataclasses
import decimal
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from train.errors import UsageError
from train.experiment import Experiment
from train.optim.elementwise import Adam, AdamW
from train.optim.muon import Muon
from train.optim.schedules import ScheduleConfig
from train.scaling.laws import FLOPS_PER_PARAMETER_AND_TOKEN
from train.sweep.grid import SweepRun, check_names
from transformer.layers.feedforward import FeedForwardConfig
from transformer.layers.moe import MoEConfig
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.models.language_model import LanguageModel
from transformer.parameter_counts import count_parameters

LearningRateRule = Literal["auto", "mup", "inverse_sqrt_width", "constant"]
"""Learning rate at width D, from lr0 at width D0.

`mup` (Yang et al. 2022, table 8; adam and adamw): hidden matrices have lr0 D0 / D and start with
a standard deviation of 1 / sqrt(fan-in), logits are multiplied by D0 / D, and all other weights
have lr0. `inverse_sqrt_width`: lr0 sqrt(D0 / D). `constant`: lr0. `auto`: `mup` for adam and adamw,
`constant` for muon, whose updates have the same size at every width, `inverse_sqrt_width` for
others.
"""


@dataclasses.dataclass(frozen=True)
class SizeRules:
    """Rules that turn a size and a number of tokens into an experiment."""

    lr_rule: LearningRateRule = "auto"
    aspect_ratio: float = 0.0
    """D / L; 0: that of the config."""
    min_steps: int = 100
    """Steps below which a run has smaller batches."""


def with_learning_rate(
    base: Experiment, model: TransformerConfig, rule: LearningRateRule
) -> Experiment:
    """Return the experiment of a model, with the learning rate of a rule.

    Raises:
      UsageError: The rule does not suit the optimizer or the schedule.
    """
    optimizer, schedule = base.optimizer, base.schedule
    if not isinstance(schedule, ScheduleConfig) or not schedule.learning_rate:
        raise UsageError(
            "scaling: the rules change schedule.learning_rate, and the schedule of "
            f"{base.name} has none; give --schedule.learning-rate"
        )
    ratio, rule = base.model.d_model / model.d_model, resolve_rule(rule, base)
    if rule == "mup":
        if not isinstance(optimizer, Adam | AdamW):
            raise UsageError(
                f"--lr-rule mup: is for adam and adamw, not for {optimizer.kind}; give "
                "--optimizer.kind adamw, or another rule"
            )
        factor = optimizer.matrix_lr_factor * ratio
        optimizer = dataclasses.replace(optimizer, matrix_lr_factor=factor)
        initialization = dataclasses.replace(model.initialization, std=0.0)  # by fan-in
        model = dataclasses.replace(
            model, logit_scale=model.logit_scale * ratio, initialization=initialization
        )
    elif rule == "inverse_sqrt_width":
        rate = schedule.learning_rate * math.sqrt(ratio)
        schedule = dataclasses.replace(schedule, learning_rate=rate)
    return dataclasses.replace(base, model=model, optimizer=optimizer, schedule=schedule)


def resolve_rule(rule: LearningRateRule, base: Experiment) -> LearningRateRule:
    """Return what the rule `auto` is for the optimizer of an experiment."""
    if rule != "auto":
        return rule
    if isinstance(base.optimizer, Adam | AdamW):
        return "mup"
    return "constant" if isinstance(base.optimizer, Muon) else "inverse_sqrt_width"


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
    sized: dict[tuple[int, int, int], SizedRun] = {}
    for model in models:
        parameters = count_without_embeddings(model)
        # The output matrix costs time too, though N does not count it.
        rows = model.vocab_size or getattr(base.data.tokenizer, "vocab_size", 0)
        counts = {*tokens, *(c / FLOPS_PER_PARAMETER_AND_TOKEN / parameters for c in budgets)}
        for count, offset in itertools.product(sorted(counts), range(seeds)):
            experiment = with_model_and_tokens(base, model, count, rules)
            experiment = dataclasses.replace(experiment, seed=base.seed + offset)
            trained_tokens = experiment.steps * tokens_per_step(experiment)
            key = parameters, trained_tokens, experiment.seed
            if key in sized:
                continue  # the counts differ by less than a step
            settings = {"N": format_count(parameters), "D": format_count(trained_tokens)}
            others = [x.run.settings for x in sized.values() if x.run.experiment.seed == key[2]]
            if settings in others:  # three digits do not tell them apart
                settings = {"N": str(parameters), "D": str(trained_tokens)}
            name = ",".join(f"{name}={value}" for name, value in settings.items())
            cost = float((parameters + rows * model.d_model) * trained_tokens)
            run = SweepRun(f"{name},seed={experiment.seed}", settings, experiment, cost)
            sized[key] = SizedRun(run, parameters, trained_tokens)
    check_names([each.run for each in sized.values()])
    return sorted(sized.values(), key=lambda each: (each.run.experiment.seed, each.flops))


# ---- Models ----


def model_of_width(base: TransformerConfig, width: int, rules: SizeRules) -> TransformerConfig:
    """Return the model of a width D, with the depth and the heads of the rules.

    Raises:
      UsageError: The width is not a multiple of the width of the heads.
    """
    unit = width_unit(base)
    if width < unit or width % unit:
        raise UsageError(
            f"--widths {width}: is not a multiple of {unit}, so that heads cannot keep their width"
            f"; give {max(unit, round(width / unit) * unit)}"
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
    raise UsageError(
        f"--sizes {parameters:g}: the largest width reaches fewer parameters; give smaller sizes"
    )


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
        expert, shared = feed_forward.expert, feed_forward.shared_expert
        feed_forward = dataclasses.replace(
            feed_forward,
            expert=_scale_feed_forward(expert, old, new),
            shared_expert=None if shared is None else _scale_feed_forward(shared, old, new),
        )
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
    # Evaluations and samples during training have no place in the fits, nor has what depends on
    # evaluations. Checkpoints do: a sweep is stopped and resumed.
    experiment = dataclasses.replace(
        base,
        steps=steps,
        batch_size=batch_size,
        # As many microbatches as divide the batch: the gradient is the same.
        grad_accum_steps=math.gcd(base.grad_accum_steps, batch_size),
        evaluation=dataclasses.replace(base.evaluation, every=0, compression_baselines=False),
        sample=dataclasses.replace(base.sample, every=0),
        checkpoint=dataclasses.replace(base.checkpoint, keep_best=False),
        early_stopping=dataclasses.replace(base.early_stopping, patience=0),
    )
    experiment = with_learning_rate(experiment, model, rules.lr_rule)
    schedule: Any = experiment.schedule
    warmup = round(schedule.warmup_steps / base.steps * steps)
    warmup = max(1, warmup) if schedule.warmup_steps else 0
    schedule = dataclasses.replace(schedule, warmup_steps=warmup)
    return dataclasses.replace(experiment, schedule=schedule)


def tokens_per_step(experiment: Experiment) -> int:
    """Return the tokens of a batch."""
    return experiment.batch_size * experiment.sequence_length


_SUFFIXES = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}


def parse_counts(text: str, flag: str) -> list[float]:
    """Return the numbers of a list such as `100k,1.5M,2e7`, in order and without duplicates.

    Raises:
      UsageError: An entry is not a positive number.
    """
    return list(dict.fromkeys(_parse_count(entry.strip(), flag) for entry in text.split(",")))


def _parse_count(entry: str, flag: str) -> float:
    scale = _SUFFIXES.get(entry[-1:], 1)
    try:
        # In decimals: as floats, 1.1 * 1e6 is not 1100000.
        value = float(decimal.Decimal(entry[:-1] if scale > 1 else entry) * scale)
    except decimal.InvalidOperation:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"{flag} {entry}: is not a positive number; give one such as 500k or 2e6")
    return value


def format_count(value: float) -> str:
    """Return a count with three significant digits and a suffix: 1.23M."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 0.9995 * scale:
            return f"{float(f'{value / scale:.3g}'):g}{suffix}"
    return f"{value:.3g}"
