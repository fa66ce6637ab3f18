"""Contradictory settings raise before anything is read."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import tiny
from tests.train.tasks.support import tiny_classifier, tiny_translator
from train.data.example_configs import BitextDataConfig
from train.errors import UsageError
from train.estimate.batch_shapes import max_batch_shape
from train.experiment import EvaluationConfig, Experiment
from train.run import for_local_devices
from train.tasks.task_configs import Classification, MaskedLanguageModeling, Tagging, Translation
from transformer import EncoderConfig


def replaced_model(experiment: Experiment, **changes: Any) -> dict[str, Any]:
    return {"model": dataclasses.replace(experiment.model, **changes)}


def test_task_accepts_its_own_data_only(tmp_path: Path) -> None:
    for task in (Classification(), Tagging(), Translation()):
        name = type(task).__name__
        message = f"task {name}: needs data of class .*, not TextDataConfig"
        with pytest.raises(UsageError, match=message):
            tiny(tmp_path, task=task)
    message = (
        "task LanguageModeling: needs data of class TextDataConfig, not BitextDataConfig; set data"
    )
    with pytest.raises(UsageError, match=message):
        tiny(tmp_path, data=BitextDataConfig())


def test_only_translation_has_an_encoder(tmp_path: Path) -> None:
    translator = tiny_translator(tmp_path)
    with pytest.raises(UsageError, match=r"model\.encoder: .* Translation; give an EncoderConfig"):
        dataclasses.replace(translator, **replaced_model(translator, encoder=None))
    experiment = tiny(tmp_path)
    with pytest.raises(UsageError, match=r"model\.encoder: .* which has no source text"):
        tiny(tmp_path, **replaced_model(experiment, encoder=EncoderConfig()))


def test_tasks_that_reject_causal_models(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.causal: .* reads both sides of a token"):
        tiny(tmp_path, task=MaskedLanguageModeling())
    classifier = tiny_classifier(tmp_path)
    causal = replaced_model(classifier, causal=True)
    assert dataclasses.replace(classifier, **causal).model.causal  # pooling by the mean is allowed
    with pytest.raises(UsageError, match=r"task\.pooling first: .* sees no other"):
        dataclasses.replace(classifier, task=Classification(), **causal)


def test_word_dropout_with_first_token_pooling_raises(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"task\.word_dropout: would drop the first token"):
        dataclasses.replace(tiny_classifier(tmp_path), task=Classification(word_dropout=0.1))


@pytest.mark.parametrize("setting", [{"stride": 3}, {"compression_baselines": True}])
def test_text_only_settings(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(
        UsageError, match=f"evaluation.{next(iter(setting))}: works for running text only"
    ):
        tiny_classifier(tmp_path, evaluation=EvaluationConfig(every=0, **setting))


def test_lengths_follow_the_data(tmp_path: Path) -> None:
    classifier, translator = tiny_classifier(tmp_path), tiny_translator(tmp_path)
    data: Any = classifier.data
    longer = dataclasses.replace(data, max_length=17)
    with pytest.raises(UsageError, match=r"data\.max_length 17: .* positions has 16 rows"):
        dataclasses.replace(classifier, data=longer)
    assert (classifier.sequence_length, classifier.has_segments) == (16, True)
    few = in_tokens(translator, 15)
    with pytest.raises(UsageError, match=r"data\.batch_tokens 15: is less than .* 16 tokens"):
        dataclasses.replace(translator, data=few)


def in_tokens(translator: Experiment, most: int) -> BitextDataConfig:
    """Return a translator's data with another token limit."""
    data = translator.data
    assert isinstance(data, BitextDataConfig)
    return dataclasses.replace(data, batch_tokens=most)


def test_batch_size_counts_examples(tmp_path: Path) -> None:
    translator = tiny_translator(tmp_path)
    rows, many = in_tokens(translator, 0), in_tokens(translator, 1600)
    assert max_batch_shape(translator) == (
        8,
        16,
    )  # 80 tokens do not fit the minimum of 8 pairs of 16
    assert max_batch_shape(dataclasses.replace(translator, data=rows, batch_size=12)) == (12, 16)
    assert max_batch_shape(dataclasses.replace(translator, data=many)) == (96, 16)
    assert max_batch_shape(dataclasses.replace(translator, data=many, batch_size=24)) == (24, 16)
    for experiment, message in (
        (dict(data=rows, batch_size=0), r"batch_size 0: give 1 or more, or set data\.batch_tokens"),
        (dict(batch_size=12), r"batch_size 12: is not a multiple of data\.batch_size_multiple 8"),
        (dict(batch_size=-8), "batch_size -8: give 0 or more"),
    ):
        with pytest.raises(UsageError, match=message):
            dataclasses.replace(translator, **experiment)
    with pytest.raises(UsageError, match="batch_size 0: give 1 or more"):
        tiny_classifier(tmp_path, batch_size=0)


def test_microbatches_must_divide_the_batch(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="grad_accum_steps 3: does not divide batch_size 8"):
        tiny_classifier(tmp_path, grad_accum_steps=3)
    with pytest.raises(
        UsageError, match=r"grad_accum_steps 3: does not divide data\.batch_size_multiple 8"
    ):
        tiny_translator(tmp_path, grad_accum_steps=3)
    assert tiny_translator(tmp_path, grad_accum_steps=4).row_multiple == (
        "data.batch_size_multiple",
        8,
    )
    fixed = in_tokens(tiny_translator(tmp_path), 0)
    with pytest.raises(UsageError, match="grad_accum_steps 3: does not divide batch_size 8"):
        dataclasses.replace(tiny_translator(tmp_path), data=fixed, batch_size=8, grad_accum_steps=3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MaskedLanguageModeling(mlm_probability=0.0),
            r"task\.mlm_probability 0\.0: give a fraction in \(0, 1\]",
        ),
        (
            lambda: MaskedLanguageModeling(mask_replace_prob=0.8, random_replace_prob=0.3),
            r"task\.mask_replace_prob 0\.8, task\.random_re",
        ),
        (lambda: Classification(num_labels=-1), r"task\.num_labels -1: give 0 or more"),
        (
            lambda: Tagging(classifier_dropout=1.0),
            r"task\.classifier_dropout 1\.0: give a fraction in \[0, 1\)",
        ),
        (lambda: Translation(num_beams=0), r"task\.num_beams 0: give 1 or more"),
        (lambda: Translation(label_smoothing=1.0), r"task\.label_smoothing 1\.0: give a fraction"),
        (lambda: Translation(length_penalty=-1.0), r"task\.length_penalty -1\.0: give 0 or more"),
    ],
)
def test_invalid_task_settings(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("seed", [-1, 2**32, 2**63])
def test_invalid_seeds(tmp_path: Path, seed: int) -> None:
    with pytest.raises(UsageError, match=f"seed {seed}: give an integer from 0 to"):
        tiny(tmp_path, seed=seed)
    assert tiny(tmp_path, seed=2**32 - 1).seed == 2**32 - 1


def test_loading_turns_offloading_off(tmp_path: Path) -> None:
    """Evaluation has no gradients, and a CPU has no offload; other policies stay."""
    for remat, expected in (("offload", "none"), ("dots", "dots")):
        asked = tiny(tmp_path, **replaced_model(tiny(tmp_path), remat=remat))
        assert for_local_devices(asked).model.remat == expected
