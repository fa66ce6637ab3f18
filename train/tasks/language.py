"""Language modelling: the next token of every token."""

from typing import Any

import jax

from train.experiment import Experiment
from train.step import Batch, LossFunction
from transformer.losses import ChunkedCrossEntropy, Loss, chunk_count
from transformer.mixers import NOTHING
from transformer.model import LanguageModel, output_matrix


def language_model_loss(model: LanguageModel, experiment: Experiment) -> LossFunction:
    """The cross entropy of a batch of windows.

    A batch has `tokens`, `targets` and `weights` [B, T], and where documents are kept apart
    `segments` and `positions` [B, T].
    """
    config, segments = experiment.model, experiment.data.segments

    def loss(params: Any, batch: Batch, keys: jax.Array | None) -> dict[str, Loss]:
        tokens = batch["tokens"]
        hidden = model.apply(
            {"params": params},
            tokens,
            positions=batch["positions"] if segments else None,
            segments=batch["segments"] if segments else None,
            keys=keys,
            want=NOTHING,
        ).hidden
        batch_size, length = tokens.shape
        chunks = chunk_count(batch_size, length, config.vocab_rows, model.hardware)
        cross_entropy = ChunkedCrossEntropy(
            vocab_size=config.vocab_size,
            chunks=chunks,
            unroll=model.hardware.platform == "cpu" and chunks <= 8,
            dtype=config.precision.loss,
        )
        matrix = output_matrix(params, config)
        return {"loss": cross_entropy(hidden, matrix, batch["targets"], batch["weights"])}

    return loss
