"""The experiment: one frozen dataclass that holds every setting of a training run.

Each part (model, data, optimizer, ...) is a frozen dataclass of its own, validated when it is
built. Flags (`--schedule.warmup-steps 200`) and `config.txt` use the same dotted field names.
"""

import dataclasses
import math
import re
from typing import Annotated, Literal

from train.data.data_config import DataConfig, TextDataConfig
from train.detector import RecoveryConfig
from train.engines.lora import LoRAConfig
from train.errors import UsageError, as_usage_errors
from train.optim.elementwise import AdamW
from train.optim.optimizer import Optimizer
from train.optim.schedules import LearningRateSchedule, ScheduleConfig
from train.parallel.mesh import MeshConfig
from train.settings import Settings
from train.state import EmaConfig, LossScaleConfig
from train.tasks.language_modeling import LanguageModeling
from train.tasks.task import TaskConfig
from train.telemetry.trackers import TrackingConfig
from transformer.generation.sampling import SamplingConfig
from transformer.models.config import TransformerConfig
from transformer.validation import (
    MAX_INTEGER,
    Bounds,
    Mark,
    NonNegativeInt,
    PositiveInt,
    Seed,
    check_nested_settings,
)


@dataclasses.dataclass(frozen=True)
class EvaluationConfig(Settings, part="evaluation"):
    """Held-out metrics during training and at its end."""

    every: Annotated[NonNegativeInt, Mark.COMMON] = 500
    """Steps between evaluations. 0: evaluate only at the end."""
    num_batches: NonNegativeInt = 20
    """Batches of each evaluation during training. 0: the whole split. The final evaluation always
    uses the whole split."""
    stride: NonNegativeInt = 0
    """Tokens that each window adds to the previous one. Values below the sequence length give every
    token more context and cost more. 0: the sequence length (no overlap)."""
    batch_size: NonNegativeInt = 0
    """Rows of an evaluation batch, rounded up to a multiple of the devices. 0: the training batch
    size. With data.batch_tokens, evaluation batches are limited by tokens too."""
    compression_baselines: bool = False
    """At the end, also report the bits per byte of gzip -9 and xz -9 on the held-out text."""
    average_checkpoints: PositiveInt = 1
    """Evaluate the mean of the weights of this many checkpoints at the end: the last one and those
    before it at multiples of checkpoint.every, which are kept on disk for it."""


@dataclasses.dataclass(frozen=True)
class SampleConfig(Settings, part="sample"):
    """Texts that the model generates during training, shown beside the metrics."""

    every: NonNegativeInt = 0
    """Steps between samples. 0: no samples."""
    prompt: str = ""
    """Text to continue, classify, tag or translate."""
    max_new_tokens: PositiveInt = 100
    """Upper limit of the length of a sample, in tokens."""
    temperature: Annotated[float, Bounds(0, math.inf)] = 0.8
    """Divisor of the logits. 0: greedy decoding."""
    top_k: NonNegativeInt = 0
    """Sample only from this many most likely tokens. 0: from all."""
    top_p: Annotated[float, Bounds(maximum=1, above=0)] = 1.0
    """Sample only from the most likely tokens that together have this probability."""

    def sampling_config(self) -> SamplingConfig:
        """Return the settings of the token sampler."""
        return SamplingConfig(self.temperature, self.top_k, self.top_p)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Settings, part="checkpoint"):
    """Checkpoints that a run writes and keeps."""

    every: Annotated[NonNegativeInt, Mark.COMMON] = 500
    """Steps between checkpoints. The last step always has one. 0: only the last step."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_every: NonNegativeInt = 0
    """Also keep checkpoints at multiples of this many steps. 0: none."""
    keep_best: bool = False
    """Also keep the checkpoint of the best evaluation, and evaluate and load the run from it."""
    verify: Literal["auto", "sizes", "full"] = "auto"
    """Check against the manifest before a checkpoint is restored. sizes: file sizes. full: sizes
    and SHA-256 digests. auto: full for checkpoints of at most 4 GiB, else sizes."""


@dataclasses.dataclass(frozen=True)
class EarlyStoppingConfig(Settings, part="early_stopping"):
    """End of training before the last step, when evaluations stop improving."""

    patience: NonNegativeInt = 0
    """Consecutive evaluations without improvement after which training stops. The run then keeps
    the weights of its best evaluation. 0: never stop early."""


@dataclasses.dataclass(frozen=True)
class Experiment(Settings):
    """A model, its data, and how it is trained."""

    name: Annotated[str, Mark.RESUMABLE] = "experiment"
    """Name of the run, and of its folder under runs/ unless --workdir is given."""
    task: TaskConfig = LanguageModeling()
    """Training objective, with its own evaluation metrics."""
    model: TransformerConfig = TransformerConfig()
    """Architecture, initialization and numerical precision."""
    data: DataConfig = TextDataConfig()
    """Training and evaluation data, and their tokenizer."""
    optimizer: Annotated[Optimizer, Mark.RESUMABLE, Mark.COMMON] = AdamW()
    """Update rule and its hyperparameters."""
    schedule: Annotated[LearningRateSchedule, Mark.RESUMABLE] = ScheduleConfig()
    """Learning rate as a function of the step."""
    steps: Annotated[int, Bounds(1, 10**9), Mark.RESUMABLE, Mark.COMMON] = 1000
    """Number of weight updates."""
    batch_size: Annotated[NonNegativeInt, Mark.COMMON] = 32
    """Examples (windows, texts, sentence pairs) in a batch, over all devices and microbatches. With
    data.batch_tokens (translation) it is an upper limit; 0: limited by data.batch_tokens only."""
    grad_accum_steps: Annotated[PositiveInt, Mark.RESUMABLE, Mark.COMMON] = 1
    """Microbatches of each batch, processed one after the other. More of them need less memory; the
    result is the same."""
    seed: Annotated[Seed, Mark.COMMON] = 0
    """Seed of the initial weights, of dropout, and of the order of the data."""
    log_every: Annotated[PositiveInt, Mark.RESUMABLE, Mark.COMMON] = 10
    """Steps between lines of metrics.jsonl."""
    mesh: Annotated[MeshConfig, Mark.RESUMABLE] = MeshConfig()
    """Arrangement of the devices."""
    compile: Annotated[Literal["jit", "pmap"], Mark.RESUMABLE] = "jit"
    """Compilation of the step. jit: over the whole mesh. pmap: one replica of the model on each
    device (data parallelism only)."""
    evaluation: Annotated[EvaluationConfig, Mark.RESUMABLE] = EvaluationConfig()
    """Held-out metrics."""
    sample: Annotated[SampleConfig, Mark.RESUMABLE] = SampleConfig()
    """Texts generated during training."""
    checkpoint: Annotated[CheckpointConfig, Mark.RESUMABLE] = CheckpointConfig()
    """Checkpoints written and kept."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Dynamic loss scaling for float16."""
    ema: EmaConfig = EmaConfig()
    """Exponential moving average of the weights."""
    lora: LoRAConfig = LoRAConfig()
    """Low-rank adaptation of the weights that the run starts with."""
    early_stopping: Annotated[EarlyStoppingConfig, Mark.RESUMABLE] = EarlyStoppingConfig()
    """End of training when evaluations stop improving."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Response to loss spikes and to non-finite updates."""
    tracking: Annotated[TrackingConfig, Mark.RESUMABLE] = TrackingConfig()
    """Experiment trackers, in addition to TensorBoard."""
    profile: Annotated[str, Mark.RESUMABLE] = ""
    """Steps to trace, as START:STOP, both included; written to `profile/` in the run's folder."""
    debug_checks: Annotated[bool, Mark.RESUMABLE] = False
    """Check the token ids of every batch and that weights, losses and gradients of every step are
    finite; stop at the first that is not, with its name. Slower: the host waits for each step."""

    @property
    def uses_best_checkpoint(self) -> bool:
        """Return True if the run is evaluated and loaded from its best checkpoint."""
        return self.checkpoint.keep_best or self.early_stopping.patience > 0

    @property
    def text_data(self) -> TextDataConfig:
        """Return the data configuration of a text task. Raise TypeError for any other task."""
        if not isinstance(self.data, TextDataConfig):
            raise TypeError(f"task {type(self.task).__name__}: has no running text")
        return self.data

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """Return the first and the last step to trace, or None.

        Raises:
          UsageError: `profile` is not a range of the run's steps.
        """
        if not self.profile:
            return None
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.profile, re.ASCII)
        first, last = map(int, match.groups()) if match else (0, 0)
        if not 1 <= first <= last <= self.steps:
            raise UsageError(
                f"profile {self.profile}: is not a range of the run's steps; give START:STOP from "
                f"1 to steps {self.steps}, such as 10:12"
            )
        return first, last

    @property
    def sequence_length(self) -> int:
        """Return the largest number of tokens in one sequence."""
        return self.data.longest_example

    @property
    def has_segments(self) -> bool:
        """Return True if rows hold several documents or padding, so that attention needs a mask."""
        return self.data.has_segments

    @property
    def batch_tokens(self) -> int:
        """Return the most tokens of a batch with padding. 0: batches have `batch_size` rows."""
        return self.data.batch_tokens

    @property
    def row_multiple(self) -> tuple[str, int]:
        """Return the field that the row count of every batch is a multiple of, and its value."""
        if self.batch_tokens:
            return "data.batch_size_multiple", self.data.batch_size_multiple
        return "batch_size", self.batch_size

    def __post_init__(self) -> None:
        with as_usage_errors():
            check_nested_settings(self, "")
        self._check_batch()
        _ = self.profiled_steps  # parsed here for its errors
        self._check_task()
        self._check_lengths()
        self._check_model_selection()
        field, rows = self.row_multiple
        if rows % self.grad_accum_steps:
            raise UsageError(
                f"grad_accum_steps {self.grad_accum_steps}: does not divide {field} {rows}; "
                "give a divisor of it"
            )
        if self.compile == "pmap" and self.mesh != MeshConfig(data=self.mesh.data):
            raise UsageError(
                "compile pmap: replicates the whole model on each device and supports no mesh axis "
                "but mesh.data; use --compile jit"
            )

    def _check_batch(self) -> None:
        """Check that batches have rows or tokens, and that the two limits agree."""
        if not self.batch_tokens:
            if self.batch_size == 0:
                raise UsageError("batch_size 0: give 1 or more, or (translation) data.batch_tokens")
            return
        if self.batch_tokens < self.sequence_length:
            raise UsageError(
                f"data.batch_tokens {self.batch_tokens}: is less than one sentence of "
                f"data.max_length {self.sequence_length} tokens; give more"
            )
        field, multiple = self.row_multiple
        if self.batch_size % multiple:
            raise UsageError(
                f"batch_size {self.batch_size}: is not a multiple of {field} {multiple}; give a "
                "multiple of it, or 0 to limit batches by data.batch_tokens alone"
            )

    def _check_task(self) -> None:
        """Check that the data and the model suit the task."""
        task, accepted = type(self.task).__name__, self.task.data_configs
        if not isinstance(self.data, accepted):
            names = " or ".join(each.__name__ for each in accepted)
            raise UsageError(
                f"task {task}: needs data of class {names}, not {type(self.data).__name__}; set "
                "data to one"
            )
        self.task.check(self.model)
        for name in ("stride", "compression_baselines"):
            if getattr(self.evaluation, name) and not self.data.is_text:
                raise UsageError(f"evaluation.{name}: works for running text only; leave it out")
        if self.evaluation.compression_baselines and not self.task.reports_bits_per_byte:
            raise UsageError(
                f"evaluation.compression_baselines: task {task} has no bits per byte; leave it out"
            )

    def _check_lengths(self) -> None:
        """Check that the model and the backend can take batches of this size."""
        field = self.data.length_field
        longest = self.model.max_length
        if longest is not None and self.sequence_length > longest:
            raise UsageError(
                f"data.{field} {self.sequence_length}: the model's table of positions has "
                f"{longest} rows; give at most that, or a longer "
                "model.position_embedding.max_length"
            )
        if self.evaluation.stride > self.sequence_length:
            raise UsageError(
                f"evaluation.stride {self.evaluation.stride}: is beyond data.{field} "
                f"{self.sequence_length}; give at most that, or 0"
            )
        rows = max(self.batch_size, self.evaluation.batch_size)
        tokens = self.batch_tokens or rows * self.sequence_length
        if tokens > MAX_INTEGER:  # XLA indexes the tokens of a batch with int32.
            raise UsageError(
                f"batch_size {rows}: makes {tokens} tokens with data.{field} "
                f"{self.sequence_length}, and a batch holds at most {MAX_INTEGER}; lower one of "
                "them"
            )

    def _check_model_selection(self) -> None:
        """Check that the evaluations and checkpoints exist that choose the final weights."""
        if self.uses_best_checkpoint and not self.evaluation.every:
            stops = self.early_stopping.patience > 0
            field = "early_stopping.patience" if stops else "checkpoint.keep_best"
            raise UsageError(
                f"{field}: needs evaluations during training; set evaluation.every to 1 or more"
            )
        count = self.evaluation.average_checkpoints
        if count > 1 and not self.checkpoint.every:
            raise UsageError(
                f"evaluation.average_checkpoints {count}: there is only the last checkpoint to "
                "average; set checkpoint.every"
            )
