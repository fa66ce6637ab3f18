"""Shipped configs of published models have the published parameter counts (shapes only)."""

import dataclasses

import pytest

from train.assembly import make_task
from train.config.experiment_files import find_experiment
from transformer import AttentionConfig, Hardware, LanguageModel
from transformer.model_context import unconstrained
from transformer.parameter_counts import count_parameters

EXACT = {
    "gpt2:small": 124_439_808,
    "gpt2:medium": 354_823_168,
    "gpt2:large": 774_030_080,
    "gpt2:xl": 1_557_611_200,
    "llama:1-7b": 6_738_415_616,
    "llama:2-7b": 6_738_415_616,
    "llama:3-8b": 8_030_261_248,
    "llama:3.2-1b": 1_235_814_400,
    "bert:base": 109_482_240,
    "bert:large": 335_141_888,
    # Without two token types and the pooler, of D^2 + D.
    "bert:base-mlm": 109_482_240 - 2 * 768 - 768 * 769,
    "bert:large-mlm": 335_141_888 - 2 * 1024 - 1024 * 1025,
    "transformer_base": 63_045_632,
    "transformer_big": 214_171_648,
}

IN_MILLIONS = {
    "gpt3:small": 125.2,
    "gpt3:medium": 355.9,
    "gpt3:large": 760.3,
    "gpt3:xl": 1517.1,
    "gpt3:2.7b": 2651.6,
    "gpt3:6.7b": 6658.4,
    "gpt3:13b": 12_936.5,
    "gpt3:175b": 174_604.3,
}


def total(name: str) -> int:
    experiment = find_experiment(name)
    return count_parameters(make_task(experiment).make_model(Hardware(), unconstrained)).total


@pytest.mark.parametrize("name", [*EXACT, *IN_MILLIONS])
def test_parameter_totals_match_publications(name: str) -> None:
    count = total(name)
    assert count == EXACT[name] if name in EXACT else round(count / 1e6, 1) == IN_MILLIONS[name]


def test_gpt3_xl_heads() -> None:
    model = find_experiment("gpt3:xl").model
    [block] = model.layer_pattern
    usual = dataclasses.replace(block, mixer=AttentionConfig(num_heads=16, head_dim=128))
    config = dataclasses.replace(model, layer_pattern=(usual,))
    assert round(count_parameters(LanguageModel(config)).total / 1e6, 1) == 1315.7


def test_compared_models_have_one_size() -> None:
    names = ("transformer", "gpt", "transformer_plus_plus", "primer")
    models = [find_experiment(f"versus:{name}").model for name in names]
    sized = [LanguageModel(dataclasses.replace(model, vocab_size=4096)) for model in models]
    totals = [count_parameters(model).total for model in sized]
    assert max(totals) < 1.01 * min(totals)
