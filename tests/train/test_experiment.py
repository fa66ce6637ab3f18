"""Contradictory settings raise before anything is read."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import tiny
from tests.train.tasks.support import tiny_classifier, tiny_translator
from train.data.bitext import BitextDataConfig
from train.data.text_labels import ClassificationDataConfig
from train.errors import UsageError
from train.estimate.batch_shapes import max_batch_shape
from train.experiment import EvaluationConfig, Experiment, SampleConfig
from train.run import for_local_devices
from train.tasks.classification import Classification, Tagging
from train.tasks.masked_language_modeling import MaskedLanguageModeling
from train.tasks.translation import Translation
from transformer import EncoderConfig


def with_model(experiment: Experiment, **changes: Any) -> dict[str, Any]:
    """Return a change of an experiment, to another model."""
    return {"model": dataclasses.replace(experiment.model, **changes)}


@pytest.fixture
def text(tmp_path: Path) -> Experiment:
    return tiny(tmp_path)


@pytest.fixture
def classifier(tmp_path: Path) -> Experiment:
    return tiny_classifier(tmp_path)


@pytest.fixture
def translator(tmp_path: Path) -> Experiment:
    return tiny_translator(tmp_path)


def changed(experiment: Experiment, **changes: Any) -> Experiment:
    return dataclasses.replace(experiment, **changes)


def assert_refused(experiment: Experiment, words: str, **changes: Any) -> None:
    with pytest.raises(UsageError, match=words):
        changed(experiment, **changes)


def test_data_and_model_must_suit_the_task(
    text: Experiment, classifier: Experiment, translator: Experiment
) -> None:
    for task in (Classification(), Tagging(), Translation()):
        words = f"task {type(task).__name__}: needs data of class .*, not TextDataConfig"
        assert_refused(text, words, task=task)
    assert_refused(text, "needs data of class TextDataConfig, not Bitext", data=BitextDataConfig())
    encoder = with_model(text, encoder=EncoderConfig())
    assert_refused(text, r"model\.encoder: .* which has no source text", **encoder)
    no_encoder = with_model(translator, encoder=None)
    assert_refused(translator, r"model\.encoder: .*; give an EncoderConfig", **no_encoder)
    words = r"model\.causal: .* reads both sides of a token"
    assert_refused(text, words, task=MaskedLanguageModeling())
    causal = with_model(classifier, causal=True)
    assert changed(classifier, **causal).model.causal  # pooling by the mean is allowed
    words = r"task\.pooling first: .* sees no other"
    assert_refused(classifier, words, task=Classification(), **causal)
    words = r"task\.word_dropout: would drop the first token"
    assert_refused(classifier, words, task=Classification(word_dropout=0.1))


@pytest.mark.parametrize("setting", [{"stride": 3}, {"compression_baselines": True}])
def test_text_only_settings(classifier: Experiment, setting: dict[str, Any]) -> None:
    words = f"evaluation.{next(iter(setting))}: works for running text only"
    assert_refused(classifier, words, evaluation=EvaluationConfig(every=0, **setting))


def test_lengths_follow_the_data(text: Experiment, classifier: Experiment) -> None:
    """The tables of positions have 16 rows."""
    assert isinstance(classifier.data, ClassificationDataConfig)
    longer = dataclasses.replace(classifier.data, max_length=17)
    assert_refused(classifier, r"data\.max_length 17: .* positions has 16 rows", data=longer)
    assert (classifier.sequence_length, classifier.has_segments) == (16, True)
    dataclasses.replace(text, evaluation=EvaluationConfig(stride=16))
    words = "evaluation.stride 17: is beyond data.sequence_length 16"
    assert_refused(text, words, evaluation=EvaluationConfig(stride=17))


def in_tokens(translator: Experiment, most: int) -> BitextDataConfig:
    """Return a translator's data with another token limit."""
    assert isinstance(translator.data, BitextDataConfig)
    return dataclasses.replace(translator.data, batch_tokens=most)


def test_batches_have_rows_or_tokens(classifier: Experiment, translator: Experiment) -> None:
    rows, many = in_tokens(translator, 0), in_tokens(translator, 1600)
    changes: dict[str, Any]
    for changes, shape in (
        ({}, (8, 16)),  # 80 tokens do not fit the minimum of 8 pairs of 16
        ({"data": rows, "batch_size": 12}, (12, 16)),
        ({"data": many}, (96, 16)),
        ({"data": many, "batch_size": 24}, (24, 16)),
        ({"data": in_tokens(translator, 16)}, (8, 16)),
    ):
        assert max_batch_shape(changed(translator, **changes)) == shape
    words = r"data\.batch_tokens 15: is less than .* 16 tokens"
    assert_refused(translator, words, data=in_tokens(translator, 15))
    words = r"batch_size 0: give 1 or more, or \(translation\) data\.batch_tokens"
    assert_refused(translator, words, data=rows, batch_size=0)
    words = r"batch_size 12: is not a multiple of data\.batch_size_multiple 8"
    assert_refused(translator, words, batch_size=12)
    assert_refused(translator, "batch_size -8: give 0 or more", batch_size=-8)
    assert_refused(classifier, "batch_size 0: give 1 or more", batch_size=0)


def test_microbatches_must_divide_the_batch(classifier: Experiment, translator: Experiment) -> None:
    words = "grad_accum_steps 3: does not divide "
    assert_refused(classifier, words + "batch_size 8", grad_accum_steps=3)
    assert_refused(translator, words + r"data\.batch_size_multiple 8", grad_accum_steps=3)
    rows: dict[str, Any] = {"data": in_tokens(translator, 0), "batch_size": 8}
    assert_refused(translator, words + "batch_size 8", grad_accum_steps=3, **rows)
    four = dataclasses.replace(translator, grad_accum_steps=4)
    assert four.row_multiple == ("data.batch_size_multiple", 8)


def test_numbers_of_steps_and_seeds(text: Experiment) -> None:
    for name in ("steps", "grad_accum_steps", "log_every"):
        changed(text, **{name: 1})
        assert_refused(text, f"{name} 0: give 1 or more", **{name: 0})
    assert dataclasses.replace(text, seed=2**32 - 1).seed == 2**32 - 1
    assert_refused(text, "seed -1: give 0 or more", seed=-1)
    assert_refused(text, f"seed {2**32}: is too large", seed=2**32)
    for profile, steps in (("1:12", (1, 12)), ("3:3", (3, 3)), ("", None)):
        assert dataclasses.replace(text, profile=profile).profiled_steps == steps
    for profile in ("0:3", "4:3", "3:13", "3", "a:b"):
        assert_refused(text, f"profile {profile}: is not a range of the run's", profile=profile)


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (MaskedLanguageModeling, {"mlm_probability": 0.0}, "give more than 0"),
        (
            MaskedLanguageModeling,
            {"mask_replace_prob": 0.8, "random_replace_prob": 0.3},
            r"task\.mask_replace_prob 0\.8, task\.random_re",
        ),
        (Classification, {"num_labels": -1}, r"task\.num_labels -1: give 0 or more"),
        (Tagging, {"classifier_dropout": 1.0}, r"task\.classifier_dropout 1\.0: give less than 1"),
        (Translation, {"num_beams": 0}, r"task\.num_beams 0: give 1 or more"),
        (Translation, {"label_smoothing": 1.0}, r"task\.label_smoothing 1\.0: give less than 1"),
        (Translation, {"length_penalty": -1.0}, r"task\.length_penalty -1\.0: give 0 or more"),
        (EvaluationConfig, {"average_checkpoints": 0}, "average_checkpoints 0: give 1 or more"),
        (SampleConfig, {"temperature": -1.0}, r"^sample\.temperature -1"),
    ],
)
def test_invalid_settings(config: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises((UsageError, ValueError), match=words):
        config(**settings)


def test_loading_turns_offloading_off(text: Experiment) -> None:
    """Evaluation has no gradients, and a CPU has no offload; other policies stay."""
    for remat, expected in (("offload", "none"), ("dots", "dots")):
        asked = changed(text, **with_model(text, remat=remat))
        assert for_local_devices(asked).model.remat == expected
