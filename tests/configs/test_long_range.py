"""Experiments of long-range tasks: every variant accepts their batches and learns."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from configs import byte_text, listops
from tests.train.support import light_compiler as light_compiler
from tests.train.support import losses
from train.assembly import make_task, training_options
from train.config.experiment_files import find_experiment
from train.data.listops import ListOpsDataConfig
from train.experiment import Experiment
from train.optim.schedules import ScheduleConfig
from transformer import MIXERS, Hardware
from transformer.model_context import unconstrained
from transformer.parameter_counts import count_parameters

VARIANTS = tuple(listops.attention_variants(listops.SMALL))


def shrunk(experiment: Experiment, **changes: Any) -> Experiment:
    """Return the experiment with few and short expressions."""
    data = ListOpsDataConfig(
        train_examples=40,
        validation_examples=9,
        test_examples=9,
        min_length=8,
        max_length=48,
        max_buckets=1,
    )
    return dataclasses.replace(experiment, data=data, **changes)


def test_every_bidirectional_variant_is_included() -> None:
    """Attention variants only; Primer is for language models."""
    assert set(VARIANTS) <= set(MIXERS)
    for file in (listops, byte_text):
        names = [*VARIANTS, *(f"arena_{name}" for name in VARIANTS)]
        assert list(file.EXPERIMENTS) == names
        for name, experiment in file.EXPERIMENTS.items():
            *between, block = experiment.model.layer_pattern
            assert block.mixer.kind == name.removeprefix("arena_")
            local = ["sliding_window"] if block.mixer.kind == "routing" else []
            assert [each.mixer.kind for each in between] == local


def test_listops_model_has_the_published_size() -> None:
    """6 layers of 512 with feed-forwards of 2,048, 10 classes, and 17 words."""
    experiment = find_experiment("listops:arena_full")
    model = dataclasses.replace(experiment.model, vocab_size=17)
    task = make_task(dataclasses.replace(experiment, model=model))
    layer = 4 * (512 * 512 + 512) + 2 * 512 * 2048 + 2048 + 512 + 2 * 2 * 512
    result = count_parameters(task.make_model(Hardware(), unconstrained))
    assert result.total == 17 * 512 + 6 * layer + 2 * 512
    assert result.task_heads == 512 * 10 + 10
    data = experiment.data
    assert isinstance(data, ListOpsDataConfig)
    assert data == ListOpsDataConfig(max_buckets=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_models_accept_published_lengths(name: str) -> None:
    """Traced only; nothing is computed."""
    for file, words, classes in (("listops", 17, 10), ("byte_text", 257, 2)):
        experiment = find_experiment(f"{file}:arena_{name}")
        model = dataclasses.replace(experiment.model, vocab_size=words, layer_loop="scan")
        task = make_task(dataclasses.replace(experiment, model=model))
        module = task.make_model(Hardware(), unconstrained)
        tokens = jax.ShapeDtypeStruct((2, experiment.sequence_length), np.int32)
        run = functools.partial(module.init_with_output, jax.random.key(0))
        output, _ = jax.eval_shape(lambda tokens, run=run: run(tokens, segments=tokens), tokens)
        assert output.logits.shape == (2, classes)


@pytest.mark.full
@pytest.mark.parametrize("name", VARIANTS)
def test_variant_learns_from_padded_batches(name: str) -> None:
    """Rows end in padding, and the last rows of a batch are empty."""
    experiment = shrunk(listops.EXPERIMENTS[name], batch_size=24)
    corpus = make_task(experiment).prepare_corpus()
    task = make_task(experiment).resolve(corpus)
    model, batch = (
        task.make_model(Hardware(), unconstrained),
        task.training_batches(corpus, training_options(experiment)).host_batch(0, 0, 1),
    )
    assert batch["weights"].tolist() == [1] * 20 + [0] * 4
    loss, rows = task.make_loss_fn(model), jax.tree.map(jnp.asarray, batch)

    @jax.jit
    def learned(params: Any) -> Any:
        def mean(params: Any) -> jax.Array:
            result = loss(params, rows, None)["loss"]
            return result.total / result.weight

        value, gradient = jax.value_and_grad(mean)(params)
        return value, jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient)

    before, params = learned(jax.jit(model.init_params)(jax.random.key(0)))
    after, params = learned(params)
    assert after < before
    chex.assert_tree_all_finite(params)


@pytest.mark.full
def test_run_from_a_seed_only(tmp_path: Path) -> None:
    tiny = listops.ModelSize(
        num_layers=1, width=16, num_heads=2, sequence_length=48, keys_per_query=8, dropout=0.0
    )
    experiment = shrunk(
        listops.EXPERIMENTS["full"],
        model=listops.encoder(listops.attention_variants(tiny)["full"], tiny),
        schedule=ScheduleConfig("constant", learning_rate=1e-2, warmup_steps=2),
        steps=8,
        log_every=1,
    )
    run = train.fit(experiment, str(tmp_path), quiet=True)
    curve = losses(tmp_path)
    assert curve[7] + curve[8] < curve[1] + curve[2] - 0.2
    assert run.labels == tuple("0123456789")
    assert set(run.final_metrics) == {"loss", "accuracy"}
    answer = run.generate("[MAX 4 [MED 5 1 7 ] 2 ]")
    assert answer in run.labels
