"""The interface of a task: all that a run does otherwise when it learns something else.

Means over an evaluation set.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from transformer.generation.sampling import ANCESTRAL_SAMPLING, SamplingConfig

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer
    from train.engine import Engine
    from train.experiment import Experiment
    from train.run import Run
    from train.step import LossFn
    from train.tasks.vocabulary import Labels
    from transformer.context import ActivationConstraint
    from transformer.hardware import Hardware
    from transformer.models.base import Model
import collections
from typing import TYPE_CHECKING

import jax
from jax.sharding import Mesh

from train.experiment import EvaluationConfig
from train.parallel.batches import num_batch_shards
from train.runtime.dispatch_limit import MAX_PROGRAMS_IN_FLIGHT

if TYPE_CHECKING:
    from train.engine import Engine

HostBatch = dict[str, np.ndarray]
"""Some rows of a batch: `examples` [B] uint32 and `weights` of the targets, whatever else."""


TextCallback = Callable[[str], None]


class Corpus(Protocol):
    """What `Task.prepare_corpus` makes. Only its task knows what else it has."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def digest(self) -> str:
        """Tells corpora apart."""
        ...

    @property
    def labels(self) -> Labels:
        """The names of classes or tags; none of tasks that have no such."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What was done to the data that their owner should know, one sentence each."""
        ...


class TrainingBatches(Protocol):
    """Batches without end, each a pure function of the seed and its number."""

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """The rows of batch `cursor` that are the share of one host of several."""
        ...


class EvaluationBatches(Protocol):
    """The batches of a held-out split."""

    def __len__(self) -> int: ...

    def host_batch(self, cursor: int, host: int, num_hosts: int) -> HostBatch:
        """As that of a `TrainingSet`."""
        ...


@dataclasses.dataclass(frozen=True)
class Metric:
    """What evaluations are judged by."""

    name: str
    lower_is_better: bool

    def is_better(self, candidate: float, reference: float) -> bool:
        """Whether `candidate` is better than `reference`; what is no number is better than nothing."""
        return candidate < reference if self.lower_is_better else candidate > reference


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """How a run's model answers. Each task takes what concerns it."""

    max_new_tokens: int = 200
    sampling: SamplingConfig = ANCESTRAL_SAMPLING
    num_beams: int = 0
    """0: as the run's settings say."""
    seed: int = 0


class Task(abc.ABC):
    """What is learned from an experiment's data, by which model, and how it is judged and shown."""

    experiment: Experiment
    """As it was asked for, or as `resolve_experiment` has made it."""

    @property
    def continues_prompt(self) -> bool:
        """Whether a sample goes on from its prompt, rather than answering it."""
        return False

    @property
    def supported_options(self) -> tuple[str, ...]:
        """The options that say how a sample is made, by the names of the command line's settings.

        The others would change nothing.
        """
        return ()

    @property
    def target_fraction(self) -> float | None:
        """Share of the tokens of which a word is told in training; None: the model's own."""
        return None

    @property
    def untrained_parts(self) -> tuple[str, ...]:
        """Parts of the model that get no gradient, each with the setting that leaves it out."""
        types = self.experiment.model.num_token_types
        if types < 2:
            return ()
        note = (
            f"model.token_types {types}: the task knows type 0 alone, and trains no other row of "
            "the table; 0 leaves it out"
        )
        return (note,)

    @property
    def metric_notes(self) -> dict[str, str]:
        """What is to be said beside the metrics, such as how a score was made, by name."""
        return {}

    @abc.abstractmethod
    def selection_metric(self, corpus: Any) -> Metric:
        """What evaluations on the way are judged by."""

    @abc.abstractmethod
    def prepare_corpus(
        self, tokenizer: Tokenizer | None = None, labels: Labels | None = None
    ) -> Corpus:
        """The corpus; of a run that was begun, with the tokenizer and the labels that it has.

        Raises UserError if the data are missing, empty or damaged.
        """

    @abc.abstractmethod
    def resolve_experiment(self, corpus: Any) -> Experiment:
        """The experiment with what it left for the corpus to say."""

    @abc.abstractmethod
    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> Model:
        """The model of an experiment that is resolved."""

    @abc.abstractmethod
    def make_loss_fn(self, model: Any) -> LossFn:
        """What is minimised, under the name `loss`, and what is measured beside it."""

    @abc.abstractmethod
    def training_batches(self, corpus: Any) -> TrainingBatches:
        """What to train on. Raises UserError if there is not enough of it."""

    @abc.abstractmethod
    def describe_training_data(self, corpus: Any) -> str:
        """How much there is to train on, in words."""

    @abc.abstractmethod
    def evaluate(
        self, engine: Engine, params: Any, corpus: Any, split: str, *, full_split: bool
    ) -> dict[str, float]:
        """The metrics of a split by name.

        Over all of it, or over as much as an evaluation on the way takes. Raises UserError if
        there is no such split.
        """

    @abc.abstractmethod
    def check_prompt(self, prompt: str, tokenizer: Tokenizer) -> None:
        """Raises UserError for a prompt that the model could not answer."""

    @abc.abstractmethod
    def sample(
        self,
        run: Run,
        prompts: Sequence[str],
        options: SampleOptions,
        on_text: TextCallback | None = None,
    ) -> list[str]:
        """What the model answers to each prompt.

        `on_text` is given the answer to a single one in pieces, as it is made. Raises UserError for
        prompts that it cannot take.
        """


def round_up_batch_size(batch_size: int, mesh: Mesh) -> int:
    """The batch size, or a few rows more so that it divides among the devices."""
    shards = num_batch_shards(mesh)
    return -(-batch_size // shards) * shards


def max_eval_batches(settings: EvaluationConfig, full_split: bool) -> int | None:
    """The most batches of an evaluation; None: those of the whole split."""
    return None if full_split or not settings.num_batches else settings.num_batches


def gather_to_host(array: jax.Array) -> np.ndarray:
    """An array whole, though each host may have but its part."""
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def mean_losses(engine: Engine, params: Any, batches: EvaluationBatches) -> dict[str, float]:
    """Return the means of the task's losses over a set, by name.

    Sums are taken on the host in float64. Results are fetched a few batches late, so that the
    devices never wait for the host, and what is not fetched yet does not grow with the set.
    """
    host, hosts = jax.process_index(), jax.process_count()
    totals: dict[str, np.ndarray] = {}
    pending: collections.deque[dict[str, Any]] = collections.deque()

    def add(sums: dict[str, Any]) -> None:
        for name, each in jax.device_get(sums).items():
            totals[name] = totals.get(name, 0) + np.array(each, np.float64)

    for cursor in range(len(batches)):
        pending.append(
            engine.evaluate(params, engine.put_batch(batches.host_batch(cursor, host, hosts)))
        )
        if len(pending) > MAX_PROGRAMS_IN_FLIGHT:
            add(pending.popleft())
    while pending:
        add(pending.popleft())
    return {name: float(total / weight) for name, (total, weight) in totals.items()}
