"""Multi-query associative recall (Arora et al. 2023, section 3): a task that needs attention.

    3 b  7 d  1 a  1 3 3 7 1 7     keys with their values first, then only keys
                   a b b d a d     values to predict

A sequence starts with N pairs of a key and a value, in random order. The rest are questions: keys
of the sequence, drawn at random. Loss and accuracy are over their values, which do not occur in
the sequence again. A model that cannot look up a key can at best guess one of the N values.

The paper puts fillers between the questions; here every position after the pairs is trained on.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

import train
from train.data.arrays import ArrayDataConfig, Arrays
from train.errors import UsageError
from train.step import Batch, LossFn
from train.tasks.array_task import ArrayTask
from train.tasks.task import Metric, TaskConfig
from transformer import Hardware, LanguageModel
from transformer.losses import Loss, auxiliary_losses, label_loss, requested_outputs
from transformer.model_context import ActivationConstraint
from transformer.models.model import LOGITS


@dataclasses.dataclass(frozen=True)
class AssociativeRecall(TaskConfig):
    """Recall of the values of keys: a synthetic task for causal models."""

    data_configs = (ArrayDataConfig,)

    pairs: int = 16
    """Pairs of a key and a value in each sequence, N."""
    keys: int = 64
    """Number of different keys, and of different values."""
    train_examples: int = 20_000
    """Training sequences."""
    test_examples: int = 500
    """Validation sequences, and test sequences."""

    @property
    def vocab_size(self) -> int:
        """Keys, then values."""
        return 2 * self.keys

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= self.keys:
            raise ValueError(f"task.pairs {self.pairs}: give 1 to task.keys, {self.keys}")


def recall_examples(
    task: AssociativeRecall, length: int, count: int, seed: int
) -> dict[str, np.ndarray]:  # each is [count, length]
    """Return `tokens`, `targets`, and `asked`, which is 1 where a value is to be predicted."""
    random = np.random.default_rng(seed)
    pairs, keys = task.pairs, task.keys
    shown = random.permuted(np.tile(np.arange(keys), (count, 1)), axis=1)[:, :pairs]
    values = random.integers(keys, 2 * keys, size=(count, pairs))
    told = np.stack([shown, values], axis=-1).reshape(count, 2 * pairs)
    questions = random.integers(pairs, size=(count, length - 2 * pairs))
    answers = np.take_along_axis(values, questions, axis=1)
    nothing = np.zeros_like(told)
    return {
        "tokens": np.hstack([told, np.take_along_axis(shown, questions, axis=1)]).astype(np.int32),
        "targets": np.hstack([nothing, answers]).astype(np.int32),
        "asked": np.hstack([nothing, np.ones_like(answers)]).astype(np.float32),
    }


@train.register_task(AssociativeRecall)
class AssociativeRecallTask(ArrayTask):
    """Recall of values, by a language model. Evaluations report loss and accuracy of values."""

    config: AssociativeRecall

    def read_arrays(self, split: str) -> Arrays | None:
        config, length = self.config, self.data.length
        if length <= 2 * config.pairs:
            raise UsageError(
                f"data.length {length}: {config.pairs} pairs take {2 * config.pairs} tokens and "
                "leave none for questions; give a greater length, or fewer task.pairs"
            )
        count = config.train_examples if split == "train" else config.test_examples
        seed = ("train", "validation", "test").index(split)
        return recall_examples(config, length, count, seed)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> LanguageModel:
        return LanguageModel(self.model_config, hardware, constrain)

    def make_loss_fn(self, model: Any) -> LossFn:
        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["tokens"],
                dropout_rngs=dropout_rngs,
                outputs=LOGITS | requested_outputs(dropout_rngs),
            )
            weights = batch["asked"] * batch["weights"][:, None]
            found = label_loss(model, output.logits, {**batch, "weights": weights})
            return {**found, **auxiliary_losses(output.aux, found["loss"].weight)}

        return loss

    def selection_metric(self, corpus: Any) -> Metric:
        return Metric("accuracy", lower_is_better=False)
