"""Interface of a task: its data, model, loss, evaluation and answers to prompts."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import numpy as np

from train.data.token_file import HostBatch
from train.errors import UserError
from train.tasks.vocabulary import resolve_vocab_size, tokenizer_of
from transformer.generation.sampling import ANCESTRAL_SAMPLING, SamplingConfig

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer
    from train.engine import Engine
    from train.experiment import Experiment
    from train.run import Run
    from train.step import LossFn
    from train.tasks.vocabulary import Labels
    from transformer.hardware import Hardware
    from transformer.model_context import ActivationConstraint
    from transformer.models.model import Model

TextCallback = Callable[[str], None]
"""Function that receives text piece by piece, as it is generated."""


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


class TrainingBatches(Protocol):
    """Endless sequence of training batches, each a pure function of the seed and the cursor."""

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """Return the rows of batch `cursor` that belong to one host.

        The arrays include `examples` [B] uint32 and the `weights` of the targets.
        """
        ...


class EvaluationBatches(Protocol):
    """Batches of a held-out split."""

    def __len__(self) -> int: ...

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """Return the rows of batch `cursor` that belong to one host."""
        ...


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
    """Hypotheses of beam search; 0: as the run's settings say."""
    seed: int = 0


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


class Task(abc.ABC):
    """A task: all that differs between runs that learn different things.

    Subclasses are constructed with the experiment alone and are registered, with their settings,
    in `train.tasks.task_registry`. Those whose data are arrays derive from `ArrayTask`
    (`train.tasks.array_task`), which needs four methods.

    Attributes:
      experiment: The experiment, as requested or as `resolve_experiment` has completed it.
    """

    experiment: Experiment

    @property
    def continues_prompt(self) -> bool:
        """True if `sample` continues its prompt, False if it answers it."""
        return False

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
        """True if `evaluate` compares with the frozen weights of a LoRA run, `engine.frozen`."""
        return False

    @property
    def has_reference_pass(self) -> bool:
        """True if a training step also runs the model that is compared with, without gradients."""
        return False

    @property
    def untrained_parts(self) -> tuple[str, ...]:
        """Notes on parts of the model that get no gradient, with the setting that removes each."""
        # Rows that no token reads get no gradient; only weight decay changes them.
        types = self.experiment.model.num_token_types
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

    def resolve_experiment(self, corpus: Any) -> Experiment:
        """Return the experiment with the sizes that the corpus decides (vocabulary, labels).

        By default this is the size of the tokenizer's vocabulary.
        """
        if corpus.tokenizer is None:
            return self.experiment
        return resolve_vocab_size(self.experiment, corpus.tokenizer)

    @abc.abstractmethod
    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Model:
        """Return the model of a resolved experiment."""

    @abc.abstractmethod
    def make_loss_fn(self, model: Any) -> LossFn:
        """Return the loss function: the minimized `loss` and the metrics measured beside it."""

    @abc.abstractmethod
    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of a batch's arrays, by name, to compile without data."""

    @abc.abstractmethod
    def training_batches(self, corpus: Any) -> TrainingBatches:
        """Return the batches to train on. Raises UserError if there are too few data."""

    def describe_training_data(self, corpus: Any) -> str:
        """Return the amount of training data as text: "12,345 tokens of text"."""
        return f"data {type(self.experiment.data).__name__}"

    @abc.abstractmethod
    def evaluate(
        self, engine: Engine, params: Any, corpus: Any, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """Return the metrics of a split by name.

        Args:
          engine: Compiled step and loss.
          params: Weights to evaluate.
          corpus: The result of `prepare_corpus`.
          split: "train", "validation" or "test".
          full_split: Evaluate all of it, and not only `evaluation.num_batches` batches.

        Raises:
          UserError: The data have no such split.
        """

    def check_prompt(self, prompt: str, tokenizer: Any) -> None:
        """Raise UserError for a prompt that the model cannot answer, before training starts."""
        if tokenizer is not None:
            tokenizer.encode(prompt)

    def model_inputs(self, run: Run, text: str, target: str | None = None) -> ModelInputs:
        """Return what the model reads for a text: by default its tokens after a start token.

        Args:
          run: The model and its tokenizer.
          text: Any text of the task.
          target: Text of the decoder, in translation alone; None: the model's own answer.

        Raises:
          UserError: The model cannot read the text.
        """
        check_no_target(target)
        before, after = tokenizer_of(run).text_frame
        return token_inputs(run, np.concatenate([before, tokenizer_of(run).encode(text), after]))

    def predict(self, run: Run, prompt: str) -> str:
        """Return the model's answer to one prompt.

        Raises:
          ValueError: The prompt cannot be read; the message says why.
        """
        raise UserError(
            f"task {type(self.experiment.task).__name__}: answers no prompts; define "
            "predict(run, prompt) in its class"
        )

    def sample(
        self,
        run: Run,
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """Return the model's answer to each prompt, by default from `predict`.

        Args:
          run: The model, its weights and its tokenizer.
          prompts: One or more prompts.
          options: See `supported_options`.
          on_text: Receives the answer to a single prompt in pieces, as it is generated.

        Raises:
          UserError: The model cannot answer a prompt.
        """
        try:
            answers = [self.predict(run, prompt) for prompt in prompts]
        except ValueError as error:
            raise UserError(f"prompt: {error}; give one that the task can read") from error
        if on_text is not None:
            on_text("".join(answers))
        return answers


def check_no_target(target: str | None) -> None:
    """Raise UserError if there is a target, for a task that reads one text."""
    if target is not None:
        raise UserError("--target: the run's model reads one text; leave it out")


def token_inputs(run: Run, tokens: np.ndarray) -> ModelInputs:  # tokens [T]
    """Return the inputs of a model with one stack of layers.

    Raises:
      UserError: There are more tokens than the model has positions.
    """
    longest = run.model.config.max_length
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
