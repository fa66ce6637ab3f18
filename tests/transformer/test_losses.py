import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.transformer.formulas import random_params_like
from transformer import (
    AttentionConfig,
    BlockConfig,
    Classifier,
    LanguageModel,
    TransformerConfig,
)
from transformer.losses import (
    auxiliary_losses,
    label_loss,
    next_token_loss,
    requested_outputs,
    token_loss,
)

MODEL = Classifier(TransformerConfig(vocab_size=3, d_model=8, num_layers=1, causal=False))


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_label_loss_matches_formula(shape: tuple[int, ...]) -> None:
    """Targets of weight 0 may be any number."""
    drawn = np.random.default_rng(0)
    logits = drawn.normal(size=(*shape, 7)).astype(np.float32)
    targets = drawn.integers(0, 7, shape)
    targets.flat[0] = logits.reshape(-1, 7)[0].argmax()
    weights = drawn.uniform(0, 2, shape).astype(np.float32)
    weights.flat[1] = 0
    batch: Any = {"targets": targets, "weights": weights}
    exp_logits = np.exp(logits.astype(np.float64))
    exp_logits /= exp_logits.sum(axis=-1, keepdims=True)
    of_target = np.take_along_axis(exp_logits, targets[..., None], axis=-1)[..., 0]
    right = logits.argmax(axis=-1) == targets
    targets.flat[1] = -100  # after the formula, which cannot index with it
    result = jax.jit(lambda logits: label_loss(MODEL, logits, batch))(logits)
    assert float(result["loss"].total) == pytest.approx(-(weights * np.log(of_target)).sum())
    assert float(result["accuracy"].total) == pytest.approx((weights * right).sum())
    for loss in result.values():
        assert float(loss.weight) == pytest.approx(weights.sum())


def test_token_loss_matches_logits() -> None:
    """The loss sums over tokens with weight; targets of weight 0 may be any number."""
    model = LanguageModel(TransformerConfig(vocab_size=7, d_model=8, num_layers=1, logit_bias=True))
    drawn = np.random.default_rng(1)
    tokens = drawn.integers(0, 7, (2, 5))
    params = random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))
    output: Any = jax.jit(model.apply)({"params": params}, tokens)
    logits = np.asarray(output.logits, np.float64)[..., :7]
    targets, weights = logits.argmax(axis=-1), drawn.uniform(1, 2, (2, 5)).astype(np.float32)
    targets[0] = (targets[0] + 1) % 7
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    of_target = np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    targets[1, 3], weights[1, 3] = -100, 0
    batch: Any = {"targets": targets, "weights": weights}
    run = jax.jit(functools.partial(token_loss, model, with_accuracy=True))
    result = run(params, output.hidden, batch)
    assert set(result) == {"loss", "accuracy"}
    assert float(result["loss"].total) == pytest.approx(-(weights * of_target).sum(), rel=1e-5)
    for loss in result.values():
        assert float(loss.weight) == pytest.approx(weights.sum())
    assert float(result["accuracy"].total) == pytest.approx(weights[1].sum())


def test_next_token_loss_of_a_packed_row_is_that_of_its_segments() -> None:
    """Without segments the second text reads the first, and its loss is another one."""
    model = LanguageModel(TransformerConfig(vocab_size=7, d_model=8, num_layers=1))
    drawn = np.random.default_rng(2)
    tokens, targets = drawn.integers(0, 7, (2, 1, 5))
    params = random_params_like(jax.eval_shape(model.init_params, jax.random.key(0)))
    batch: Any = {
        "tokens": tokens,
        "targets": targets,
        "weights": np.ones((1, 5), np.float32),
        "segments": np.array([[1, 1, 2, 2, 2]]),
        "positions": np.array([[0, 1, 0, 1, 2]]),
    }
    packed = jax.jit(functools.partial(next_token_loss, model))(params, batch)
    assert float(packed["loss"].weight) == 5
    run, separate = jax.jit(model.apply), 0.0
    for part in (np.s_[:, :2], np.s_[:, 2:]):
        logits = np.asarray(run({"params": params}, tokens[part]).logits, np.float64)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        separate -= np.take_along_axis(log_probs, targets[part][..., None], axis=-1).sum()
    assert float(packed["loss"].total) == pytest.approx(separate, rel=1e-5)
    without_segments = functools.partial(next_token_loss, model, has_segments=False)
    merged = jax.jit(without_segments)(params, batch)
    assert float(merged["loss"].total) != pytest.approx(separate, rel=1e-5)


def test_auxiliary_losses_are_summed_over_layers() -> None:
    """Each has the weight of the batch; other auxiliary outputs are ignored."""
    places = (
        {"loss/balance": jnp.array([1.0, 2.0]), "weights": jnp.ones((2, 3))},
        {"loss/balance": jnp.array([4.0]), "loss/z": jnp.array([0.5])},
    )
    result = auxiliary_losses(places, jnp.float32(3))
    assert {name: (float(x.total), float(x.weight)) for name, x in result.items()} == {
        "loss/balance": (21.0, 3.0),
        "loss/z": (1.5, 3.0),
    }
    assert auxiliary_losses((), jnp.float32(3)) == {}


def test_auxiliary_losses_are_requested_in_training_only() -> None:
    assert requested_outputs(None) == frozenset()
    assert requested_outputs(jax.random.key(0)) == {"losses"}


@pytest.mark.parametrize("tied", [True, False])
def test_logit_scale_applies_to_logits_and_loss(tied: bool) -> None:
    config = TransformerConfig(
        vocab_size=13,
        d_model=6,
        num_layers=1,
        layer_pattern=(BlockConfig(AttentionConfig(num_heads=2)),),
        tie_embeddings=tied,
        pad_vocab_to_multiple=8,
    )
    scaled = dataclasses.replace(config, logit_scale=0.25)
    tokens = np.arange(10).reshape(2, 5)
    shapes = jax.eval_shape(LanguageModel(config).init_params, jax.random.key(3))
    params = random_params_like(shapes)
    plain, output = (
        jax.jit(LanguageModel(each).apply)({"params": params}, tokens) for each in (config, scaled)
    )
    np.testing.assert_allclose(output.logits, 0.25 * plain.logits, rtol=1e-5, atol=1e-7)
    batch = {"targets": tokens, "weights": np.ones((2, 5), np.float32)}
    run = jax.jit(functools.partial(token_loss, LanguageModel(scaled)))
    loss = run(params, output.hidden, batch)["loss"]
    log_probs = jax.jit(jax.nn.log_softmax)(0.25 * np.asarray(plain.logits))
    expected = -np.take_along_axis(np.asarray(log_probs), tokens[..., None], -1).sum()
    np.testing.assert_allclose(loss.total, expected, rtol=1e-5)
