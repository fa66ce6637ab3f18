"""Classification of continuous inputs: images, sound, graphs, or sequences of vectors."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from train.data.arrays import Arrays
from train.data.data_config import PYTHON_DATA_PREFIX
from train.data.features import FeatureDataConfig, read_features, to_features
from train.errors import UserError
from train.tasks.array_task import ArrayTask
from train.tasks.task import Metric
from train.tasks.task_configs import FeatureClassification
from transformer.losses import Loss, auxiliary_losses, label_loss, requested_outputs
from transformer.models.feature_classifier import FeatureClassifier
from transformer.models.model import LOGITS

if TYPE_CHECKING:
    from train.data.arrays import ArrayCorpus
    from train.experiment import Experiment
    from train.run import Run
    from train.step import Batch, LossFn
    from transformer.hardware import Hardware
    from transformer.model_context import ActivationConstraint


def check_examples(name: str, examples: Arrays, task: FeatureClassification) -> None:
    """Raise UserError if examples do not suit the model of a resolved task.

    A model of graphs would attend to everything without edges, and a label beyond the classes
    would have no loss.
    """
    if task.has_adjacency is None:  # not resolved yet
        return
    if task.use_adjacency and task.has_adjacency != ("adjacency" in examples):
        if task.has_adjacency:
            problem = "has no adjacency, and the model attends along edges; add it"
        else:
            problem = "has an adjacency, and the model learns without edges; leave it out"
        raise UserError(f"{name}: {problem}")
    width, label = examples["features"].shape[2], examples["targets"].max(initial=0)
    if task.num_features and width != task.num_features:
        raise UserError(
            f"{name}: has {width} numbers at each position, and the model reads "
            f"{task.num_features}; prepare it as the training data"
        )
    if task.num_labels and label >= task.num_labels:
        raise UserError(
            f"{name}: has label {label}, and the model's {task.num_labels} classes are numbered "
            "from 0; leave such examples out"
        )


class FeatureClassificationTask(ArrayTask):
    """Classification of sequences of vectors. Evaluations report loss and accuracy."""

    @property
    def data(self) -> FeatureDataConfig:
        """Settings of the data."""
        assert isinstance(self.experiment.data, FeatureDataConfig)
        return self.experiment.data

    @property
    def task_config(self) -> FeatureClassification:
        """Settings of the task."""
        assert isinstance(self.experiment.task, FeatureClassification)
        return self.experiment.task

    def read_arrays(self, split: str) -> Arrays | None:
        return read_features(self.data, split)

    def _arrays_of_split(self, split: str) -> Arrays | None:
        """Return features and targets, made from a file or from what `train.fit` was given."""
        arrays = super()._arrays_of_split(split)
        if arrays is None:
            return None
        examples = to_features(arrays, self.data)
        from_python = self.data.path.startswith(PYTHON_DATA_PREFIX)
        check_examples("data" if from_python else f"the {split} split", examples, self.task_config)
        return examples

    def resolve_experiment(self, corpus: ArrayCorpus) -> Experiment:
        """Return the experiment with what the data decide: labels, features, and edges or none."""
        train, task = corpus.split("train"), self.task_config
        found = {
            "num_labels": 1 + max(int(each["targets"].max()) for each in corpus.splits.values()),
            "num_features": train["features"].shape[2],
        }
        for name, number in found.items():
            set_number = getattr(task, name)
            too_few = set_number < number if name == "num_labels" else set_number != number
            if set_number and too_few:
                raise UserError(f"task.{name} {set_number}: the data have {number}; leave it out")
        set_here = task.has_adjacency is not None
        has_adjacency = task.has_adjacency if set_here else "adjacency" in train
        task = dataclasses.replace(
            task,
            num_labels=task.num_labels or found["num_labels"],
            num_features=found["num_features"],
            has_adjacency=has_adjacency,
        )
        for name, arrays in corpus.splits.items():
            check_examples(f"the {name} split", arrays, task)
        # No token is embedded, but a resolved model has a vocabulary.
        model = self.experiment.model
        model = dataclasses.replace(model, vocab_size=model.vocab_size or 1)
        return dataclasses.replace(self.experiment, task=task, model=model)

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> FeatureClassifier:
        task = self.task_config
        return FeatureClassifier(
            self.experiment.model,
            hardware,
            constrain,
            num_features=task.num_features,
            num_classes=task.num_labels,
            pooling=task.pooling,
            head_dropout=task.classifier_dropout,
        )

    def make_loss_fn(self, model: Any) -> LossFn:
        use_adjacency = self.task_config.use_adjacency

        def loss(params: Any, batch: Batch, dropout_rngs: jax.Array | None) -> dict[str, Loss]:
            output = model.apply(
                {"params": params},
                batch["features"],
                adjacency=batch.get("adjacency") if use_adjacency else None,
                dropout_rngs=dropout_rngs,
                outputs=LOGITS | requested_outputs(dropout_rngs),
            )
            losses = label_loss(model, output.logits, batch)
            return {**losses, **auxiliary_losses(output.aux, losses["loss"].weight)}

        return loss

    def selection_metric(self, corpus: Any) -> Metric:
        return Metric("accuracy", lower_is_better=False)

    def check_prompt(self, prompt: str, tokenizer: Any) -> None:
        """Accept any prompt: it names a file."""

    def predict(self, run: Run, prompt: str) -> str:
        """Return the label of each example of a .npz file, whose path is the prompt."""
        named = dataclasses.replace(self.data, path=prompt)
        arrays = dict(read_features(named, "train") or {})
        sizes = {len(array) for array in arrays.values()}
        if "labels" not in arrays and len(sizes) == 1:
            arrays["labels"] = np.zeros(sizes.pop(), np.int32)
        examples = to_features(arrays, named)
        check_examples(prompt, examples, self.task_config)
        adjacency = examples.get("adjacency") if self.task_config.use_adjacency else None
        logits = run.model.apply(
            {"params": run.params}, jnp.asarray(examples["features"]), adjacency=adjacency
        ).logits
        assert logits is not None
        return " ".join(str(label) for label in np.argmax(logits, axis=-1))
