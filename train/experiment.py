"""An experiment: everything that decides a run, as one frozen value."""

import dataclasses
from typing import Any, Literal, cast

from train.data.config import DataConfig, TextDataConfig
from train.errors import UsageError
from train.optim.adam import AdamW
from train.optim.registry import OptimizerConfig
from train.optim.schedules import ScheduleConfig
from train.parallel.mesh import MeshConfig
from train.recovery.config import RecoveryConfig
from train.tasks.config import LanguageModeling, TaskConfig
from transformer.config import TransformerConfig
from transformer.generation.sampling import SamplingConfig
from transformer.validation import MAX_INTEGER, check_fraction, check_numbers
from transformer.validation import check_seed as check_jax_seed


def check_seed(seed: int) -> None:
    """Raise UsageError for a seed of which `jax.random.key` would cut off bits."""
    try:
        check_jax_seed(seed)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _check_numbers(experiment: Any) -> None:
    """Raise UsageError for any number of the settings that is too large, or not finite."""
    try:
        check_numbers(experiment)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _at_least(least: int, part: str, config: Any, *names: str) -> None:
    """Raises UsageError for the first of these settings that is less."""
    for name in names:
        if getattr(config, name) < least:
            setting = f"{part}.{name}" if part else name
            raise UsageError(f"{setting} {getattr(config, name)}: give {least} or more")


@dataclasses.dataclass(frozen=True)
class EvaluationConfig:
    """The held-out metrics, during training and at its end."""

    every: int = 500
    """Steps between evaluations; 0: only at the end."""
    num_batches: int = 20
    """Batches of each evaluation during training; 0: the whole split. The one at the end takes
    the whole split."""
    stride: int = 0
    """New tokens in each window: less than the sequence length gives every token more context,
    at more cost. 0: the sequence length."""
    batch_size: int = 0
    """As the experiment's own, or a few rows more so that a batch divides among devices; 0: that
    of training. Where training has data.batch_tokens, evaluation has them too."""
    compression_baselines: bool = False
    """Show at the end what gzip -9 and xz -9 make of the held-out text."""
    average_checkpoints: int = 1
    """What is evaluated at the end is the mean of the weights of so many checkpoints: the last, and
    those before it at multiples of checkpoint.every. They are kept for it."""

    def __post_init__(self) -> None:
        _at_least(0, "evaluation", self, "every", "num_batches", "stride", "batch_size")
        _at_least(1, "evaluation", self, "average_checkpoints")


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """Texts that the model writes on the way, to be looked at."""

    every: int = 0
    """Steps between samples; 0: none."""
    prompt: str = ""
    max_new_tokens: int = 100
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        _at_least(0, "sample", self, "every")
        _at_least(1, "sample", self, "max_new_tokens")
        try:
            self.sampling_config()
        except ValueError as error:
            raise UsageError(str(error).replace("sampling.", "sample.", 1)) from error

    def sampling_config(self) -> SamplingConfig:
        """How a word is chosen."""
        return SamplingConfig(self.temperature, self.top_k, self.top_p)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """What of the run is kept on disk."""

    every: int = 500
    """Steps between checkpoints; the last step always has one. 0: only the last."""
    keep_last: int = 2
    """How many of the newest are kept."""
    keep_every: int = 0
    """Checkpoints at multiples of this many steps are kept too; 0: none."""
    keep_best: bool = False
    """The checkpoint of the best evaluation is kept too, and is what the run is judged by."""
    verify: Literal["auto", "sizes", "full"] = "auto"
    """What is compared with the manifest before a checkpoint is restored: the sizes of its files;
    their digests too; or digests only where the files together have at most 4 GiB."""

    def __post_init__(self) -> None:
        _at_least(0, "checkpoint", self, "every", "keep_every")
        _at_least(1, "checkpoint", self, "keep_last")


@dataclasses.dataclass(frozen=True)
class EmaConfig:
    """An exponential moving average of the weights, to be judged by in their place."""

    decay: float = 0.0
    """Share of the average that a step leaves as it is, near 1; 0: none is kept."""

    def __post_init__(self) -> None:
        check_fraction("ema.decay", self.decay)


@dataclasses.dataclass(frozen=True)
class EarlyStoppingConfig:
    """An end before the last step, when evaluations get no better."""

    patience: int = 0
    """Evaluations in a row without a better one after which the run ends; it is judged by the best
    of them. 0: no such end."""

    def __post_init__(self) -> None:
        _at_least(0, "stopping", self, "patience")


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
    """Used when a precision policy computes in float16, and at no other time."""

    init_scale: float = 2.0**15
    growth_interval: int = 2000
    """Steps without overflow after which the scale doubles."""
    max_scale: float = 2.0**24

    def __post_init__(self) -> None:
        if not 1 <= self.init_scale <= self.max_scale:
            raise ValueError(
                f"loss_scale.init_scale {self.init_scale}: give a scale from 1 to "
                f"loss_scale.max_scale {self.max_scale}"
            )
        if self.growth_interval < 1:
            raise ValueError(
                f"loss_scale.growth_interval {self.growth_interval}: give 1 or more steps"
            )


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A model, its data, and how it is trained."""

    name: str = "experiment"
    """What the run is called, and its folder under runs/ unless --workdir says otherwise."""
    task: TaskConfig = LanguageModeling()
    """What it learns."""
    model: TransformerConfig = TransformerConfig()
    data: DataConfig = TextDataConfig()
    optimizer: OptimizerConfig = AdamW()
    schedule: ScheduleConfig = ScheduleConfig()
    steps: int = 1000
    """Updates of the weights."""
    batch_size: int = 32
    """Examples (windows, texts, pairs of sentences) in a batch, over all devices and microbatches.
    Beside data.batch_tokens, which translation has, it is the most that there may be; 0: as many as
    that allows."""
    grad_accum_steps: int = 1
    """Microbatches that a batch is cut into, one after the other: less memory, the same result."""
    seed: int = 0
    """Of the first weights, of dropout, and of the order of the data."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    mesh: MeshConfig = MeshConfig()
    compile: Literal["jit", "pmap"] = "jit"
    """jit: over the mesh. pmap: one copy of the model on each device."""
    evaluation: EvaluationConfig = EvaluationConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    loss_scale: LossScaleConfig = LossScaleConfig()
    ema: EmaConfig = EmaConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    recovery: RecoveryConfig = RecoveryConfig()

    @property
    def uses_best_checkpoint(self) -> bool:
        """Whether the best checkpoint is kept, and the run judged by it."""
        return self.checkpoint.keep_best or self.early_stopping.patience > 0

    @property
    def text_data(self) -> TextDataConfig:
        """The data of a task that learns from text; of other tasks, a TypeError."""
        if not isinstance(self.data, TextDataConfig):
            raise TypeError(f"task {type(self.task).__name__}: has no running text")
        return self.data

    @property
    def sequence_length(self) -> int:
        """Maximum number of tokens of a sequence that the model reads."""
        return self.data.longest_example

    @property
    def has_segments(self) -> bool:
        """True if rows hold several documents or padding, which attention must separate."""
        return self.data.has_segments

    @property
    def batch_tokens(self) -> int:
        """Maximum number of tokens of a batch, padding included; 0: batches have `batch_size`."""
        return self.data.batch_tokens

    @property
    def row_multiple(self) -> tuple[str, int]:
        """Number that the rows of every batch are a multiple of: (name of the field, value)."""
        if self.batch_tokens:
            return "data.batch_size_multiple", self.data.batch_size_multiple
        return "batch_size", self.batch_size

    def __post_init__(self) -> None:
        _at_least(1, "", self, "steps", "grad_accum_steps", "log_every")
        self._check_batch()
        check_seed(self.seed)
        _check_numbers(self)
        self._check_task()
        self._check_lengths()
        self._check_judging()
        setting, rows = self.row_multiple
        if rows % self.grad_accum_steps:
            raise UsageError(
                f"grad_accum_steps {self.grad_accum_steps}: does not divide {setting} {rows}; "
                "give a divisor of it"
            )
        if self.compile == "pmap" and self.mesh != MeshConfig(data=self.mesh.data):
            raise UsageError(
                "compile pmap: copies the whole model to each device, and knows no axis of the "
                "mesh but mesh.data; use --compile jit"
            )

    def _check_batch(self) -> None:
        """That there is a number of examples, or of tokens, and that the two agree."""
        if not self.batch_tokens:
            fields = [field.name for field in dataclasses.fields(cast("Any", self.data))]
            if self.batch_size == 0 and "batch_tokens" in fields:
                raise UsageError("batch_size 0: give 1 or more, or set data.batch_tokens")
            _at_least(1, "", self, "batch_size")
            return
        _at_least(0, "", self, "batch_size")
        if self.batch_tokens < self.sequence_length:
            raise UsageError(
                f"data.batch_tokens {self.batch_tokens}: has no room for a sentence of "
                f"data.max_length {self.sequence_length} tokens; give more"
            )
        setting, multiple = self.row_multiple
        if self.batch_size % multiple:
            raise UsageError(
                f"batch_size {self.batch_size}: is no multiple of {setting} {multiple}, as the "
                "rows of every batch are; give a multiple of it, or 0 for no limit beside "
                "data.batch_tokens"
            )

    def _check_task(self) -> None:
        """That data and model are such as the task needs."""
        task, accepted = type(self.task).__name__, self.task.data_configs
        if type(self.data) not in accepted:
            known = " or a ".join(each.__name__ for each in accepted)
            raise UsageError(
                f"task {task}: learns from a {known}, not a {type(self.data).__name__}; "
                "set data to one"
            )
        self.task.check(self)
        for setting in ("stride", "compression_baselines"):
            if getattr(self.evaluation, setting) and not self.data.is_text:
                raise UsageError(f"evaluation.{setting}: is for text alone; leave it out")
        if self.evaluation.compression_baselines and not self.task.reports_bits_per_byte:
            raise UsageError(
                f"evaluation.compression_baselines: task {task} has no bits per byte; leave it"
            )

    def _check_lengths(self) -> None:
        """That the model can take sequences as long as those of the data."""
        setting = self.data.length_field
        longest = self.model.max_length
        if longest is not None and self.sequence_length > longest:
            raise UsageError(
                f"data.{setting} {self.sequence_length}: the model's table of positions "
                f"has {longest} rows; give at most that, or a longer model.position.sequence_length"
            )
        if self.evaluation.stride > self.sequence_length:
            raise UsageError(
                f"evaluation.stride {self.evaluation.stride}: is beyond data.{setting} "
                f"{self.sequence_length}; give at most that, or 0"
            )

        rows = max(self.batch_size, self.evaluation.batch_size)
        tokens = self.batch_tokens or rows * self.sequence_length
        if tokens > MAX_INTEGER:  # their indices have 32 bits
            raise UsageError(
                f"batch_size {rows}: makes {tokens} tokens with data.{setting} "
                f"{self.sequence_length}, and a batch has at most {MAX_INTEGER}; lower one of them"
            )

    def _check_judging(self) -> None:
        """That there is what the run is to be judged by."""
        if self.uses_best_checkpoint and not self.evaluation.every:
            asked = (
                "early_stopping.patience"
                if self.early_stopping.patience
                else "checkpoint.keep_best"
            )
            raise UsageError(
                f"{asked}: there is no evaluation on the way to go by; set evaluation.every"
            )
        if self.evaluation.average_checkpoints > 1 and not self.checkpoint.every:
            raise UsageError(
                f"evaluation.average_checkpoints {self.evaluation.average_checkpoints}: there is "
                "no checkpoint but the last to average; set checkpoint.every"
            )
