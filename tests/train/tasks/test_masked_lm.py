from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from tests.train.support import first_batch, resolved
from tests.train.support import light_compiler as light_compiler
from tests.train.tasks.support import large_params, tiny_masked
from train.assembly import make_task
from train.config.experiment_files import find_experiment
from train.data.data_config import TokenizerConfig
from train.data.tokenizer import Tokenizer
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError
from train.experiment import Experiment, SampleConfig
from train.tasks.masked_language_modeling import (
    MaskedLanguageModelTask,
    _predict_tokens,
    encode_masked_prompt,
    gather_targets,
)
from train.tasks.task import SampleOptions
from transformer.hardware import Hardware
from transformer.model_context import unconstrained

END, MASK = 256, 257


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TokenizerConfig("byte"), []).with_mask_token()


def test_gathered_targets_keep_position_and_weight() -> None:
    hidden = jnp.arange(2 * 5 * 3, dtype=jnp.float32).reshape(2, 5, 3)
    batch = {
        "weights": jnp.array([[0.0, 1, 0, 0, 1], [0, 0, 0, 0, 0]]),
        "targets": jnp.arange(10).reshape(2, 5),
    }
    actual, rest = gather_targets(hidden, batch, 3)
    np.testing.assert_array_equal(rest["weights"], [[1, 1, 0], [0, 0, 0]])
    np.testing.assert_array_equal(rest["targets"][0, :2], [1, 4])
    np.testing.assert_array_equal(actual[0, :2], hidden[0, np.array([1, 4])])


def test_untrained_parts_are_reported() -> None:
    for name, words in (("base", ["model.num_token_types 2", "model.pooler"]), ("base-mlm", [])):
        notes = make_task(find_experiment(f"bert:{name}")).untrained_parts
        assert [note[: len(word)] for note, word in zip(notes, words, strict=True)] == words


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("a [MASK]b", [END, *b"a", MASK, *b"b"]),
        ("[MASK]", [END, MASK]),
        ("<mask> a<mask>", [END, MASK, *b" a", MASK]),
        ("a  [MASK] [MASK]", [END, *b"a", MASK, MASK]),
    ],
)
def test_mask_replaces_a_word_and_its_space(
    tokenizer: Tokenizer, prompt: str, tokens: list[int]
) -> None:
    assert encode_masked_prompt(tokenizer, prompt).tolist() == tokens


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return resolved(tiny_masked(tmp_path_factory.mktemp("masked")))


@pytest.fixture(scope="module")
def task(experiment: Experiment) -> MaskedLanguageModelTask:
    task = make_task(experiment)
    assert isinstance(task, MaskedLanguageModelTask)
    return task


def test_mask_token_is_added_once(task: MaskedLanguageModelTask) -> None:
    """A resumed run must find the token that it was trained with."""
    first = task.prepare_corpus()
    again = task.prepare_corpus(first.tokenizer)
    assert first.tokenizer.mask_token_id is not None
    assert again.digest == first.digest
    assert again.tokenizer.vocab_size == task.model_config.vocab_size


@pytest.mark.full
@pytest.mark.parametrize("training", [True, False])
def test_loss_counts_masked_tokens_only(
    experiment: Experiment, task: MaskedLanguageModelTask, training: bool
) -> None:
    """The expected loss uses the logits of all positions."""
    model = task.make_model(Hardware(), unconstrained)
    params = jax.jit(model.init_params)(jax.random.key(0))
    batch = first_batch(experiment)
    keys = jax.random.split(jax.random.key(1), 8) if training else None
    actual = jax.jit(task.make_loss_fn(model))(params, batch, keys)
    kwargs = {name: batch[name] for name in ("positions", "segments")}
    forward = jax.jit(lambda *inputs: model.apply(*inputs, dropout_rngs=keys, **kwargs).logits)
    logits = forward({"params": params}, batch["tokens"])
    assert logits is not None
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    each = -jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
    assert float(actual["loss"].weight) == batch["weights"].sum() == 8 * 5  # 0.3 of 16
    assert float(actual["loss"].total) == pytest.approx(float((each * batch["weights"]).sum()))
    assert ("accuracy" in actual) != training
    if not training:
        right = (jnp.argmax(logits, axis=-1) == batch["targets"]) * batch["weights"]
        assert float(actual["accuracy"].total) == float(right.sum())


def test_sample_prompt_is_checked_before_training(tmp_path: Path) -> None:
    experiment = tiny_masked(tmp_path, sample=SampleConfig(every=5))
    with pytest.raises(UserError, match=r"sample\.prompt: prompt '': has no \[MASK\]"):
        train.fit(experiment, str(tmp_path / "run"), quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def run(task: MaskedLanguageModelTask) -> Any:
    """A run whose weights are large enough for its predictions to differ."""
    model = task.make_model(Hardware(), unconstrained)
    params = large_params(model, 9)
    return SimpleNamespace(
        tokenizer=task.prepare_corpus().tokenizer,
        folder=SimpleNamespace(model_type=""),
        model=model,
        params=params,
    )


def test_masks_are_filled_as_without_padding(task: MaskedLanguageModelTask, run: Any) -> None:
    """Alone, a prompt is a row without padding: no position may see what fills up the row."""
    prompts = ["the [MASK]at sat", "[MASK]", "on a[MASK] [MASK]", "[MASK]the cat s[MASK]at"]
    pieces: list[str] = []
    texts = task.sample(run, prompts, SampleOptions(on_text=pieces.append))
    assert "".join(pieces) == "".join(texts)
    forward = jax.jit(lambda tokens: run.model.apply({"params": run.params}, tokens).logits)
    mask = run.tokenizer.mask_token_id
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = encode_masked_prompt(run.tokenizer, prompt)
        best = np.argmax(np.asarray(forward(tokens[None]))[0], axis=-1)
        assert text == run.tokenizer.decode(np.where(tokens == mask, best, tokens)).strip()
        row = np.full((1, 16), 3, np.int32)
        row[0, : len(tokens)] = tokens
        padded = _predict_tokens(run.params, row, np.int32(len(tokens)), model=run.model)
        np.testing.assert_array_equal(np.asarray(padded)[0, : len(tokens)], best)


def test_long_prompt_is_an_error(task: MaskedLanguageModelTask, run: Any) -> None:
    assert len(task.encode_prompt("the cat sat o[MASK]a", run.tokenizer)) == 16
    with pytest.raises(UserError, match="prompt: has 17 tokens and the model reads 16"):
        task.sample(run, ["the cat sat on[MASK]a"], SampleOptions())
