"""Small training runs for benchmarks that compare recipes."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from train.assembly import make_engine, make_task, training_options, with_task
from train.config.experiment_files import find_experiment
from train.data.batches import TextEvaluationBatches
from train.data.corpus import TextCorpus
from train.data.token_file import HostBatch, TokenStream
from train.engines.engine import Engine
from train.experiment import Experiment
from train.optim.muon import Muon
from train.runtime.local_hardware import local_hardware
from transformer import BlockConfig, LanguageModel, TransformerConfig

LENGTH = 128
EVALUATED = 1 << 17
"""Tokens at the beginning of the held-out text on which different lengths are compared."""
TOKENS_AT_ONCE = 2048


def small(steps: int, *, seed: int = 0, data: Path | None = None) -> Experiment:
    """Return the quickstart with `steps` steps, windows of 128 tokens, no document masking.

    The text is WikiText-2, in a folder of that name in `data`; None: the quickstart's.
    """
    base = on_wikitext(find_experiment("quickstart"), data)
    text = dataclasses.replace(base.text_data, sequence_length=LENGTH, document_masking=False)
    # The optimizer with which the figures in `docs/claims.md` were measured.
    optimizer = Muon(beta2=0.95, weight_decay=0.05)
    return dataclasses.replace(base, data=text, optimizer=optimizer, steps=steps, seed=seed)


def on_wikitext(experiment: Experiment, data: Path | None) -> Experiment:
    """Return the experiment on WikiText-2, in a folder of that name in `data`; None: as it is."""
    if data is None:
        return experiment
    folder = data.resolve() / "wikitext-2"
    text = dataclasses.replace(
        experiment.text_data,
        path=str(folder / "train.txt"),
        validation_path=str(folder / "valid.txt"),
    )
    return dataclasses.replace(experiment, data=text)


def with_vocabulary(experiment: Experiment, size: int) -> Experiment:
    """Return the experiment with a tokenizer of another size."""
    text = experiment.text_data
    tokenizer = dataclasses.replace(text.tokenizer, vocab_size=size)
    return dataclasses.replace(experiment, data=dataclasses.replace(text, tokenizer=tokenizer))


def with_model(experiment: Experiment, **changes: Any) -> Experiment:
    """Return the experiment with changed fields of its model."""
    return dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **changes))


def with_mixer(model: TransformerConfig, **changes: Any) -> tuple[BlockConfig, ...]:
    """Return the model's layers with changed fields of their mixers."""
    return tuple(
        dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, **changes))
        for block in model.layer_pattern
    )


class SmallRun(NamedTuple):
    """Result of a training run without a folder."""

    experiment: Experiment
    engine: Engine
    corpus: Any
    params: Any


def train_small(experiment: Experiment, start: Callable[[Any], Any] | None = None) -> SmallRun:
    """Train from the seed; `start` changes the initial parameters."""
    corpus: Any = make_task(experiment).prepare_corpus()
    task = make_task(experiment).resolve(corpus)
    experiment = with_task(experiment, task)
    engine = make_engine(experiment, local_hardware())
    state = engine.init()
    if start is not None:
        state = state.replace(params=start(state.params))
    batches = task.training_batches(corpus, training_options(experiment))
    for cursor in range(experiment.steps):
        state, _ = engine.step(state, engine.put_batch(batches.host_batch(cursor, 0, 1)))
    return SmallRun(experiment, engine, corpus, state.params)


class Trained(NamedTuple):
    """A small language model and its corpus."""

    model: LanguageModel
    params: Any
    corpus: TextCorpus
    segments: bool
    """True if packed documents are masked from each other."""


def trained(experiment: Experiment, params: Any = None) -> Trained:
    """Train a language model from the seed, or from the parameters of another run."""
    # A copy: the step donates its state.
    start = None if params is None else lambda _: jax.tree.map(jnp.array, params)
    run = train_small(experiment, start)
    model = LanguageModel(run.experiment.model, local_hardware())
    segments = experiment.text_data.document_masking
    return Trained(model, jax.device_get(run.params), run.corpus, segments)


def held_out(
    stream: TokenStream,
    length: int,  # T
    *,
    segments: bool,
    windows: int | None = None,
    tokens: int = EVALUATED,
) -> Iterator[HostBatch]:
    """Yield batches of windows of T tokens: see `losses_by_position`."""
    batch_size = max(1, TOKENS_AT_ONCE // length)
    limit = None if windows is None else -(-windows // batch_size)
    batches = TextEvaluationBatches(
        stream,
        batch_size=batch_size,
        sequence_length=length,
        document_masking=segments,
        max_batches=limit,
    )
    # Without a limit, windows follow each other without gaps: the first batches are the same text
    # at any length that is a power of two.
    count = tokens // (batch_size * length) if windows is None else len(batches)
    return itertools.islice(batches, count)


def losses_by_position(
    run: Trained,
    length: int,  # T
    *,
    windows: int | None = None,
    config: TransformerConfig | None = None,
    tokens: int = EVALUATED,
) -> np.ndarray:  # [T] nats
    """Return the mean held-out loss at each position of windows of T tokens.

    Args:
      run: A trained model and its corpus.
      length: T, which may differ from the length in training.
      windows: Number of windows, spread evenly over the held-out text. None: its first `tokens`
        tokens, so that different lengths are compared on the same text.
      config: Replaces the configuration of the model; its parameters stay.
      tokens: Number of tokens, without `windows`.
    """
    model = run.model if config is None else LanguageModel(config, run.model.hardware)
    stream = run.corpus.split("validation")

    @jax.jit
    def token_losses(params: Any, rows: Any) -> jax.Array:  # [B, T]
        names = ("segments", "positions") if run.segments else ()
        given = {name: rows[name] for name in names}
        logits: Any = model.apply({"params": params}, rows["tokens"], **given).logits
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        return -jnp.take_along_axis(log_probs, rows["targets"][:, :, None], axis=-1)[:, :, 0]

    total, count = np.zeros(length), np.zeros(length)
    held = held_out(stream, length, segments=run.segments, windows=windows, tokens=tokens)
    for rows in held:
        losses = np.asarray(token_losses(run.params, rows), np.float64)
        total += (losses * rows["weights"]).sum(0)
        count += rows["weights"].sum(0)
    return total / np.maximum(count, 1)
