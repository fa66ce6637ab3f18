"""Settings of the tasks that a run can learn. Imports neither JAX nor any model.

The command line reads this module for `--help`, so it stays cheap to import.
`train.tasks.task_registry` maps each of these classes to the `Task` that implements it.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from train.data.arrays import ArrayDataConfig
from train.data.bitext import BitextDataConfig
from train.data.conversations import ConversationDataConfig
from train.data.data_config import DataConfig, TextDataConfig
from train.data.features import FeatureDataConfig
from train.data.listops import ListOpsDataConfig
from train.data.preferences import PreferenceDataConfig
from train.data.text_labels import ClassificationDataConfig
from train.data.token_labels import TokenLabelDataConfig
from train.errors import UsageError
from transformer.models.config import TransformerConfig
from transformer.models.heads import Pooling
from transformer.validation import check_at_least, check_fraction, check_settings

if TYPE_CHECKING:
    from train.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class TaskConfig:
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

    def check(self, experiment: Experiment) -> None:
        """Raise UsageError if the experiment's model does not fit the task. By default all do."""


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


@dataclasses.dataclass(frozen=True)
class LanguageModeling(TaskConfig):
    """Causal language modeling: predict the next token."""

    data_configs = (TextDataConfig,)
    reports_bits_per_byte = True

    def check(self, experiment: Experiment) -> None:
        check_no_encoder(self, experiment.model)


@dataclasses.dataclass(frozen=True)
class InstructionTuning(TaskConfig):
    """Instruction tuning: predict the answers of conversations."""

    data_configs = (ConversationDataConfig,)

    def check(self, experiment: Experiment) -> None:
        check_no_encoder(self, experiment.model)


@dataclasses.dataclass(frozen=True)
class PreferenceOptimization(TaskConfig):
    """Direct preference optimization (Rafailov et al. 2023): prefer one answer to another."""

    data_configs = (PreferenceDataConfig,)

    beta: float = 0.1
    """Strength of the pull towards the reference."""

    reference: Literal["base", "data"] = "base"
    """base: the model without its LoRA adapter. data: the log-likelihoods that the pairs have
    (`python -m train reference`), also for training of all weights."""

    def __post_init__(self) -> None:
        check_settings(self, "task")
        if not self.beta > 0:
            raise ValueError(f"task.beta {self.beta}: give a positive number")
        if self.reference not in ("base", "data"):
            raise ValueError(f"task.reference {self.reference!r}: give base or data")

    def check(self, experiment: Experiment) -> None:
        check_no_encoder(self, experiment.model)


@dataclasses.dataclass(frozen=True)
class MaskedLanguageModeling(TaskConfig):
    """Masked language modeling: predict hidden tokens (Devlin et al. 2019, section 3.1)."""

    data_configs = (TextDataConfig,)

    mlm_probability: float = 0.15
    """Fraction of the tokens that are selected for prediction, in (0, 1]."""
    mask_replace_prob: float = 0.8
    """Fraction of the selected tokens that are replaced by the mask token."""
    random_replace_prob: float = 0.1
    """Fraction of the selected tokens that are replaced by a random token. The rest stay."""

    def __post_init__(self) -> None:
        check_settings(self, "task")
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(
                f"task.mlm_probability {self.mlm_probability}: give a fraction in (0, 1]"
            )
        # Chosen tokens that are neither masked nor replaced stay as they are.
        if (
            min(self.mask_replace_prob, self.random_replace_prob) < 0
            or self.mask_replace_prob + self.random_replace_prob > 1
        ):
            raise ValueError(
                f"task.mask_replace_prob {self.mask_replace_prob}, task.random_replace_prob "
                f"{self.random_replace_prob}: give fractions of at least 0 that sum to at most 1"
            )

    def check(self, experiment: Experiment) -> None:
        check_no_encoder(self, experiment.model)
        if experiment.model.causal:
            raise UsageError(
                f"model.causal: task {type(self).__name__} reads both sides of a token; set it to "
                "False (--model.no-causal)"
            )


@dataclasses.dataclass(frozen=True)
class Classification(TaskConfig):
    """Text classification: predict the label of each text."""

    data_configs = (ClassificationDataConfig, ListOpsDataConfig)
    predicts_labels = True

    num_labels: int = 0
    """Number of labels, C. 0: as many as the training data have."""
    pooling: Pooling = "first"
    """Vector that the label is predicted from: of the first token (a start token), or the mean or
    the maximum over all tokens."""
    classifier_dropout: float = 0.0
    """Dropout rate of the pooled vector, in [0, 1)."""
    word_dropout: float = 0.0
    """Probability that a token of a training text is left out: it is masked like padding, in
    [0, 1) (Iyyer et al. 2015, section 2.3)."""

    def __post_init__(self) -> None:
        check_at_least("task.num_labels", self.num_labels, 0)
        check_fraction("task.classifier_dropout", self.classifier_dropout)
        check_fraction("task.word_dropout", self.word_dropout)

    def check(self, experiment: Experiment) -> None:
        check_no_encoder(self, experiment.model)
        check_causal_pooling(self.pooling, experiment.model)
        if self.word_dropout and self.pooling == "first":
            raise UsageError(
                "task.word_dropout: would drop the first token, whose vector stands for the "
                "whole text; set task.pooling to mean or max, or task.word_dropout to 0"
            )


@dataclasses.dataclass(frozen=True)
class FeatureClassification(TaskConfig):
    """Classification of images, sound, graphs, or sequences of vectors."""

    data_configs = (FeatureDataConfig,)

    num_labels: int = 0
    """Number of labels, C. 0: as many as the data have, in all splits."""
    num_features: int = 0
    """Numbers of a position, I. 0: as many as the training data have."""
    pooling: Pooling = "mean"
    """Vector that the label is predicted from: of the first position, or the mean or the maximum
    over all of them."""
    classifier_dropout: float = 0.0
    """Dropout rate of the pooled vector, in [0, 1)."""
    has_adjacency: bool | None = None
    """Examples are graphs with an adjacency each. None: if those of training are."""
    use_adjacency: bool = True
    """Graphs: attend along edges alone. False: every node attends to every other."""

    def __post_init__(self) -> None:
        check_at_least("task.num_labels", self.num_labels, 0)
        check_at_least("task.num_features", self.num_features, 0)
        check_fraction("task.classifier_dropout", self.classifier_dropout)

    def check(self, experiment: Experiment) -> None:
        check_no_encoder(self, experiment.model)
        check_causal_pooling(self.pooling, experiment.model)


@dataclasses.dataclass(frozen=True)
class Tagging(TaskConfig):
    """Token classification: predict the tag of each word at its first subword token."""

    data_configs = (TokenLabelDataConfig,)
    predicts_labels = True

    num_labels: int = 0
    """Number of tags, C. 0: as many as the training data have."""
    classifier_dropout: float = 0.0
    """Dropout rate of each token's vector, in [0, 1)."""

    def __post_init__(self) -> None:
        check_at_least("task.num_labels", self.num_labels, 0)
        check_fraction("task.classifier_dropout", self.classifier_dropout)

    def check(self, experiment: Experiment) -> None:
        check_no_encoder(self, experiment.model)


@dataclasses.dataclass(frozen=True)
class Translation(TaskConfig):
    """Translation: predict the target sentence of a source sentence."""

    data_configs = (BitextDataConfig,)

    label_smoothing: float = 0.1
    """Probability mass spread evenly over the vocabulary (Vaswani et al. 2017, section 5.4)."""
    num_beams: int = 5
    """Hypotheses kept at each step of beam search. 1: greedy decoding."""
    length_penalty: float = 0.6
    """Exponent a: hypotheses of n tokens score log p / ((5 + n) / 6)^a (Wu et al. 2016, 7)."""
    extra_length: int = 50
    """Longest translation, in tokens beyond the length of its source."""
    start_token: str = ""
    """Token that the decoder reads first. Empty: that of an imported model's files, such as the
    `<pad>` of T5 and Marian, or else the one that separates documents."""
    compute_bleu: Literal["end", "always"] = "end"
    """Evaluations that translate and compute BLEU: only the one at the end of a run, or every one.
    The others report the loss alone."""

    def __post_init__(self) -> None:
        check_fraction("task.label_smoothing", self.label_smoothing)
        check_at_least("task.num_beams", self.num_beams, 1)
        check_at_least("task.length_penalty", self.length_penalty, 0)
        check_at_least("task.extra_length", self.extra_length, 0)

    def check(self, experiment: Experiment) -> None:
        if experiment.model.encoder is None:
            raise UsageError(
                f"model.encoder: is missing for task {type(self).__name__}; give an EncoderConfig"
            )
