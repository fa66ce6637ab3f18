"""PEFT adapters imported into and exported from runs, on the command line."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.train.support import (
    assert_same_bits,
    command,
    light_compiler,  # noqa: F401
    losses,
    shared_programs,  # noqa: F401
)
from tests.train.test_huggingface import FIXTURE, make_source
from train.checkpoint.tree_paths import named_leaves
from train.run import load
from transformer.interop.pretrained import read_model

ADAPTER = FIXTURE.parents[1] / "adapters" / "gpt2-tied"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


def run(folder: Path, capsys: Any, *words: str) -> str:
    done = command(capsys, *words)
    assert done.status == 0, done.error
    return str(done.output)


@pytest.fixture
def imported(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Import the base model as a run."""
    workdir = folder / "base"
    if not workdir.exists():
        make_source(folder / "source", tokens=51)
        run(folder, capsys, "import", str(folder / "source"), "--workdir", str(workdir))
    return workdir


@pytest.mark.full
def test_import_with_an_adapter_gives_a_lora_run(
    folder: Path, imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = str(folder / "adapted")
    source = str(folder / "source")
    run(folder, capsys, "import", source, "--workdir", workdir, "--adapter", str(ADAPTER))
    loaded = load(workdir)
    draw = np.random.RandomState(0)
    draw.randint(3, 51, (2, 11))
    tokens = draw.randint(3, 51, (2, 14))
    forward = jax.jit(lambda params: loaded.model.apply({"params": params}, tokens).logits)
    logits = np.asarray(forward(loaded.params))
    reference = np.load(ADAPTER / "reference.npz")["logits"]
    assert np.abs(logits - reference).max() < 1e-4 * np.abs(reference).max()
    # Exported again: the adapter and the base are unchanged.
    out = {name: folder / f"out-{name}" for name in ("adapter", "base", "merged")}
    for name, output in out.items():
        run(folder, capsys, "export", workdir, "--output", str(output), "--weights", name)
    for path in (ADAPTER, out["adapter"]):
        assert (path / "adapter_config.json").exists()
    first, second = (load_file(x / "adapter_model.safetensors") for x in (ADAPTER, out["adapter"]))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    base, merged = (named_leaves(read_model(out[name])[1]) for name in ("base", "merged"))
    original = named_leaves(read_model(FIXTURE)[1])
    assert_same_bits(base, original)
    assert_same_bits(merged, named_leaves(loaded.params))
    # A merged run knows where its model comes from, as the adapted one does.
    run(folder, capsys, "merge", workdir, "--workdir", str(folder / "merged"))
    kept = load(str(folder / "merged")).folder
    assert kept.model_type == loaded.folder.model_type == "gpt2"
    names = {file.name for file in loaded.folder.pretrained.iterdir()}
    assert {file.name for file in kept.pretrained.iterdir()} == names


@pytest.mark.full
def test_training_starts_with_an_adapter_and_resumes(
    folder: Path, imported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = folder / "text.txt"
    text.write_text(" ".join(f"w{i % 50}" for i in range(3000)))
    config = folder / "config.py"
    config.write_text(
        "import dataclasses\n"
        "from tests.train.support import NO_DETECTOR\n"
        "from train.run import load\n"
        f"base = load({str(imported)!r}).experiment\n"
        f"data = dataclasses.replace(base.data, path={str(text)!r}, sequence_length=16,\n"
        f"    cache_dir={str(folder / 'cache')!r})\n"
        "EXPERIMENTS = {'tuned': dataclasses.replace(base, data=data, batch_size=2, log_every=1,\n"
        "    recovery=NO_DETECTOR)}\n"
    )
    flags = ["--init-from", str(imported), "--init-adapter", str(ADAPTER)]
    fit = ["fit", str(config), "--quiet", *flags]
    run(folder, capsys, *fit, "--workdir", str(folder / "whole"), "--steps", "4")
    full = load(str(folder / "whole"))
    assert (full.experiment.lora.rank, full.experiment.lora.train_fully) == (3, ())
    assert full.folder.model_type == "gpt2"  # its tokenizer files are exported with it
    stopped = [*fit, "--workdir", str(folder / "resumed")]
    run(folder, capsys, *stopped, "--steps", "2")
    shutil.copytree(ADAPTER, folder / "moved")
    run(folder, capsys, *stopped, "--steps", "4")
    assert_same_bits(load(str(folder / "resumed")).params, full.params)
    # The first loss is that of the adapted model.
    run(folder, capsys, *fit[:3], *flags[:2], "--workdir", str(folder / "plain"), "--steps", "1")
    assert losses(folder / "plain")[1] != losses(folder / "whole")[1]
    events = (folder / "whole" / "logbook.jsonl").read_text().splitlines()
    start = next(x for x in map(json.loads, events) if x["event"] == "warm start")
    assert start["adapter"] == str(ADAPTER)

    wrong = command(capsys, *stopped[:-1], str(folder / "wrong"), "--lora.rank", "2")
    assert (wrong.status, "lora.rank 2: " in wrong.error) == (1, True)
    alone = command(
        capsys, *fit[:3], "--init-adapter", str(ADAPTER), "--workdir", str(folder / "wrong")
    )
    assert "init_adapter" in alone.error
    plain = command(
        capsys, "export", str(imported), "--output", str(folder / "x"), "--weights", "adapter"
    )
    assert "was not trained with LoRA" in plain.error
    assert not (folder / "x").exists()
    assert jax.tree.leaves(full.params)
