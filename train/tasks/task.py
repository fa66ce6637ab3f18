"""Interface of a task: its data, model, loss, metrics and answers to prompts."""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import jax
import numpy as np

from train.data.arrays import ArrayDataConfig
from train.data.batches import TrainingBatches
from train.data.data_config import DataConfig
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError
from train.settings import Settings
from train.step import LossFn
from train.tasks.evaluation import (
    EvaluatedModel,
    EvaluationBatches,
    EvaluationOptions,
    mean_losses,
)
from train.tasks.vocabulary import Labels, resolve_vocab_size
from transformer.generation.sampling import ANCESTRAL_SAMPLING, SamplingConfig
from transformer.hardware import Hardware
from transformer.model_context import ActivationConstraint
from transformer.models.config import TransformerConfig
from transformer.models.heads import Pooling
from transformer.models.model import Model
from transformer.validation import check_seed

TextCallback = Callable[[str], None]
"""Function that receives text piece by piece, as it is generated."""


@dataclasses.dataclass(frozen=True)
class TaskConfig(Settings, part="task"):
    """Interface of a task's settings: a frozen dataclass, saved under its class name.

    Attributes:
      data_configs: The classes of `Experiment.data` that the task accepts, with those derived from
        them. By default the task reads or generates arrays itself.
      predicts_labels: The data decide the number of labels, unless `num_labels` gives it.
      reports_bits_per_byte: Evaluations report bits per byte, comparable with compressors.
    """

    data_configs: ClassVar[tuple[type[DataConfig], ...]] = (ArrayDataConfig,)
    predicts_labels: ClassVar[bool] = False
    reports_bits_per_byte: ClassVar[bool] = False

    @property
    def num_labels(self) -> int:
        """Number of labels of a task that predicts labels; 0 if there are none or it is open."""
        return 0

    def check(self, model: TransformerConfig) -> None:
        """Raise UsageError if the model's settings do not fit the task. By default all do."""


def check_no_encoder(task: TaskConfig, model: TransformerConfig) -> None:
    """Raise UsageError for an encoder beside the model of a task that has no source text."""
    if model.encoder is not None:
        raise UsageError(
            f"model.encoder: does not suit task {type(task).__name__}, which has no source text; "
            "set it to None"
        )


def check_causal_pooling(pooling: Pooling, model: TransformerConfig) -> None:
    """Raise UsageError for the first position of a causal model, which knows no other."""
    if model.causal and pooling == "first":
        raise UsageError(
            "task.pooling first: the first position of a causal model sees no other; set "
            "model.causal to False (--model.no-causal), or task.pooling to mean"
        )


class Corpus(Protocol):
    """Data of a task, as `Task.prepare_corpus` returns them. Tasks add what they need."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the texts; None for data without text."""
        ...

    @property
    def digest(self) -> str:
        """Digest of texts, splits, labels and tokens: equal for equal data."""
        ...

    @property
    def labels(self) -> Labels:
        """Names of the labels or tags by index; empty for a task without labels."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages for the user about changes to the data (truncated, removed), a sentence each."""
        ...


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Settings of a run that its training batches depend on."""

    batch_size: int
    """Rows of a batch, B, over all devices."""
    seed: int
    steps: int


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedModel:
    """What answers prompts: a model with its weights, and the vocabulary of its data. See `Run`."""

    model: Any
    """Module to apply: `model.apply({"params": params}, tokens)`."""
    params: Any
    """Weights of the model."""
    tokenizer: Tokenizer | None
    """Tokenizer of the data; None for data without text."""
    labels: Labels = ()
    """Names of the classes or tags, by number; empty for a task without labels."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """Metric that selects the best checkpoint and stops a run early."""

    name: str
    lower_is_better: bool

    def is_better(self, candidate: float, reference: float) -> bool:
        """Return True if `candidate` is better than `reference`. NaN is never better."""
        return candidate < reference if self.lower_is_better else candidate > reference


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """Options of `Task.sample`. Each task uses those in its `supported_options`."""

    max_new_tokens: int = 200
    sampling: SamplingConfig = ANCESTRAL_SAMPLING
    num_beams: int = 0
    """Hypotheses of beam search; 0: as the task's settings say."""
    seed: int = 0
    source_language: str = ""
    """Code of the language of a translation's source; empty: as the task's settings say."""
    target_language: str = ""
    """Code of the language to translate into, likewise."""
    on_text: TextCallback | None = None
    """Receives the answer to a single prompt in pieces, as it is generated. Joined, they are the
    answer."""

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.num_beams < 0:
            raise UsageError(
                f"beams {self.num_beams}: give 1 or more, or 0 for the run's own setting"
            )


GENERATION_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
"""`Task.supported_options` of the tasks that generate text token by token."""


class ModelInputs(NamedTuple):
    """Inputs of a model for one text, to look inside the model."""

    arguments: dict[str, np.ndarray]
    """Arguments of the model by name, for a batch of one: `tokens` [1, T], ..."""
    sources: tuple[int, ...] = ()
    """[S] tokens of an encoder's source; empty without one."""

    @property
    def tokens(self) -> tuple[int, ...]:  # [T]
        """Tokens that the model's own layers, or its decoder's, read."""
        return tuple(self.arguments["tokens"][0].tolist())


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A task: all that differs between runs that learn different things.

    A task is a value: its settings, and the settings of the model and the data, as requested or as
    `resolve` has completed them. Its methods work on functions and arrays. Subclasses are
    registered, with their settings, in `train.tasks.registry`. Those whose data are arrays derive
    from `ArrayTask` (`train.tasks.array_task`), which needs `make_model` and `make_loss_fn`,
    `read_arrays` unless the arrays are given from Python, and `predict` to answer prompts.

    The trainer calls:

    - when a run starts or resumes: `prepare_corpus` and `resolve`; of the resolved task
      `training_batches`, `make_model`, `make_loss_fn`, `describe_training_data`, `untrained_parts`;
    - when a split is evaluated: `evaluate`, which asks for `evaluation_batches`, and
      `selection_metric`;
    - when a prompt is answered: `check_prompt`, and `sample`, which asks for `predict`;
    - when sizes are estimated: `batch_shapes`, `target_fraction`.

    Attributes:
      continues_prompt: `sample` continues its prompt, and does not answer it.
      metric_notes: Strings to report beside the metrics, such as the signature of a BLEU score.
    """

    continues_prompt: ClassVar[bool] = False

    config: TaskConfig
    """Settings of the task, `Experiment.task`."""
    model_config: TransformerConfig
    """Settings of the model, `Experiment.model`."""
    data: DataConfig
    """Settings of the data, `Experiment.data`."""

    @property
    def supported_options(self) -> tuple[str, ...]:
        """Options of `sample` that have an effect, by the names of their command-line flags."""
        return ()

    @property
    def target_fraction(self) -> float | None:
        """Fraction of the tokens that have a prediction target; None: as the model declares it."""
        return None

    @property
    def needs_base_weights(self) -> bool:
        """True if the loss compares with the frozen weights of a LoRA run.

        A training step then runs that model too, without gradients.
        """
        return False

    @property
    def untrained_parts(self) -> tuple[str, ...]:
        """Notes on parts of the model that get no gradient, with the setting that removes each."""
        # Rows that no token reads get no gradient; only weight decay changes them.
        types = self.model_config.num_token_types
        if types < 2:
            return ()
        note = (
            f"model.num_token_types {types}: the task uses type 0 alone, and trains no other row "
            "of the table; 0 leaves it out"
        )
        return (note,)

    @property
    def metric_notes(self) -> dict[str, str]:
        """Strings to report beside the metrics, such as the signature of a BLEU score, by name."""
        return {}

    def selection_metric(self, corpus: Any) -> Metric:
        """Return the metric that compares the evaluations during training: the lowest loss."""
        return Metric("loss", lower_is_better=True)

    # ---- Data and model ----

    @abc.abstractmethod
    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Corpus:
        """Read, split and tokenize the data.

        Args:
          tokenizer: The tokenizer of an earlier run, used instead of the one of the settings.
          labels: The labels of an earlier run, in order.

        Raises:
          UserError: The data are missing, empty or damaged.
        """

    def resolve(self, corpus: Any) -> Self:
        """Return the task with the sizes that the corpus decides (vocabulary, labels).

        By default this is the size of the tokenizer's vocabulary.
        """
        if corpus.tokenizer is None:
            return self
        model_config = resolve_vocab_size(self.model_config, corpus.tokenizer)
        return dataclasses.replace(self, model_config=model_config)

    @abc.abstractmethod
    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Model:
        """Return the model of a resolved task."""

    @abc.abstractmethod
    def make_loss_fn(self, model: Any) -> LossFn:
        """Return the loss function (`train.step.LossFn`) of a model.

        It returns a sum with its weight for each name: the minimized `loss`, and metrics beside it.
        A batch has `examples` [B], `weights` of the targets, and what the task puts into it.
        """

    @abc.abstractmethod
    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of a batch's arrays, by name, to compile without data."""

    @abc.abstractmethod
    def training_batches(self, corpus: Any, options: TrainingOptions) -> TrainingBatches:
        """Return the batches to train on. Raises UserError if there are too few data."""

    def describe_training_data(self, corpus: Any) -> str:
        """Return the amount of training data as text: "12,345 tokens of text"."""
        return f"data {type(self.data).__name__}"

    # ---- Evaluation ----

    @abc.abstractmethod
    def evaluation_batches(
        self, corpus: Any, split: str, options: EvaluationOptions
    ) -> EvaluationBatches:
        """Return the batches of a split. Raises UserError if the data have no such split."""

    def evaluate(
        self, model: EvaluatedModel, corpus: Any, split: str, options: EvaluationOptions
    ) -> dict[str, float]:
        """Return the metrics of a split ("train", "validation" or "test") by name.

        By default the mean of every loss.

        Raises:
          UserError: The data have no such split.
        """
        return mean_losses(model, self.evaluation_batches(corpus, split, options))

    # ---- Answers ----

    def check_prompt(self, prompt: str, tokenizer: Any) -> None:
        """Raise UserError for a prompt that the model cannot answer, before training starts."""
        if tokenizer is not None:
            tokenizer.encode(prompt)

    def model_inputs(
        self, trained: TrainedModel, text: str, target: str | None = None
    ) -> ModelInputs:
        """Return what the model reads for a text: by default its tokens after a start token.

        Args:
          trained: The model and its tokenizer.
          text: Any text of the task.
          target: Text of the decoder, in translation alone; None: the model's own answer.

        Raises:
          UserError: The model cannot read the text.
        """
        check_no_target(target)
        tokenizer = tokenizer_of(trained)
        before, after = tokenizer.text_frame
        tokens = np.concatenate([before, tokenizer.encode(text), after])
        return token_inputs(trained, tokens)

    def predict(self, trained: TrainedModel, prompt: str) -> str:
        """Return the model's answer to one prompt.

        Raises:
          UserError: The model cannot answer the prompt. A ValueError becomes one.
        """
        raise UserError(
            f"task {type(self.config).__name__}: answers no prompts; define "
            "predict(trained, prompt) in its class"
        )

    def sample(
        self, trained: TrainedModel, prompts: Sequence[str], options: SampleOptions
    ) -> list[str]:
        """Return the model's answer to each prompt, by default from `predict`.

        Raises:
          UserError: The model cannot answer a prompt.
        """
        try:
            answers = [self.predict(trained, prompt) for prompt in prompts]
        except ValueError as error:
            raise UserError(f"prompt: {error}; give one that the task can read") from error
        if options.on_text is not None:
            options.on_text("".join(answers))
        return answers


def tokenizer_of(trained: TrainedModel) -> Tokenizer:
    """Return the tokenizer of a model whose data are text."""
    assert trained.tokenizer is not None
    return trained.tokenizer


def check_no_target(target: str | None) -> None:
    """Raise UserError if there is a target, for a task that reads one text."""
    if target is not None:
        raise UserError("--target: the run's model reads one text; leave it out")


def token_inputs(trained: TrainedModel, tokens: np.ndarray) -> ModelInputs:  # tokens [T]
    """Return the inputs of a model with one stack of layers.

    Raises:
      UserError: There are more tokens than the model has positions.
    """
    longest = trained.model.config.max_length
    if longest is not None and len(tokens) > longest:
        raise UserError(f"text: has {len(tokens)} tokens and the model reads {longest}; shorten it")
    return ModelInputs({"tokens": np.asarray(tokens, np.int32)[None]})


def token_batch_shapes(
    batch_size: int, length: int, *, targets_per_token: bool = True
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of the arrays that batches of the shipped tasks may have.

    A batch has only some of them. `jax.jit` drops the arguments that a loss does not read, so the
    others cost nothing.

    Args:
      batch_size: Rows, B.
      length: Tokens of a row, T, and of its source text if it has one.
      targets_per_token: Targets and weights are [B, T], and not [B].
    """
    text = (batch_size, length)
    target = text if targets_per_token else (batch_size,)
    names = ("tokens", "segments", "positions", "source", "source_segments")
    shapes: dict[str, tuple[tuple[int, ...], Any]] = dict.fromkeys(names, (text, np.int32))
    shapes |= {
        "targets": (target, np.int32),
        "weights": (target, np.float32),
        "examples": ((batch_size,), np.uint32),
    }
    return {name: jax.ShapeDtypeStruct(*each) for name, each in shapes.items()}
