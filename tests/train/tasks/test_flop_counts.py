"""FLOPs that `describe` reports for each task, against the matmuls in its loss program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.race.mixer_costs import products
from train.assembly import make_task
from train.config.experiment_files import find_experiment
from transformer.flops import count_token_flops
from transformer.hardware import Hardware
from transformer.model_context import unconstrained
from transformer.parameter_counts import abstract_parameters

B, T = 4, 40


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


TEXT = {"tokens": integers(B, T), "segments": integers(B, T)}
WORDS = {**TEXT, "targets": integers(B, T), "weights": floats(B, T), "positions": integers(B, T)}
CLASSES = {**TEXT, "targets": integers(B), "weights": floats(B)}
PAIRS = {**WORDS, "source": integers(B, T), "source_segments": integers(B, T)}
del PAIRS["positions"]


@pytest.mark.parametrize(
    ("name", "vocabulary", "classes", "batch", "head"),
    [
        ("trec", 8000, 6, CLASSES, 2 * 128 * 6 / T),
        ("trec:bag", 8000, 6, CLASSES, 2 * 128 * 6 / T),
        ("ud_ewt", 4000, 17, WORDS, 2 * 128 * 17),
        ("bert_tiny", 8192, 0, WORDS, 0),
        ("multi30k", 8064, 0, PAIRS, 0),
        ("wikitext2", 3072, 0, WORDS, 0),
    ],
)
def test_flops_match_the_loss_program(
    name: str, vocabulary: int, classes: int, batch: dict[str, Any], head: float
) -> None:
    """Exactly, except for class logits, which are not counted: `head` FLOPs per token."""
    experiment = find_experiment(name)
    experiment = dataclasses.replace(
        experiment, model=dataclasses.replace(experiment.model, vocab_size=vocabulary)
    )
    if classes:
        task: Any = experiment.task
        experiment = dataclasses.replace(
            experiment, task=dataclasses.replace(task, num_labels=classes)
        )
    if hasattr(experiment.data, "sequence_length"):
        data: Any = experiment.data
        experiment = dataclasses.replace(
            experiment, data=dataclasses.replace(data, sequence_length=T)
        )
    learned = make_task(experiment)
    model = learned.make_model(Hardware(), unconstrained)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
    program = jax.make_jaxpr(learned.make_loss_fn(model))(
        abstract_parameters(model).shapes, batch, keys
    )
    counted = count_token_flops(model, T, learned.target_fraction).total(causal=False)
    assert products(program.jaxpr) / (B * T) == pytest.approx(counted + head, rel=1e-6)
