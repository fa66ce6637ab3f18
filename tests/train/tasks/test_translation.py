import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.support import light_compiler as light_compiler
from tests.train.tasks.support import tiny_translator
from train.engine import make_engine
from train.errors import UserError
from train.evaluation.metrics import sacre_bleu, tokenized_bleu
from train.parallel.mesh import MeshConfig, make_mesh
from train.tasks import translation
from train.tasks.task import Metric
from train.tasks.translation import TranslationTask
from transformer.attention.variants.reformer import ReformerConfig
from transformer.baselines.nonautoregressive import NonAutoregressive
from transformer.hardware import Hardware
from transformer.model_context import unconstrained

SMOOTHING = 0.1


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TranslationTask:
    experiment = tiny_translator(tmp_path_factory.mktemp("translation"))
    unresolved = TranslationTask(experiment)
    return TranslationTask(unresolved.resolve_experiment(unresolved.prepare_corpus()))


def test_separate_source_table_has_the_vocabulary_size(task: TranslationTask) -> None:
    """With fewer rows, several tokens would silently share a row."""
    words = task.experiment.model.vocab_size
    shared = task.experiment.model.encoder
    assert shared is not None
    for own in (words - 1, words):
        encoder = dataclasses.replace(shared, vocab_size=own)
        model = dataclasses.replace(task.experiment.model, encoder=encoder, vocab_size=0)
        unresolved = TranslationTask(dataclasses.replace(task.experiment, model=model))
        if own == words:
            assert (
                unresolved.resolve_experiment(unresolved.prepare_corpus()).model.encoder == encoder
            )
            continue
        with pytest.raises(
            UserError, match=rf"model\.encoder\.vocab_size {own}: .* {words} tokens"
        ):
            unresolved.resolve_experiment(unresolved.prepare_corpus())


def test_mixer_without_cache_is_rejected_before_training(task: TranslationTask) -> None:
    model = task.experiment.model
    block = dataclasses.replace(model.layer_pattern[0], mixer=ReformerConfig(num_heads=2))
    model = dataclasses.replace(model, layer_pattern=(block,))
    uncached = TranslationTask(dataclasses.replace(task.experiment, model=model))
    with pytest.raises(ValueError, match=r"^mixer reformer: has no cache, and translations are"):
        uncached.make_model(Hardware(), unconstrained)


@pytest.mark.full
@pytest.mark.parametrize("training", [True, False])
def test_label_smoothing_is_used_in_training_only(task: TranslationTask, training: bool) -> None:
    """The expected loss uses the logits of all positions."""
    model = task.make_model(Hardware(), unconstrained)
    params = jax.jit(model.init_params)(jax.random.key(0))
    batch: Any = task.training_batches(task.prepare_corpus()).host_batch(0, 0, 1)
    rows = len(batch["tokens"])
    keys = jax.random.split(jax.random.key(1), rows) if training else None
    result = jax.jit(task.make_loss_fn(model))(params, batch, keys)["loss"]
    kwargs = {name: batch[name] for name in ("source_segments", "segments")}
    forward = jax.jit(lambda *inputs: model.apply(*inputs, dropout_rngs=keys, **kwargs).logits)
    logits = forward({"params": params}, batch["source"], batch["tokens"])
    words = task.experiment.model.vocab_size
    log_probs = jax.nn.log_softmax(logits[..., :words], axis=-1)
    of_target = jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
    smoothing = SMOOTHING if training else 0.0
    each = -((1 - smoothing) * of_target + smoothing * log_probs.mean(axis=-1))
    assert float(result.total) == pytest.approx(float((each * batch["weights"]).sum()), rel=1e-5)
    assert float(result.weight) == batch["segments"].sum()


@pytest.mark.full
def test_bleu_is_computed_from_translations(task: TranslationTask) -> None:
    """BLEU of all pairs at the end; during training the loss alone, unless requested."""
    engine = make_engine(task.experiment, Hardware(count=8))
    corpus, params = task.prepare_corpus(), engine.init().params
    actual = task.evaluate(engine, params, corpus, "test", full_split=True)
    split = corpus.split("test")
    sources = [split.source[number] for number in range(len(split.pairs))]
    texts = task.translate_sources(engine.model, params, corpus.tokenizer, sources)
    references = [pair.target for pair in split.pairs]
    assert len(texts) == 21
    assert actual["bleu"] == sacre_bleu(texts, references).score
    assert actual["tokenised_bleu"] == tokenized_bleu(texts, references, "de").score
    assert actual["perplexity"] == pytest.approx(np.exp(actual["loss"]))
    on_the_way = task.evaluate(engine, params, corpus, "test", full_split=False)
    assert set(on_the_way) == {"loss", "perplexity"}


@pytest.mark.parametrize(
    ("compute", "full_split", "scored"),
    [("end", False, 0), ("end", True, 21), ("always", False, 5), ("always", True, 21)],
)
def test_bleu_of_full_splits_or_of_every_evaluation(
    task: TranslationTask,
    monkeypatch: pytest.MonkeyPatch,
    compute: Any,
    full_split: bool,
    scored: int,
) -> None:
    """Of the pairs that the loss is of: five in the one batch of an evaluation during training."""

    engine: Any = SimpleNamespace(mesh=make_mesh(MeshConfig(), jax.devices()[:1]))
    indices: list[int] = []

    def mean_losses(*arguments: Any) -> dict[str, float]:
        assert arguments[:2] == (engine, "params")
        return {"loss": 2.0}

    def bleu_scores(self: Any, *arguments: Any) -> dict[str, float]:
        assert arguments[:4] == (engine, "params", corpus, corpus.split("test"))
        indices.extend(arguments[4])
        return {"bleu": 3.0}

    monkeypatch.setattr(translation, "mean_losses", mean_losses)
    monkeypatch.setattr(TranslationTask, "bleu_scores", bleu_scores)
    config = dataclasses.replace(task.task_config, compute_bleu=compute)
    evaluation = dataclasses.replace(task.experiment.evaluation, batch_size=5)
    other = TranslationTask(
        dataclasses.replace(task.experiment, task=config, evaluation=evaluation)
    )
    corpus = other.prepare_corpus()
    metrics = other.evaluate(engine, "params", corpus, "test", full_split=full_split)
    expected = {"loss": 2.0, "perplexity": pytest.approx(np.exp(2.0))}
    assert metrics == (expected | {"bleu": 3.0} if scored else expected)
    assert len(indices) == scored
    assert indices == sorted(set(indices))
    best = "bleu" if compute == "always" else "loss"
    assert other.selection_metric(corpus) == Metric(best, lower_is_better=best == "loss")


def test_long_prompt_is_an_error(task: TranslationTask) -> None:
    task.check_prompt("the " * 15, task.prepare_corpus().tokenizer)
    with pytest.raises(UserError, match="prompt: has 18 tokens and the model reads 16"):
        task.check_prompt("the " * 17, task.prepare_corpus().tokenizer)


def test_signature_of_bleu(task: TranslationTask) -> None:
    assert "tok:13a" in task.metric_notes["bleu_signature"]
    assert "case:lc" in task.metric_notes["bleu_signature"]


def test_batches_are_independent_of_devices(task: TranslationTask) -> None:
    """Rows are a multiple of 8, however many devices share them."""
    batches = task.training_batches(task.prepare_corpus())
    for cursor in range(9):
        batch = batches.host_batch(cursor, 0, 1)
        assert len(batch["tokens"]) % 8 == 0
        longer = max(batch["tokens"].shape[1], batch["source"].shape[1])
        assert len(batch["tokens"]) * longer <= task.data.batch_tokens
    assert task.experiment.row_multiple == ("data.batch_size_multiple", 8)
    assert MeshConfig().axis_sizes(8)["data"] == 8


def test_batches_by_number_of_pairs(task: TranslationTask) -> None:
    data = dataclasses.replace(task.data, batch_tokens=0)
    fixed = TranslationTask(dataclasses.replace(task.experiment, data=data, batch_size=12))
    corpus = fixed.prepare_corpus()
    batches = fixed.training_batches(corpus)
    actual = [batches.host_batch(cursor, 0, 1) for cursor in range(batches.batches_per_epoch)]
    assert {len(batch["tokens"]) for batch in actual} == {12}
    assert len({batch["tokens"].shape[1] for batch in actual}) > 1
    assert sum(int(batch["weights"].any(axis=1).sum()) for batch in actual) == len(
        corpus.split("train").pairs
    )


def test_pairs_and_tokens_limit_batches(task: TranslationTask) -> None:
    data = dataclasses.replace(task.data, batch_tokens=400)
    for most, rows in ((0, 400), (16, 16)):
        limited = TranslationTask(dataclasses.replace(task.experiment, data=data, batch_size=most))
        batches = limited.training_batches(limited.prepare_corpus())
        actual = [batches.host_batch(cursor, 0, 1) for cursor in range(batches.batches_per_epoch)]
        assert 16 <= max(len(batch["tokens"]) for batch in actual) <= rows
        for batch in actual:
            longer = max(batch["tokens"].shape[1], batch["source"].shape[1])
            assert len(batch["tokens"]) * longer <= 400


@pytest.mark.full
def test_anomaly_detector_compares_target_lengths(task: TranslationTask) -> None:
    engine = make_engine(task.experiment, Hardware())
    batch: Any = task.training_batches(task.prepare_corpus()).host_batch(0, 0, 1)
    for name in ("source", "source_segments"):  # sources longer than their translations
        batch[name] = np.pad(batch[name], ((0, 0), (0, 3)))
    state, _ = engine.step(engine.init(), engine.put_batch(batch))
    watch: Any = state.anomaly_detector
    assert watch.lengths[-1] == batch["tokens"].shape[1]


@pytest.mark.full
def test_nonautoregressive_translation(task: TranslationTask) -> None:
    """Without a causal mask, the model predicts tokens in parallel and also learns lengths."""
    config = dataclasses.replace(task.experiment.model, causal=False)
    other = TranslationTask(dataclasses.replace(task.experiment, model=config))
    engine = make_engine(other.experiment, Hardware(count=8))
    assert isinstance(engine.model, NonAutoregressive)
    assert (task.supported_options, other.supported_options) == (("beams",), ())  # no search
    corpus, params = other.prepare_corpus(), engine.init().params
    batch: Any = other.training_batches(corpus).host_batch(0, 0, 1)
    keys = jax.random.split(jax.random.key(1), len(batch["tokens"]))
    losses = jax.jit(other.make_loss_fn(engine.model))(params, batch, keys)
    assert set(losses) == {"loss", "loss/length"}
    assert float(losses["loss/length"].total) > 0
    actual = other.evaluate(engine, params, corpus, "test", full_split=True)
    assert set(actual) == {"loss", "perplexity", "bleu", "tokenised_bleu"}
