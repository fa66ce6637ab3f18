"""A run is created without trainer or evaluator, as an importer of weights does."""

from pathlib import Path

import chex
import jax
import numpy as np

import train
from tests.train.support import NO_DETECTOR, resolved, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.assembly import make_engine, make_task
from train.checkpoint.manager import CheckpointManager
from train.config.resolve import resolve_auto
from train.run_folder.folder import RunFolder
from train.run_folder.provenance import PROVENANCE_KEY, collect_provenance
from train.run_folder.run_config import write_run_files
from train.runtime.local_hardware import local_hardware


def test_files_and_a_checkpoint_make_a_run(tmp_path: Path) -> None:
    experiment = resolved(tiny(tmp_path, num_layers=1, dropout=0.0, recovery=NO_DETECTOR))
    corpus = make_task(experiment).prepare_corpus(None, None)
    engine = make_engine(experiment, local_hardware())
    folder = RunFolder.create(tmp_path / "run")
    # Of an earlier run that lost its checkpoints, with another task and tokenizer.
    for name, text in {
        "labels.json": '["x"]',
        "tokenizer_config.json": '{"bos_token": "a"}',
    }.items():
        (folder.path / name).write_text(text)
    write_run_files(
        folder,
        experiment,
        corpus.tokenizer,
        corpus.labels,
        auto_choices=resolve_auto(experiment, local_hardware()),
        hardware=engine.model.hardware,
    )
    state = engine.init()
    expected = jax.tree.map(np.asarray, state.params)
    record = collect_provenance(experiment, corpus.tokenizer, corpus.labels)
    with CheckpointManager(folder.checkpoints) as checkpoints:
        checkpoints.save(0, state, {PROVENANCE_KEY: record})
    run = train.load(str(tmp_path / "run"))
    assert (run.step, run.experiment.model) == (0, experiment.model)
    chex.assert_trees_all_equal(run.params, expected)
