import dataclasses
import json
import random
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from tests.train.resumed_runs import preempted_after
from tests.train.support import NO_DETECTOR, assert_same_bits, lines_of, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.assembly import make_engine, make_task
from train.data.data_config import TokenizerConfig
from train.data.preferences import PreferenceDataConfig, parse_pair
from train.engines.lora import LoRAConfig
from train.errors import UserError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.quantities import Quantities
from train.evaluation.evaluator import evaluate_split
from train.experiment import Experiment
from train.interop.dpo_reference import add_reference
from train.interop.lora_export import merge_run
from train.tasks.language_modeling import LanguageModeling
from train.tasks.preference import (
    PreferenceOptimization,
    PreferenceTask,
    dpo_losses,
    reference_of_batch,
)
from transformer import FeedForwardConfig, Hardware, LearnedPositions
from transformer.flops import count_token_flops
from transformer.layers.moe import MoEConfig

BETA = 0.3


def make_experiment(folder: Path, **changes: Any) -> Experiment:
    """Return an experiment whose better and worse answers use different letters."""
    path = folder / "pairs.jsonl"
    if not path.exists():
        drawn = random.Random(0)
        lines = []
        for _ in range(60):
            better, worse = drawn.choice("ab"), drawn.choice("cd")
            prompt = "".join(drawn.sample("abcd", 3))
            lines.append({"prompt": prompt, "chosen": better * 2, "rejected": worse * 3})
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    experiment = tiny(folder, num_layers=1, recovery=NO_DETECTOR)
    data = PreferenceDataConfig(
        path=str(path), max_length=32, max_buckets=1, tokenizer=TokenizerConfig("byte")
    )
    model = dataclasses.replace(experiment.model, position_embedding=LearnedPositions(32))
    settings: dict[str, Any] = {
        "task": PreferenceOptimization(BETA),
        "model": model,
        "data": data,
        "lora": LoRAConfig(rank=4, targets=("all",), train_fully=()),
        "steps": 24,
    }
    return dataclasses.replace(experiment, **(settings | changes))


def pair_data(folder: Path) -> PreferenceDataConfig:
    """Return the data settings of `make_experiment`."""
    data = make_experiment(folder).data
    assert isinstance(data, PreferenceDataConfig)
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preference")


@pytest.fixture(scope="module")
def source(folder: Path) -> train.Run:
    """Return a language model over bytes, hardly trained."""
    data: Any = tiny(folder).data
    experiment = dataclasses.replace(
        make_experiment(folder),
        task=LanguageModeling(),
        data=dataclasses.replace(data, tokenizer=TokenizerConfig("byte")),
        lora=LoRAConfig(),
        steps=2,
    )
    return train.fit(experiment, str(folder / "source"), quiet=True)


def fit(folder: Path, name: str, **changes: Any) -> train.Run:
    experiment = make_experiment(folder, **changes)
    source = str(folder / "source")
    return train.fit(experiment, str(folder / name), init_from=source, quiet=True)


@pytest.fixture(scope="module")
def run(folder: Path, source: train.Run) -> train.Run:
    return fit(folder, "run")


def pair_scores(run: train.Run, params: Any, batch: Any) -> np.ndarray[Any, Any]:
    """Return the log-likelihoods of both answers of each row, one sequence at a time, in NumPy."""
    scores = np.zeros((len(batch["tokens"]), 2))
    forward = jax.jit(lambda tokens: run.model.apply({"params": params}, tokens).logits)
    for row, segment in np.ndindex(*scores.shape):
        own = batch["segments"][row] == segment + 1
        tokens, targets = batch["tokens"][row][own], batch["targets"][row][own]
        if not own.any():
            continue
        # Padding after a sequence does not change its logits: the model is causal.
        padded = np.pad(tokens, (0, len(own) - len(tokens)))
        logits = np.asarray(forward(padded[None]), np.float64)[0, : len(tokens)]
        logits -= logits.max(axis=-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        picked = log_probs[np.arange(len(targets)), targets]
        scores[row, segment] = (picked * batch["weights"][row][own]).sum()
    return scores


def test_losses_of_log_likelihoods_match_the_formula() -> None:
    """Equation 7 of Rafailov et al. 2023, of three pairs and an empty row."""
    policy = jnp.array([[-2.0, -5], [-7, -3], [-1, -1], [0, 0]])
    batch = {
        "reference_chosen": jnp.array([-3.0, -4, -2, 0]),
        "reference_rejected": jnp.array([-4.0, -6, -2.5, 0]),
        "weights": jnp.array([[0.0, 1], [1, 1], [1, 0], [0, 0]]),
    }
    losses = dpo_losses(policy, reference_of_batch(batch), BETA, batch)
    rewards = BETA * np.array([[1, -1], [-3, 3], [1, 1.5]])
    margin = rewards[:, 0] - rewards[:, 1]
    expected = {
        "loss": np.log1p(np.exp(-margin)).sum(),
        "accuracy": 1,
        "margin": margin.sum(),
        "reward_chosen": rewards[:, 0].sum(),
        "reward_rejected": rewards[:, 1].sum(),
    }
    assert {name: float(each.total) for name, each in losses.items()} == pytest.approx(expected)
    assert {float(each.weight) for each in losses.values()} == {3}


@pytest.mark.full
def test_loss_matches_formula(run: train.Run, source: train.Run) -> None:
    """Equation 7 of Rafailov et al. 2023, for every row of a batch with an empty one."""
    task = make_task(run.experiment)
    corpus = task.prepare_corpus(run.tokenizer)
    batch = corpus.split("train").batch(np.array([3, 0, 7, -1]), (32,))  # type: ignore[attr-defined]
    policy, reference = (pair_scores(run, each.params, batch) for each in (run, source))
    margin = BETA * ((policy - reference)[:3, 0] - (policy - reference)[:3, 1])
    expected = {
        "loss": np.log1p(np.exp(-margin)).mean(),
        "accuracy": (margin > 0).mean(),
        "margin": margin.mean(),
        "reward_chosen": BETA * (policy - reference)[:3, 0].mean(),
        "reward_rejected": BETA * (policy - reference)[:3, 1].mean(),
    }
    assert abs(margin).max() > 0.1
    engine = make_engine(run.experiment, Hardware())
    assert engine.lora is not None
    engine.frozen = engine.lora.freeze(source.params)
    trainable = train.load(str(run.folder.path), merged=False).params
    params = engine.lora.combine(trainable, engine.frozen)
    batch = jax.tree.map(np.asarray, batch)
    losses = jax.jit(lambda params: task.make_loss_fn(engine.model)(params, batch, None))(params)
    actual = {name: float(each.total / each.weight) for name, each in losses.items()}
    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-4)


@pytest.mark.full
def test_run_learns_the_preference(run: train.Run, source: train.Run) -> None:
    assert run.final_metrics["accuracy"] > 0.9
    assert run.final_metrics["loss"] < 0.6
    assert run.final_metrics["margin"] > 0.2
    assert train.load(str(run.folder.path)).evaluate("validation") == run.final_metrics
    # Before the first step the policy is the reference.
    task = make_task(run.experiment)
    assert isinstance(task, PreferenceTask)
    engine = make_engine(run.experiment, Hardware())
    engine.frozen = source.params
    corpus = task.prepare_corpus(run.tokenizer)
    start = evaluate_split(run.experiment, engine, source.params, corpus, "validation", whole=True)
    assert start["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert start["margin"] == 0


@pytest.mark.full
def test_resume_is_exact(folder: Path, run: train.Run) -> None:
    with preempted_after(12):
        fit(folder, "resumed")
    assert_same_bits(fit(folder, "resumed").params, run.params)


@pytest.mark.full
def test_merged_run_has_no_reference(folder: Path, run: train.Run) -> None:
    merged = merge_run(str(run.folder.path), str(folder / "merged"))
    with pytest.raises(UserError, match=r"task\.reference: is the model without its adapter"):
        merged.evaluate("validation")


@pytest.mark.full
def test_missing_adapter_raises(folder: Path, source: train.Run) -> None:
    with pytest.raises(UserError, match=r"lora.rank 0: DPO needs an adapter"):
        fit(folder, "full", lora=LoRAConfig())
    with pytest.raises(UserError, match=r"lora.train_fully embedding: DPO needs an adapter"):
        fit(folder, "partly", lora=LoRAConfig(rank=2, train_fully=("embedding",)))


def test_invalid_lines_raise() -> None:
    record: dict[str, Any] = {"prompt": "a", "chosen": "b"}
    with pytest.raises(UserError, match=r"x:1: has no field 'rejected' \(it has prompt, chosen\)"):
        parse_pair("x:1", record)
    with pytest.raises(UserError, match="chosen is not a list of messages"):
        parse_pair("x:1", record | {"rejected": [{"role": "a", "content": ""}]})


@pytest.fixture(scope="module")
def scored(folder: Path, source: train.Run) -> Path:
    """The pairs, with the log-likelihoods of the source run."""
    make_experiment(folder)
    path = folder / "scored.jsonl"
    pairs = str(folder / "pairs.jsonl")
    count = add_reference(str(source.folder.path), pairs, str(path), max_length=32, batch_size=7)
    assert count == 60
    return path


def test_log_likelihoods_that_are_not_finite_are_not_written(
    folder: Path, source: train.Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_experiment(folder)
    params = jax.tree.map(lambda leaf: jax.numpy.full_like(leaf, np.nan), source.params)
    monkeypatch.setattr(
        "train.interop.dpo_reference.load", lambda _: dataclasses.replace(source, params=params)
    )
    output = folder / "nan.jsonl"
    pairs = str(folder / "pairs.jsonl")
    with pytest.raises(UserError, match=r"pairs.jsonl.*1: the log-likelihoods .* \(nan, nan\)"):
        add_reference(str(source.folder.path), pairs, str(output), max_length=32)
    assert not output.exists()


@pytest.mark.full
def test_reference_in_the_data_equals_the_frozen_base(
    folder: Path, run: train.Run, scored: Path
) -> None:
    """The LoRA run trained on both ends at the same weights, up to rounding."""
    data = dataclasses.replace(pair_data(folder), path=str(scored))
    task = PreferenceOptimization(BETA, reference="data")
    other = fit(folder, "scored", task=task, data=data)
    assert other.final_metrics == pytest.approx(run.final_metrics, rel=1e-3, abs=1e-4)
    assert train.load(str(other.folder.path)).evaluate("validation") == other.final_metrics


@pytest.mark.full
def test_all_weights_learn_the_preference(folder: Path, source: train.Run, scored: Path) -> None:
    data = dataclasses.replace(pair_data(folder), path=str(scored))
    task = PreferenceOptimization(BETA, reference="data")
    full = fit(folder, "full", task=task, data=data, lora=LoRAConfig())
    assert full.final_metrics["accuracy"] > 0.9
    assert full.final_metrics["margin"] > 0.2
    changed = jax.tree.map(
        lambda a, b: bool(np.any(np.asarray(a) != np.asarray(b))), full.params, source.params
    )
    assert all(jax.tree.leaves(changed["layers"]))


@pytest.mark.full
def test_auxiliary_losses_of_the_model_count(folder: Path, scored: Path) -> None:
    data = dataclasses.replace(pair_data(folder), path=str(scored))
    experiment = make_experiment(
        folder,
        task=PreferenceOptimization(BETA, reference="data"),
        data=data,
        lora=LoRAConfig(),
        steps=1,
    )
    [block] = experiment.model.layer_pattern
    gated = FeedForwardConfig(16, gated=True)
    balances = []
    for weight in (0.0, 0.5):
        experts = MoEConfig(4, 2, gated, load_balance_loss_weight=weight)
        pattern = (dataclasses.replace(block, feed_forward=experts),)
        model = dataclasses.replace(experiment.model, layer_pattern=pattern)
        name = f"experts-{weight}"
        run = train.fit(dataclasses.replace(experiment, model=model), folder / name, quiet=True)
        balances.append(lines_of(folder / name / "metrics.jsonl")[0].get("loss/load_balance"))
        assert run.final_metrics["loss"] == pytest.approx(np.log(2), abs=0.2)
    assert balances[0] == 0
    assert balances[1] == pytest.approx(1.0, abs=0.5)  # 1 if all experts are chosen equally often


def test_references_that_are_refused(folder: Path, tmp_path: Path) -> None:
    record: dict[str, Any] = {"prompt": "a", "chosen": "b", "rejected": "c"}
    for value in (3, {"chosen": -1.0}, {"chosen": "x", "rejected": -1, "tokens": [1, 1]}):
        with pytest.raises(UserError, match="x:1: its reference is malformed; write it with"):
            parse_pair("x:1", {**record, "reference": value})
    for number in (0.5, float("nan"), -float("inf")):
        value = {"chosen": number, "rejected": -1.0, "tokens": [1, 1]}
        with pytest.raises(UserError, match="is not a pair of log-likelihoods"):
            parse_pair("x:1", {**record, "reference": value})
    path = tmp_path / "pairs.jsonl"
    data = dataclasses.replace(pair_data(folder), path=str(path))
    experiment = make_experiment(
        folder, data=data, task=PreferenceOptimization(BETA, reference="data")
    )
    path.write_text((json.dumps(record) + "\n") * 3)
    with pytest.raises(UserError, match="2 pairs of the train split have no reference; add it"):
        make_task(experiment).prepare_corpus()
    value = {"chosen": -1.0, "rejected": -1.0, "tokens": [2, 3]}
    path.write_text((json.dumps({**record, "reference": value}) + "\n") * 3)
    with pytest.raises(UserError, match=r"sums over \(2, 3\) tokens, and the answers have \(2, 2"):
        make_task(experiment).prepare_corpus()


def test_plan_counts_the_reference(folder: Path) -> None:
    """Without the reference in the data, a step has one forward pass more."""
    flops = {}
    for reference in ("base", "data"):
        task = PreferenceOptimization(BETA, reference=cast("Any", reference))
        experiment, _ = resolve_sizes(make_experiment(folder, task=task))
        flops[reference] = Quantities(experiment, Hardware())
    more = flops["base"].training_flops.total(causal=True)
    own = flops["data"].training_flops.total(causal=True)
    data = flops["data"]
    reference_pass = count_token_flops(data.model, data.sequence_length, data.predicted_fraction)
    assert more == own + reference_pass.total(causal=True)
    assert reference_pass.total(causal=True) < data.token_flops.total(causal=True)
