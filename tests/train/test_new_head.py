"""A new classifier head on an imported masked language model, from the command line."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from tests.train.support import command, lines_of
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.checkpoint.tree_paths import named_leaves
from train.run import load

FIXTURE = Path(__file__).parents[1] / "transformer" / "interop" / "fixtures" / "bert-mlm"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_source(folder: Path) -> Path:
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURE / name, folder)
    words = {word: i for i, word in enumerate((*SPECIAL, *(f"w{i}" for i in range(44))))}
    backend = tokenizers.Tokenizer(models.WordLevel(words, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    names = {f"{each[1:-1].lower()}_token": each for each in SPECIAL}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.mark.full
def test_new_head_on_a_pretrained_body(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = random.Random(0)
    rows = [
        f"{'ab'[i % 2]}\t" + " ".join(f"w{drawn.randrange(5) + 20 * (i % 2)}" for _ in range(6))
        for i in range(80)
    ]
    (tmp_path / "texts.tsv").write_text("\n".join(["label\ttext", *rows]) + "\n")
    source, base = write_source(tmp_path / "source"), str(tmp_path / "base")
    assert command(capsys, "import", str(source), "--workdir", base).status == 0
    fit = ["fit", "trec", "--data.format", "tsv", "--data.path", str(tmp_path / "texts.tsv")]
    fit += ["--data.test-path=", "--data.max-length", "12", "--task.pooling", "first"]
    fit += ["--batch-size", "8", "--steps", "2", "--sample.every", "0", "--model.pooler"]
    fit += ["--recovery.window", "0"]
    fit += ["--init-from", base, "--init-model"]
    run = command(capsys, *fit, "--workdir", str(tmp_path / "run"))
    assert run.status == 0, run.error
    [event] = [
        x for x in lines_of(tmp_path / "run" / "logbook.jsonl") if x["event"] == "warm start"
    ]
    assert event["new"] == ["head", "head_bias", "pooler", "pooler_bias"]
    assert set(event["left"]) == {
        *("head", "head_bias", "head_norm/bias", "head_norm/gain", "head_output_bias")
    }
    assert "layers/place_0/mixer/query" in event["taken"]
    assert load(str(tmp_path / "run")).model.config.d_model == 24

    out = command(capsys, "export", str(tmp_path / "run"), "--output", str(tmp_path / "out"))
    assert out.status == 0, out.error
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["BertForSequenceClassification"]
    assert set(written["label2id"]) == {"a", "b"}

    # With LoRA, the body is adapted; the new head and pooler are trained in full.
    lora = command(capsys, *fit, "--workdir", str(tmp_path / "lora"), "--lora.rank", "2")
    assert lora.status == 0, lora.error
    experiment = load(str(tmp_path / "lora")).experiment
    assert experiment.lora.train_fully == ("head", "head_bias", "pooler", "pooler_bias")
    # With another number of labels, the trained body is reused and its head is not.
    more = [*rows, *(f"c\tw{i}" + " w40" * 5 for i in range(40))]
    (tmp_path / "texts.tsv").write_text("\n".join(["label\ttext", *more]) + "\n")
    fit[fit.index(base)] = str(tmp_path / "run")
    third = command(capsys, *fit, "--workdir", str(tmp_path / "third"))
    assert third.status == 0, third.error
    first, last = (named_leaves(load(str(tmp_path / x)).params) for x in ("run", "third"))
    assert (first["head"].shape, last["head"].shape) == ((24, 2), (24, 3))
    assert np.abs(np.asarray(first["pooler"]) - np.asarray(last["pooler"])).max() < 0.1

    alone = command(capsys, "fit", "trec", "--init-model")
    assert (alone.status, "--init-model" in alone.error) == (2, True)
