"""Classification of continuous inputs: images, sound, graphs, or sequences of vectors."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from train.data.arrays import ArrayCorpus, Arrays
from train.data.features import FeatureDataConfig, read_features, to_features
from train.data.held_data import PYTHON_DATA_PREFIX
from train.errors import UserError
from train.step import Batch, LossFn
from train.tasks.array_task import ArrayTask
from train.tasks.task import (
    Metric,
    TaskConfig,
    TrainedModel,
    check_causal_pooling,
    check_no_encoder,
)
from transformer.hardware import Hardware
from transformer.losses import Loss, auxiliary_losses, label_loss, requested_outputs
from transformer.model_context import ActivationConstraint
from transformer.models.config import TransformerConfig
from transformer.models.feature_classifier import FeatureClassifier
from transformer.models.heads import Pooling
from transformer.models.model import LOGITS
from transformer.validation import Fraction, NonNegativeInt


@dataclasses.dataclass(frozen=True)
class FeatureClassification(TaskConfig):
    """Classification of images, sound, graphs, or sequences of vectors."""

    data_configs = (FeatureDataConfig,)

    num_labels: NonNegativeInt = 0
    """Number of labels, C. 0: as many as the data have, in all splits."""
    num_features: NonNegativeInt = 0
    """Numbers of a position, I. 0: as many as the training data have."""
    pooling: Pooling = "mean"
    """Vector that the label is predicted from: of the first position, or the mean or the maximum
    over all of them."""
    classifier_dropout: Fraction = 0.0
    """Dropout rate of the pooled vector, in [0, 1)."""
    has_adjacency: bool | None = None
    """Examples are graphs with an adjacency each. None: if those of training are."""
    use_adjacency: bool = True
    """Graphs: attend along edges alone. False: every node attends to every other."""

    def check(self, model: TransformerConfig) -> None:
        check_no_encoder(self, model)
        check_causal_pooling(self.pooling, model)


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


@dataclasses.dataclass(frozen=True)
class FeatureClassificationTask(ArrayTask):
    """Classification of sequences of vectors. Evaluations report loss and accuracy."""

    config: FeatureClassification
    data: FeatureDataConfig

    def read_arrays(self, split: str) -> Arrays | None:
        return read_features(self.data, split)

    def _arrays_of_split(self, split: str) -> Arrays | None:
        """Return features and targets, made from a file or from what `train.fit` was given."""
        arrays = super()._arrays_of_split(split)
        if arrays is None:
            return None
        examples = to_features(arrays, self.data)
        from_python = self.data.path.startswith(PYTHON_DATA_PREFIX)
        check_examples("data" if from_python else f"the {split} split", examples, self.config)
        return examples

    def resolve(self, corpus: ArrayCorpus) -> Self:
        """Return the task with what the data decide: labels, features, and edges or none."""
        train, task = corpus.split("train"), self.config
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
        model = self.model_config
        model = dataclasses.replace(model, vocab_size=model.vocab_size or 1)
        return dataclasses.replace(self, config=task, model_config=model)

    def batch_shapes(self, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes that the settings give; with open sizes, those of the data."""
        task = self.config
        if not (task.num_features and task.num_labels):
            return super().batch_shapes(batch_size, length)
        shapes: dict[str, tuple[tuple[int, ...], Any]] = {
            "features": ((batch_size, length, task.num_features), np.float32),
            "targets": ((batch_size,), np.int32),
            "weights": ((batch_size,), np.float32),
            "examples": ((batch_size,), np.uint32),
        }
        if task.has_adjacency:
            shapes["adjacency"] = ((batch_size, length, length), np.bool_)
        return {name: jax.ShapeDtypeStruct(*each) for name, each in shapes.items()}

    def make_model(self, hardware: Hardware, constrain: ActivationConstraint) -> FeatureClassifier:
        task = self.config
        return FeatureClassifier(
            self.model_config,
            hardware,
            constrain,
            num_features=task.num_features,
            num_classes=task.num_labels,
            pooling=task.pooling,
            head_dropout=task.classifier_dropout,
        )

    def make_loss_fn(self, model: Any) -> LossFn:
        use_adjacency = self.config.use_adjacency

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

    def predict(self, trained: TrainedModel, prompt: str) -> str:
        """Return the label of each example of a .npz file, whose path is the prompt."""
        named = dataclasses.replace(self.data, path=prompt)
        arrays = dict(read_features(named, "train") or {})
        sizes = {len(array) for array in arrays.values()}
        if "labels" not in arrays and len(sizes) == 1:
            arrays["labels"] = np.zeros(sizes.pop(), np.int32)
        examples = to_features(arrays, named)
        check_examples(prompt, examples, self.config)
        adjacency = examples.get("adjacency") if self.config.use_adjacency else None
        logits = trained.model.apply(
            {"params": trained.params}, jnp.asarray(examples["features"]), adjacency=adjacency
        ).logits
        assert logits is not None
        return " ".join(str(label) for label in np.argmax(logits, axis=-1))
