"""Write your own task: name the most frequent symbol. Its data are arrays, without a tokenizer.

    python examples/own_task.py

The same from the command line:

    python -m train fit examples/own_task.py --workdir runs/frequent
    python -m train evaluate runs/frequent --import examples/own_task.py --split test
    python -m train sample runs/frequent --import examples/own_task.py --prompt "0 3 3 1"
"""

import dataclasses

import numpy as np

import train
from train.data.arrays import ArrayDataConfig
from train.tasks.array_task import ArrayTask
from train.tasks.task import Metric, TaskConfig
from transformer import AttentionConfig, BlockConfig, Classifier, TransformerConfig
from transformer.losses import label_loss

SYMBOLS = 5


@dataclasses.dataclass(frozen=True)
class MostFrequent(TaskConfig):
    """Predict the most frequent symbol of a sequence; of equally frequent ones, the smallest."""

    num_examples: int = 4096
    """Examples of each split."""


@train.register_task(MostFrequent)
class MostFrequentTask(ArrayTask):
    """The data, the model, the loss and the predictions of the task."""

    def read_arrays(self, split):
        random = np.random.default_rng(["train", "validation", "test"].index(split))
        shape = self.config.num_examples, self.data.length
        tokens = random.integers(SYMBOLS, size=shape)
        counts = (tokens[:, :, None] == np.arange(SYMBOLS)).sum(axis=1)
        return {"tokens": tokens, "targets": counts.argmax(axis=1)}

    def make_model(self, hardware, constrain):
        return Classifier(
            self.model_config, hardware, constrain, num_classes=SYMBOLS, pooling="mean"
        )

    def make_loss_fn(self, model):
        def losses(params, batch, dropout_rngs):
            output = model.apply({"params": params}, batch["tokens"], dropout_rngs=dropout_rngs)
            return label_loss(model, output.logits, batch)  # the loss and the accuracy

        return losses

    def selection_metric(self, corpus):
        return Metric("accuracy", lower_is_better=False)

    def predict(self, trained, prompt):
        tokens = np.array([prompt.split()], np.int32)
        return str(trained.model.apply({"params": trained.params}, tokens).logits.argmax())


block = BlockConfig(mixer=AttentionConfig(num_heads=4))
model = TransformerConfig(
    vocab_size=SYMBOLS, d_model=32, num_layers=1, layer_pattern=(block,), causal=False
)
experiment = train.Experiment("frequent", MostFrequent(), model, ArrayDataConfig(length=15))
EXPERIMENTS = {"frequent": dataclasses.replace(experiment, steps=500)}

if __name__ == "__main__":
    run = train.fit(EXPERIMENTS["frequent"])
    print(f"accuracy {run.final_metrics['accuracy']:.3f};", run.generate("4 1 0 1 4 1 2 3 1"))
