"""Designs of scaling sweeps: sizes, batches, steps and learning rates by the stated rules."""

import dataclasses
import math

import numpy as np
import pytest

from train.config.experiment_files import find_experiment
from train.errors import UsageError, UserError
from train.experiment import CheckpointConfig, EarlyStoppingConfig
from train.scaling.design import (
    SizeRules,
    count_without_embeddings,
    design_runs,
    model_of_size,
    model_of_width,
    resolve_rule,
    width_unit,
    with_learning_rate,
    with_model_and_tokens,
)
from train.scaling.laws import ParametricLaw
from train.scaling.scaling_report import check_design, design_as_dicts, fit_results
from train.sweep.sweep_folder import RunResult

QUICKSTART = find_experiment("quickstart")  # D 192, 4 layers, 6 heads of 32, 3 of keys; muon
GPT = find_experiment("versus:gpt")  # D 256, 6 layers, 8 heads, biases, learned positions; adamw
RULES = SizeRules()


def test_heads_keep_their_width_and_models_their_shape() -> None:
    assert width_unit(QUICKSTART.model) == 64  # two query heads per KV head
    assert width_unit(GPT.model) == 32
    model = model_of_width(QUICKSTART.model, 384, RULES)
    [block] = model.layer_pattern
    mixer = block.mixer
    assert (model.d_model, model.num_layers) == (384, 8)
    assert (mixer.num_heads, mixer.num_kv_heads) == (12, 6)  # type: ignore[attr-defined]
    wide = model_of_width(QUICKSTART.model, 384, SizeRules(aspect_ratio=128))
    assert wide.num_layers == 3
    assert model_of_width(QUICKSTART.model, 64, RULES).num_layers == 1  # a third of four
    plus = find_experiment("versus:transformer_plus_plus").model  # F 688 at D 256
    assert model_of_width(plus, 128, RULES).layer_pattern[0].feed_forward.d_ff == 344  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"--widths 100: is not a multiple of 64.*; give 128"):
        model_of_width(QUICKSTART.model, 100, RULES)


def test_size_counts_no_embeddings() -> None:
    # A layer of GPT-2's kind: 12 D^2 weights, 13 D biases and gains; the final norm 2 D.
    width, layers = 256, 6
    expected = layers * (12 * width**2 + 13 * width) + 2 * width
    assert count_without_embeddings(GPT.model) == expected


@pytest.mark.parametrize("size", [3e4, 4e5])
def test_closest_model_of_a_size(size: float) -> None:
    def distance(width: int) -> float:
        actual = count_without_embeddings(model_of_width(GPT.model, width, RULES))
        return abs(math.log(actual / size))

    model = model_of_size(GPT.model, size, RULES)
    assert distance(model.d_model) == min(distance(width) for width in range(32, 352, 32))


def test_batches_and_steps_follow_the_tokens() -> None:
    base = dataclasses.replace(QUICKSTART, steps=1000)  # 8 rows of 128, 50 steps of warm-up
    long = with_model_and_tokens(base, base.model, 4_096_000, RULES)
    assert (long.batch_size, long.steps) == (8, 4000)
    assert long.schedule.warmup_steps == 200  # type: ignore[attr-defined]
    short = with_model_and_tokens(base, base.model, 51_200, RULES)
    assert (short.batch_size, short.steps) == (4, 100)
    assert short.schedule.warmup_steps == 5  # type: ignore[attr-defined]
    assert (short.evaluation.every, short.sample.every) == (0, 0)


def test_counts_that_round_to_one_number_have_names_of_their_own() -> None:
    base = find_experiment("quickstart")
    tokens = [1e6, 1_000_010, 1.004e6]  # the second is less than a step from the first
    sized = design_runs(base, [base.model], tokens=tokens, rules=SizeRules("constant"))
    names = [each.run.name for each in sized]
    assert len(names) == len(set(names)) == 2


def test_microbatches_divide_smaller_batches() -> None:
    base = dataclasses.replace(
        find_experiment("gpt2:small"),
        checkpoint=CheckpointConfig(keep_best=True),
        early_stopping=EarlyStoppingConfig(patience=3),
    )
    experiment = with_model_and_tokens(base, base.model, 1e6, SizeRules("constant"))
    assert experiment.batch_size < base.batch_size
    assert experiment.batch_size % experiment.grad_accum_steps == 0
    assert not experiment.checkpoint.keep_best  # there are no evaluations to choose by


def test_learning_rate_rules() -> None:
    narrow = dataclasses.replace(GPT.model, d_model=64)
    mup = with_learning_rate(GPT, narrow, "mup")
    assert mup.optimizer.matrix_lr_factor == 4  # type: ignore[attr-defined]
    assert (mup.model.logit_scale, mup.model.initialization.std) == (4, 0)
    assert mup.schedule == GPT.schedule
    assert with_learning_rate(GPT, GPT.model, "auto").model.logit_scale == 1
    slower = with_learning_rate(GPT, narrow, "inverse_sqrt_width")
    assert slower.schedule.learning_rate == pytest.approx(2e-3)  # type: ignore[attr-defined]
    assert with_learning_rate(GPT, narrow, "constant") == dataclasses.replace(GPT, model=narrow)
    assert [resolve_rule("auto", each) for each in (GPT, QUICKSTART)] == ["mup", "constant"]
    with pytest.raises(UsageError, match="is for adam and adamw, not for muon"):
        with_learning_rate(QUICKSTART, QUICKSTART.model, "mup")


def test_grid_of_tokens_and_budgets() -> None:
    models = [model_of_width(GPT.model, width, RULES) for width in (64, 128)]
    small = count_without_embeddings(models[0])
    sized = design_runs(
        GPT, models, tokens=[409_600], budgets=[6.0 * small * 819_200], seeds=2, rules=RULES
    )
    assert len(sized) == 8
    assert [each.run.experiment.seed for each in sized] == [0] * 4 + [1] * 4
    assert {each.tokens for each in sized if each.parameters == small} == {409_600, 819_200}
    flops = [each.flops for each in sized[:4]]
    assert flops == sorted(flops)
    # Two of the four match the budget, within half a step of the larger model.
    assert sum(abs(each / (6 * small * 819_200) - 1) < 0.02 for each in flops) == 2
    rows = design_as_dicts(sized)
    assert rows[0]["name"] == sized[0].run.name
    assert rows[0]["matrix_lr_factor"] == 256 / rows[0]["d_model"]


def test_results_are_fitted_without_failed_runs() -> None:
    law = ParametricLaw(E=1.5, A=40.0, B=60.0, alpha=0.3, beta=0.35)
    models = [model_of_width(GPT.model, width, RULES) for width in (32, 64, 96)]
    sized = design_runs(GPT, models, tokens=[2e5, 4e5, 8e5, 1.6e6], rules=RULES)
    check_design(sized)
    losses = law(
        np.array([each.parameters for each in sized]), np.array([each.tokens for each in sized])
    )
    results = {
        each.run.name: RunResult("finished", "loss", True, {"loss": float(loss)})
        for each, loss in zip(sized, losses, strict=True)
    }
    results[sized[5].run.name] = RunResult("failed", error="no memory")
    analysis = fit_results(sized, results, bootstrap_samples=2)
    assert vars(analysis.law) == pytest.approx(vars(law), rel=0.05)
    assert analysis.notes == ("1 of 12 runs failed and are left out of the fits",)
    few = {name: RunResult("failed", error="no memory") for name in results}
    few |= {each.run.name: results[each.run.name] for each in sized[:3]}
    with pytest.raises(UserError, match=r"3 runs: .* \(9 runs failed: no memory\)"):
        fit_results(sized, few)


def test_designs_that_cannot_be_fitted_raise() -> None:
    sized = design_runs(GPT, [GPT.model], tokens=[1e5, 2e5, 3e5, 4e5, 5e5], rules=RULES)
    with pytest.raises(UsageError, match="5 runs of 1 sizes and 5 numbers of tokens cannot"):
        check_design(sized)
    with pytest.raises(UsageError, match="learns from running text"):
        design_runs(find_experiment("sst2"), [GPT.model], tokens=[1e5], rules=RULES)
