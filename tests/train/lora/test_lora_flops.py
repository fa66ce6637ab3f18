"""LoRA training FLOPs in `describe` and `plan`, against the program of its gradient."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from bench.race.mixer_costs import products
from tests.train.lora.test_lora_engines import make_experiment
from tests.train.support import LENGTH
from train.assembly import make_engine
from train.engines.lora import LoRAConfig
from train.estimate.describe import describe
from train.estimate.quantities import Quantities
from train.estimate.target import parse_target
from transformer import Hardware
from transformer.flops import count_token_flops, count_training_flops

B = 2


@pytest.mark.parametrize(
    "lora",
    [
        LoRAConfig(),
        LoRAConfig(rank=3),
        LoRAConfig(rank=2, targets=("all",)),
        LoRAConfig(rank=2, targets=("key",), train_fully=("*/feed_forward/up", "embedding")),
    ],
    ids=["full", "default", "all", "with-weights-in-full"],
)
def test_flops_match_the_program_of_the_gradient(tmp_path: Path, lora: LoRAConfig) -> None:
    """Exactly, for scanned layers."""
    experiment = make_experiment(tmp_path, lora=lora)
    config = dataclasses.replace(experiment.model, pad_vocab_to_multiple=1, layer_loop="scan")
    engine = make_engine(dataclasses.replace(experiment, model=config), Hardware())
    model, layout = engine.model, engine.lora
    params: Any = jax.eval_shape(model.init_params, jax.random.key(0))
    trainable, frozen = params, None
    if layout is not None:
        trainable = jax.eval_shape(layout.init, jax.random.key(0), params)
        frozen = layout.freeze(params)
    tokens = jax.ShapeDtypeStruct((B, LENGTH), jnp.int32)

    def forward(trainable: Any, frozen: Any, tokens: Any) -> jax.Array:
        combined = trainable if layout is None else layout.combine(trainable, frozen)
        logits = model.apply({"params": combined}, tokens).logits
        assert logits is not None
        return jnp.sum(logits**2)

    def per_token(function: Any) -> float:
        program = jax.make_jaxpr(function)(trainable, frozen, tokens)
        return products(program.jaxpr) / (B * LENGTH)

    expected = count_token_flops(model, LENGTH, 1.0, layout)
    assert per_token(forward) == expected.total(causal=False)
    training = count_training_flops(model, LENGTH, 1.0, layout)
    assert per_token(jax.grad(forward)) == training.total(causal=False)


def test_describe_and_plan_count_less_for_lora(tmp_path: Path) -> None:
    settings = LoRAConfig(), LoRAConfig(rank=1)
    full, lora = (make_experiment(tmp_path, lora=each) for each in settings)
    counts = [describe(each).as_dict()["flops_per_token"] for each in (full, lora)]
    assert counts[0]["training"]["total"] == 3 * counts[0]["forward"]["total"]
    assert counts[1]["training"]["total"] < 0.8 * counts[0]["training"]["total"]
    target = parse_target("v5e:1x1")
    planned = [Quantities(each, target.hardware).training_flops for each in (full, lora)]
    assert [each.total(causal=False) for each in planned] == [
        each["training"]["total"] for each in counts
    ]
