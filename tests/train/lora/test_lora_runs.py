"""LoRA runs: what is trained and saved, exact resume, evaluation from the folder, errors."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import train
from tests.train.resumed_runs import preempted_after
from tests.train.support import (
    NO_DETECTOR,
    assert_same_bits,
    command,
    light_compiler,  # noqa: F401
    losses,
    shared_programs,  # noqa: F401
    tiny,
    write_config,
)
from train.assembly import make_engine
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.tree_paths import named_leaves
from train.engines.lora import LoRAConfig
from train.errors import UserError
from train.experiment import Experiment
from train.interop import lora_export
from train.run import Run, load
from train.run_folder.run_config import read_experiment
from train.state import EmaConfig
from train.warm_start.lora_start import unused_settings
from transformer import Hardware

MATRICES = ("mixer/query", "mixer/value", "feed_forward/up")
LORA = LoRAConfig(rank=2, targets=("query", "value", "up"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


def make_experiment(folder: Path, **changes: Any) -> Experiment:
    return tiny(folder, num_layers=1, recovery=NO_DETECTOR, **changes)


@pytest.fixture(scope="module")
def source(folder: Path) -> Run:
    experiment = make_experiment(folder, dropout=0.0, steps=4)
    return train.fit(experiment, str(folder / "source"), quiet=True)


def adapted(folder: Path, **changes: Any) -> Experiment:
    return make_experiment(folder, **{"lora": LORA, "ema": EmaConfig(0.5)} | changes)


@pytest.fixture(scope="module")
def run(folder: Path, source: Run) -> Run:
    return train.fit(
        adapted(folder), str(folder / "lora"), init_from=str(folder / "source"), quiet=True
    )


def restored(folder: Path, name: str, step: int) -> Any:
    experiment = load(str(folder / name)).experiment
    engine = make_engine(experiment, Hardware())
    with CheckpointManager(str(folder / name / "checkpoints")) as checkpoints:
        return checkpoints.restore(step, engine.abstract_state()).state


def test_checkpoint_holds_only_the_adapter(folder: Path, run: Run) -> None:
    state = restored(folder, "lora", 12)
    names = set(named_leaves(state.params))
    place = "layers/place_0"
    assert names == {f"{place}/{matrix}/lora_{factor}" for matrix in MATRICES for factor in "ab"}
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    # Two moments, the EMA and counters; nothing has the size of the model.
    assert sum(leaf.size for leaf in jax.tree.leaves(state.optimizer)) < 2 * size + 10
    assert set(named_leaves(state.ema)) == names


def test_only_targets_change_and_the_run_reloads(folder: Path, source: Run, run: Run) -> None:
    loaded = load(str(folder / "lora"))
    assert_same_bits(loaded.params, run.params)
    before, after = named_leaves(source.params), named_leaves(loaded.params)
    changed = {name for name in before if np.any(np.asarray(before[name] != after[name]))}
    assert changed == {f"layers/place_0/{matrix}" for matrix in MATRICES}
    assert_same_bits(lora_export.base_params(loaded), source.params)
    assert loaded.evaluate("validation") == run.final_metrics


@pytest.mark.full
def test_first_loss_is_that_of_the_base(folder: Path, run: Run) -> None:
    """Full fine-tuning from the same weights has the same first loss, and other ones later."""
    name = "full"
    experiment = adapted(folder, lora=LoRAConfig(), steps=2)
    train.fit(experiment, str(folder / name), init_from=str(folder / "source"), quiet=True)
    full, lora = losses(folder / name), losses(folder / "lora")
    assert full[1] == lora[1]
    assert full[2] != lora[2]


@pytest.mark.full
def test_resume_is_exact_without_the_source(folder: Path, source: Run, run: Run) -> None:
    shutil.copytree(folder / "source", folder / "moved")
    with preempted_after(8):
        train.fit(
            adapted(folder), str(folder / "resumed"), init_from=str(folder / "moved"), quiet=True
        )
    shutil.rmtree(folder / "moved")
    resumed = train.fit(adapted(folder), str(folder / "resumed"), quiet=True)
    assert_same_bits(resumed.params, run.params)
    assert_same_bits(restored(folder, "resumed", 12), restored(folder, "lora", 12))


@pytest.mark.full
def test_changed_base_is_detected(folder: Path, run: Run) -> None:
    copy = folder / "damaged"
    shutil.copytree(folder / "lora", copy)
    shutil.rmtree(copy / "base")
    with pytest.raises(UserError, match="holds no base weights"):
        load(str(copy))
    other = make_experiment(folder, lora=LORA, seed=5, steps=1)
    train.fit(other, str(folder / "other"), params=run.params, quiet=True)
    shutil.copytree(folder / "other" / "base", copy / "base")
    with pytest.raises(UserError, match="not the weights that checkpoint 12 was trained on"):
        load(str(copy))
    with pytest.raises(UserError, match="not the weights that checkpoint 12 was trained on"):
        train.fit(adapted(folder, steps=13), str(copy), quiet=True)


def test_no_matching_target_raises(folder: Path) -> None:
    with pytest.raises(UserError, match=r"lora.rank 2: .* --init-from"):
        train.fit(adapted(folder), str(folder / "nothing"), quiet=True)


@pytest.mark.parametrize("targets", ["query,up", ["query", "up"], ("query,up",)])
def test_names_from_python_are_those_of_the_command_line(targets: Any) -> None:
    assert LoRAConfig(2, targets=targets) == LoRAConfig(2, targets=("query", "up"))


def test_settings_without_effect_are_named() -> None:
    requested, own = LoRAConfig(alpha=32.0, targets=("all",)), LoRAConfig(3, 6.0, ("query", "up"))
    assert len(list(unused_settings(requested, LoRAConfig()))) == 2
    assert list(unused_settings(requested, own)) == [
        "lora.alpha 32: not used; the adapter has 6",
        "lora.targets all: not used; the adapter has query,up",
    ]
    assert not list(unused_settings(LoRAConfig(), own))


@pytest.mark.full
def test_command_line(folder: Path, source: Run, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(folder, steps="2", num_layers="1")
    fit = ["fit", config, "--workdir", str(folder / "flags")]
    fit += ["--init-from", str(folder / "source"), "--lora.rank", "2", "--lora.targets"]
    wrong = command(capsys, *fit, "qeury")
    assert wrong.status == 2
    assert "lora.targets qeury: this model has no such matrix" in wrong.error
    assert command(capsys, *fit, "attention,up").status == 0
    saved = load(str(folder / "flags")).experiment.lora
    assert saved == LoRAConfig(2, targets=("attention", "up"), train_fully=())


@pytest.mark.full
def test_merged_run_is_an_ordinary_run(
    folder: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = str(folder / "merged")
    assert command(capsys, "merge", str(folder / "lora"), "--workdir", merged).status == 0
    loaded = load(merged)
    assert_same_bits(loaded.params, run.params)
    assert loaded.experiment.lora == LoRAConfig()
    assert loaded.evaluate("validation") == run.final_metrics
    assert not (folder / "merged" / "base").exists()
    again = command(capsys, "merge", str(folder / "lora"), "--workdir", merged)
    assert again.status == 1
    assert "holds a run already" in again.error
    plain = command(capsys, "merge", merged, "--workdir", str(folder / "twice"))
    assert "was not trained with LoRA" in plain.error
    # It can be trained further, with all of its weights; the other settings of LoRA mean nothing.
    lora = LoRAConfig(0, targets=("all",), train_fully=("embedding",))
    further = make_experiment(folder, ema=EmaConfig(0.5), steps=2, lora=lora)
    lost = shutil.copytree(merged, folder / "lost", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(UserError, match="there is none, but the run saved one at step 0"):
        train.fit(further, str(lost), quiet=True)
    assert train.fit(further, merged, quiet=True).step == 2
    with pytest.raises(UserError, match="init_adapter x: this run trains all of its weights"):
        train.fit(further, merged, init_from="x", init_adapter="x", quiet=True)


@pytest.mark.full
def test_merged_run_has_the_settings_of_its_run(folder: Path, source: Run) -> None:
    """Not those with which this machine evaluates it: one step at a time."""
    workdir, start = str(folder / "parts"), str(folder / "source")
    experiment = adapted(folder, steps=1, grad_accum_steps=2)
    train.fit(experiment, workdir, init_from=start, quiet=True)
    merged = lora_export.merge_run(workdir, f"{workdir}_merged")
    saved = read_experiment(merged.folder)
    assert (saved.grad_accum_steps, saved.lora) == (2, LoRAConfig())


def test_exported_adapter_is_of_the_checkpoints_that_the_run_is_evaluated_with(
    folder: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def write_adapter(target: Path, model: Any, layout: Any, params: Any, **_: Any) -> Any:
        written.append(params)
        return SimpleNamespace(model_type="gpt2")

    monkeypatch.setattr(lora_export, "write_adapter", write_adapter)
    averaged = shutil.copytree(folder / "lora", tmp_path / "averaged")
    config = averaged / "config.json"
    text = config.read_text()
    assert '"average_checkpoints": 1' in text
    config.write_text(text.replace('"average_checkpoints": 1', '"average_checkpoints": 2'))
    lora_export.export_adapter(load(str(averaged)), tmp_path)
    assert_same_bits(written[0], load(str(averaged), merged=False).params)
    last = load(str(averaged), step=run.step, merged=False).params
    leaves = zip(jax.tree.leaves(written[0]), jax.tree.leaves(last), strict=True)
    assert not all(np.array_equal(*pair) for pair in leaves)


@pytest.mark.full
def test_weights_missing_in_the_source_are_trained_in_full(folder: Path, source: Run) -> None:
    """The body is adapted; weights that `init_only` excludes are initialized and trained."""
    options: Any = {"init_from": str(folder / "source"), "init_only": "layers", "quiet": True}
    new = train.fit(adapted(folder, steps=3), str(folder / "new"), **options)
    names = new.experiment.lora.train_fully
    assert "embedding" in names
    assert not any(name.startswith("layers") for name in names)
    assert "embedding" in named_leaves(restored(folder, "new", 3).params)
    resumed = train.fit(adapted(folder, steps=4), str(folder / "new"), quiet=True)
    assert resumed.step == 4
    # Weights beside those are no part of the run.
    more = dataclasses.replace(LORA, train_fully=(*LORA.train_fully, "layers/place_0/mixer/out"))
    with pytest.raises(UserError, match=r"lora\.train_fully"):
        train.fit(adapted(folder, steps=5, lora=more), str(folder / "new"), quiet=True)
