"""Instruction tuning: packed rows equal separate ones, answers, chat, export."""

import dataclasses
import io
import json
import random
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import train
from tests.train.support import command, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.assembly import make_engine, make_task
from train.data.conversations import ConversationDataConfig
from train.data.data_config import TokenizerConfig
from train.evaluation.evaluator import evaluate_split
from train.experiment import CheckpointConfig, Experiment
from train.tasks.instruction import InstructionTuning
from transformer import Hardware, NoPosition, RoPE

pytestmark = pytest.mark.full


def make_experiment(folder: Path, **changes: Any) -> Experiment:
    """Return an experiment in which the answer names the letter of the question."""
    path = folder / "data.jsonl"
    if not path.exists():
        drawn = random.Random(0)
        letters = [drawn.choice("abcd") for _ in range(120)]
        lines = [
            {
                "messages": [
                    {"role": "user", "content": letter},
                    {"role": "assistant", "content": letter * 2},
                ]
            }
            for letter in letters
        ]
        path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    experiment = tiny(folder, dropout=0.0, checkpoint=CheckpointConfig(every=0))
    block: Any = experiment.model.layer_pattern[0]
    block = dataclasses.replace(block, mixer=dataclasses.replace(block.mixer, position=RoPE()))
    model = dataclasses.replace(
        experiment.model, layer_pattern=(block,), position_embedding=NoPosition()
    )
    data = ConversationDataConfig(
        path=str(path), max_length=64, max_buckets=1, tokenizer=TokenizerConfig("byte")
    )
    return dataclasses.replace(
        experiment, task=InstructionTuning(), model=model, data=data, steps=120, **changes
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("instruction")


@pytest.fixture(scope="module")
def run(folder: Path) -> train.Run:
    return train.fit(make_experiment(folder), str(folder / "run"), quiet=True)


def test_packed_and_separate_rows_have_the_same_loss(folder: Path, run: train.Run) -> None:
    metrics = []
    for packing in (True, False):
        data: Any = run.experiment.data
        data = dataclasses.replace(data, packing=packing)
        experiment = dataclasses.replace(run.experiment, data=data)
        task = make_task(experiment)
        corpus = task.prepare_corpus(run.tokenizer)
        engine = make_engine(experiment, Hardware())
        metrics.append(evaluate_split(experiment, engine, run.params, corpus, "train", whole=True))
    assert metrics[0]["loss"] == pytest.approx(metrics[1]["loss"], rel=1e-5)


def test_run_answers_and_stops(
    folder: Path, run: train.Run, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    assert run.final_metrics["loss"] < 0.5
    assert run.generate("b", temperature=0.0, max_new_tokens=20) == " bb"
    workdir = str(folder / "run")
    flags = ["--temperature", "0", "--max-new-tokens", "20"]
    shown = command(capsys, "sample", workdir, "--chat", "--prompt", "c", *flags)
    assert (shown.status, shown.output) == (0, " cc\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n\nd\n"))
    talk = command(capsys, "sample", workdir, "--chat", *flags)
    assert (talk.status, talk.output) == (0, " aa\n dd\n")
    refused = command(capsys, "sample", workdir, "--chat", "--json")
    assert (refused.status, "needs --prompt" in refused.error) == (2, True)


def test_template_is_saved_with_the_run(folder: Path, run: train.Run) -> None:
    saved = (folder / "run" / "chat_template.jinja").read_text()
    loaded = train.load(str(folder / "run"))
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.chat_template == saved
    assert "Assistant:" in saved
    equal = jax.tree.map(lambda a, b: np.array_equal(a, b), loaded.params, run.params)
    assert all(jax.tree.leaves(equal))
