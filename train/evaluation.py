"""The held-out metrics of a language model."""

import math
from typing import Any

import jax
import numpy as np

from train.data import TokenStream, evaluation_batches, prepare
from train.engine import Engine, make_engine
from train.experiment import Experiment
from train.memory import ELSEWHERE, explain_exhaustion
from train.run import Run


def evaluate_stream(
    engine: Engine,
    params: Any,
    stream: TokenStream,
    experiment: Experiment,
    *,
    whole: bool,
) -> dict[str, float]:
    """Loss in nats a token, perplexity, and bits per byte of the text.

    Over the whole split, or over the experiment's number of batches spread through it.
    """
    settings = experiment.evaluation
    shards = engine.mesh.shape["data"] * engine.mesh.shape["fsdp"]
    batches = evaluation_batches(
        stream,
        batch_size=-(-(settings.batch_size or experiment.batch_size) // shards) * shards,
        sequence_length=experiment.data.sequence_length,
        stride=settings.stride or None,
        segments=experiment.data.segments,
        limit=None if whole or not settings.batches else settings.batches,
    )
    start, stop = host_rows(batches.batch_size)
    # Sums are taken on the host in float64; fetching a batch late lets the next one start.
    pending = [
        engine.evaluate(params, engine.put(batches.rows(cursor, start, stop)))["loss"]
        for cursor in range(len(batches))
    ]
    totals = np.array(jax.device_get(pending), np.float64).sum(axis=0)
    loss = float(totals[0] / totals[1])
    nats_to_bits = stream.targets / stream.bytes / math.log(2)
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss * nats_to_bits,
    }


def host_rows(batch_size: int) -> tuple[int, int]:
    """Which rows of a batch this host reads."""
    each = batch_size // jax.process_count()
    return jax.process_index() * each, (jax.process_index() + 1) * each


def evaluate_run(run: Run, split: str) -> dict[str, float]:
    """The metrics of a run over the whole of a split of its data.

    Raises UserError if the data have no such split, or are no longer there.
    """
    corpus = prepare(run.experiment.data, tokenizer=run.tokenizer)
    stream = corpus.split(split)
    engine = make_engine(run.experiment, run.model.hardware)
    with explain_exhaustion([ELSEWHERE]):
        return evaluate_stream(engine, run.params, stream, run.experiment, whole=True)
