import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.train.support import first_batch, resolved
from tests.train.support import light_compiler as light_compiler
from tests.train.tasks.support import tiny_translator
from train.assembly import make_engine, make_task, training_options
from train.errors import UserError
from train.evaluation.evaluator import evaluate_split
from train.experiment import Experiment
from train.parallel.mesh import MeshConfig
from train.tasks import translation
from train.tasks.evaluation import EvaluationOptions
from train.tasks.metrics import sacre_bleu, tokenized_bleu
from train.tasks.task import Metric, TrainingOptions
from train.tasks.translation import TranslationTask
from transformer.attention.variants.reformer import ReformerConfig
from transformer.baselines.nonautoregressive import NonAutoregressive
from transformer.hardware import Hardware
from transformer.model_context import unconstrained

SMOOTHING = 0.1


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return resolved(tiny_translator(tmp_path_factory.mktemp("translation")))


def translation_task(experiment: Experiment) -> TranslationTask:
    task = make_task(experiment)
    assert isinstance(task, TranslationTask)
    return task


@pytest.fixture(scope="module")
def task(experiment: Experiment) -> TranslationTask:
    return translation_task(experiment)


def test_separate_source_table_has_the_vocabulary_size(task: TranslationTask) -> None:
    """With fewer rows, several tokens would silently share a row."""
    words = task.model_config.vocab_size
    shared = task.model_config.encoder
    assert shared is not None
    for own in (words - 1, words):
        encoder = dataclasses.replace(shared, vocab_size=own)
        model = dataclasses.replace(task.model_config, encoder=encoder, vocab_size=0)
        unresolved = dataclasses.replace(task, model_config=model)
        if own == words:
            found = unresolved.resolve(unresolved.prepare_corpus())
            assert found.model_config.encoder == encoder
            continue
        with pytest.raises(
            UserError, match=rf"model\.encoder\.vocab_size {own}: .* {words} tokens"
        ):
            unresolved.resolve(unresolved.prepare_corpus())


def test_mixer_without_cache_is_rejected_before_training(task: TranslationTask) -> None:
    model = task.model_config
    block = dataclasses.replace(model.layer_pattern[0], mixer=ReformerConfig(num_heads=2))
    model = dataclasses.replace(model, layer_pattern=(block,))
    uncached = dataclasses.replace(task, model_config=model)
    with pytest.raises(ValueError, match=r"^mixer reformer: has no cache, and translations are"):
        uncached.make_model(Hardware(), unconstrained)


@pytest.mark.full
@pytest.mark.parametrize("training", [True, False])
def test_label_smoothing_is_used_in_training_only(
    experiment: Experiment, task: TranslationTask, training: bool
) -> None:
    """The expected loss uses the logits of all positions."""
    model = task.make_model(Hardware(), unconstrained)
    params = jax.jit(model.init_params)(jax.random.key(0))
    batch = first_batch(experiment)
    rows = len(batch["tokens"])
    keys = jax.random.split(jax.random.key(1), rows) if training else None
    result = jax.jit(task.make_loss_fn(model))(params, batch, keys)["loss"]
    kwargs = {name: batch[name] for name in ("source_segments", "segments")}
    forward = jax.jit(lambda *inputs: model.apply(*inputs, dropout_rngs=keys, **kwargs).logits)
    logits = forward({"params": params}, batch["source"], batch["tokens"])
    words = task.model_config.vocab_size
    log_probs = jax.nn.log_softmax(logits[..., :words], axis=-1)
    of_target = jnp.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
    smoothing = SMOOTHING if training else 0.0
    each = -((1 - smoothing) * of_target + smoothing * log_probs.mean(axis=-1))
    assert float(result.total) == pytest.approx(float((each * batch["weights"]).sum()), rel=1e-5)
    assert float(result.weight) == batch["segments"].sum()


@pytest.mark.full
def test_bleu_is_computed_from_translations(experiment: Experiment, task: TranslationTask) -> None:
    """BLEU of all pairs at the end; during training the loss alone, unless requested."""
    engine = make_engine(experiment, Hardware(count=8))
    corpus, params = task.prepare_corpus(), engine.init().params
    actual = evaluate_split(experiment, engine, params, corpus, "test", whole=True)
    split = corpus.split("test")
    sources = [split.source[number] for number in range(len(split.pairs))]
    texts = task.translate_sources(engine.model, params, corpus.tokenizer, sources)
    references = [pair.target for pair in split.pairs]
    assert len(texts) == 21
    assert actual["bleu"] == sacre_bleu(texts, references).score
    assert actual["tokenised_bleu"] == tokenized_bleu(texts, references, "de").score
    assert actual["perplexity"] == pytest.approx(np.exp(actual["loss"]))
    whole = dataclasses.replace(experiment.evaluation, num_batches=0)
    for evaluation in (experiment.evaluation, whole):
        changed = dataclasses.replace(experiment, evaluation=evaluation)
        on_the_way = evaluate_split(changed, engine, params, corpus, "test", whole=False)
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

    model: Any = "a model with weights"
    indices: list[int] = []

    def mean_losses(*arguments: Any) -> dict[str, float]:
        assert arguments[0] is model
        return {"loss": 2.0}

    def bleu_scores(self: Any, *arguments: Any) -> dict[str, float]:
        assert arguments[:3] == (model, corpus, "test")
        indices.extend(arguments[3])
        return {"bleu": 3.0}

    monkeypatch.setattr(translation, "mean_losses", mean_losses)
    monkeypatch.setattr(TranslationTask, "bleu_scores", bleu_scores)
    config = dataclasses.replace(task.config, compute_bleu=compute)
    other = dataclasses.replace(task, config=config)
    corpus = other.prepare_corpus()
    options = EvaluationOptions(
        batch_size=5, max_batches=None if full_split else 1, is_final=full_split
    )
    metrics = other.evaluate(model, corpus, "test", options)
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


def test_batches_are_independent_of_devices(experiment: Experiment, task: TranslationTask) -> None:
    """Rows are a multiple of 8, however many devices share them."""
    batches = task.training_batches(task.prepare_corpus(), training_options(experiment))
    for cursor in range(9):
        batch = batches.host_batch(cursor, 0, 1)
        assert len(batch["tokens"]) % 8 == 0
        longer = max(batch["tokens"].shape[1], batch["source"].shape[1])
        assert len(batch["tokens"]) * longer <= task.data.batch_tokens
    assert experiment.row_multiple == ("data.batch_size_multiple", 8)
    assert MeshConfig().axis_sizes(8)["data"] == 8


def test_batches_by_number_of_pairs(task: TranslationTask) -> None:
    data = dataclasses.replace(task.data, batch_tokens=0)
    fixed = dataclasses.replace(task, data=data)
    corpus = fixed.prepare_corpus()
    batches = fixed.training_batches(corpus, TrainingOptions(batch_size=12, seed=0, steps=1))
    actual = [batches.host_batch(cursor, 0, 1) for cursor in range(batches.batches_per_epoch)]
    assert {len(batch["tokens"]) for batch in actual} == {12}
    assert len({batch["tokens"].shape[1] for batch in actual}) > 1
    assert sum(int(batch["weights"].any(axis=1).sum()) for batch in actual) == len(
        corpus.split("train").pairs
    )


def test_pairs_and_tokens_limit_batches(task: TranslationTask) -> None:
    data = dataclasses.replace(task.data, batch_tokens=400)
    for most, rows in ((0, 400), (16, 16)):
        limited = dataclasses.replace(task, data=data)
        options = TrainingOptions(batch_size=most, seed=0, steps=1)
        batches = limited.training_batches(limited.prepare_corpus(), options)
        actual = [batches.host_batch(cursor, 0, 1) for cursor in range(batches.batches_per_epoch)]
        assert 16 <= max(len(batch["tokens"]) for batch in actual) <= rows
        for batch in actual:
            longer = max(batch["tokens"].shape[1], batch["source"].shape[1])
            assert len(batch["tokens"]) * longer <= 400


@pytest.mark.full
def test_anomaly_detector_compares_target_lengths(
    experiment: Experiment, task: TranslationTask
) -> None:
    engine = make_engine(experiment, Hardware())
    batch = first_batch(experiment)
    for name in ("source", "source_segments"):  # sources longer than their translations
        batch[name] = np.pad(batch[name], ((0, 0), (0, 3)))
    state, _ = engine.step(engine.init(), engine.put_batch(batch))
    watch: Any = state.anomaly_detector
    assert watch.lengths[-1] == batch["tokens"].shape[1]


@pytest.mark.full
def test_nonautoregressive_translation(experiment: Experiment, task: TranslationTask) -> None:
    """Without a causal mask, the model predicts tokens in parallel and also learns lengths."""
    config = dataclasses.replace(experiment.model, causal=False)
    parallel = dataclasses.replace(experiment, model=config)
    other, engine = translation_task(parallel), make_engine(parallel, Hardware(count=8))
    assert isinstance(engine.model, NonAutoregressive)
    assert task.supported_options[0] == "beams"
    assert other.supported_options == ()  # no search
    corpus, params = other.prepare_corpus(), engine.init().params
    batch: Any = other.training_batches(corpus, training_options(parallel)).host_batch(0, 0, 1)
    keys = jax.random.split(jax.random.key(1), len(batch["tokens"]))
    losses = jax.jit(other.make_loss_fn(engine.model))(params, batch, keys)
    assert set(losses) == {"loss", "loss/length"}
    assert float(losses["loss/length"].total) > 0
    actual = evaluate_split(parallel, engine, params, corpus, "test", whole=True)
    assert set(actual) == {"loss", "perplexity", "bleu", "tokenised_bleu"}
