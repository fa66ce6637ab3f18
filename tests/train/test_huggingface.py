"""`import` and `export`: a model folder becomes a run and round-trips unchanged."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from train.cli.main import main
from train.errors import UserError
from train.huggingface import import_model
from train.huggingface_export import export_run
from train.run import load, sample

FIXTURE = Path(__file__).parents[1] / "transformer" / "interop" / "fixtures" / "gpt2-tied"


def make_source(folder: Path, tokens: int = 51) -> Path:
    """Copy a tiny GPT-2 and give it a tokenizer of this many words."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(FIXTURE / name, folder)
    words = ["<|endoftext|>", *(f"w{i}" for i in range(tokens - 1))]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, "w0")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_model_round_trips_through_a_run(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", tokens=49)  # fewer words than embedding rows
    import_model(str(source), str(tmp_path / "run"))
    run = load(str(tmp_path / "run"))
    reference = np.load(FIXTURE / "reference.npz")
    logits = run.model.apply({"params": run.params}, reference["tokens"]).logits
    assert logits is not None
    assert np.abs(np.asarray(logits) - reference["logits"]).max() < 1e-4
    assert sample(run, ["w3 w4"], max_new_tokens=3)
    export_run(str(tmp_path / "run"), str(tmp_path / "out"))
    for name in (
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "tokenizer_config.json",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes(), name
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    before = json.loads((source / "config.json").read_text())
    shared = written.keys() & before.keys()
    assert len(shared) > 15
    decided = {"n_inner"}  # null in the source, the resulting width in our export
    assert {name: written[name] for name in shared - decided} == {
        name: before[name] for name in shared - decided
    }
    assert "49" not in (tmp_path / "out" / "README.md").read_text().splitlines()[0]


def test_failed_import_leaves_no_folder(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", tokens=60)
    with pytest.raises(UserError, match="tokenizer has 60 tokens and the model 51"):
        import_model(str(source), str(tmp_path / "run"))
    (source / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="shorter than its header"):
        import_model(str(source), str(tmp_path / "run"))
    with pytest.raises(UserError, match="is not a folder"):
        import_model(str(tmp_path / "missing"), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tokenizer.model", "is not a complete protocol buffer; fetch it again"),
        ("source.spm", "is a SentencePiece model of one side of a translation"),
        ("notes.txt", "has no tokenizer"),
    ],
)
def test_unreadable_tokenizers_raise(name: str, expected: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    (source / "tokenizer.json").rename(source / name)
    with pytest.raises(UserError, match=expected) as caught:
        import_model(str(source), str(tmp_path / "run"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("vocabulary", ["encoder.json", "vocab.json", "vocab.txt"])
def test_older_tokenizer_files_round_trip(vocabulary: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    if vocabulary == "vocab.txt":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b"]
        (source / vocabulary).write_text("\n".join(words))
        ids = [5, 7]
    else:
        words = ["a", "b", "ab", "<|endoftext|>"]
        (source / vocabulary).write_text(json.dumps({word: i for i, word in enumerate(words)}))
        (source / "merges.txt").write_text("#version: 0.2\na b\n")
        ids = [2]
    (source / "added_tokens.json").write_text(json.dumps({"<extra>": 40}))
    (source / "special_tokens_map.json").write_text(json.dumps({"eos_token": words[3]}))
    import_model(str(source), str(tmp_path / "run"))
    run = load(str(tmp_path / "run"))
    assert run.tokenizer is not None
    assert run.tokenizer.encode("ab").tolist() == ids
    export_run(str(tmp_path / "run"), str(tmp_path / "out"))
    kept = [vocabulary, "added_tokens.json", "special_tokens_map.json", "chat_template.jinja"]
    for name in [*kept, *(["merges.txt"] if vocabulary != "vocab.txt" else [])]:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes(), name


def test_missing_flags_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, flag in ((["import", "x"], "--workdir"), (["export", "x"], "--output")):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert flag in capsys.readouterr().err
