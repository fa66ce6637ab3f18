"""Models of sentence-transformers: `import`, `embed` and `export`, against the package's vectors.

`python -m bench sentence-transformers --fixtures` writes the fixtures.
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest

import train
from tests.train.support import command, tiny
from tests.train.support import light_compiler as light_compiler
from train.errors import UserError
from train.interop.huggingface import import_model
from train.interop.huggingface_export import export_run
from train.run import Run, load
from train.run_folder.folder import RunFolder
from train.run_folder.sentence_transformers import read_embedding_config
from train.serving.embedder import is_text_encoder
from train.warm_start.sources import copy_pretrained_files
from transformer.models.language_model import LanguageModel

FIXTURES = Path(__file__).parent / "sentence_transformers"
NAMES = sorted(path.parent.name for path in FIXTURES.glob("*/modules.json"))
FILES = ("modules.json", "1_Pooling/config.json", "config_sentence_transformers.json")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    for name in NAMES:
        import_model(str(FIXTURES / name), str(folder / name))
    return {name: load(folder / name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_vectors_are_those_of_sentence_transformers(name: str, runs: dict[str, Run]) -> None:
    """With texts that are cut, in batches of several lengths, with and without a prompt."""
    reference = np.load(FIXTURES / name / "reference.npz")
    texts = reference["texts"].tolist()
    np.testing.assert_allclose(runs[name].embed(texts), reference["plain"], atol=1e-5)
    prompts = set(reference.files) - {"texts", "plain"}
    for prompt in prompts:
        found = runs[name].embed(texts, prompt_name=prompt)
        np.testing.assert_allclose(found, reference[prompt], atol=1e-5)
    assert bool(prompts) == (name in ("qwen3-last", "roberta-mean"))


def test_all_are_served_for_vectors(runs: dict[str, Run]) -> None:
    """The decoder too, as its files say how it makes them."""
    assert isinstance(runs["qwen3-last"].model, LanguageModel)
    assert all(map(is_text_encoder, runs.values()))


def test_arguments_win_over_the_files(runs: dict[str, Run]) -> None:
    run = runs["bert-cls"]
    mean = run.embed("the cat sat", pooling="mean", normalize=False)
    assert mean.shape == (16,)
    assert abs(np.linalg.norm(mean) - 1) > 0.1
    assert not np.allclose(mean, run.embed("the cat sat", normalize=False), atol=1e-3)
    prompted = runs["roberta-mean"].embed("the cat", prompt="query: ")
    np.testing.assert_array_equal(prompted, runs["roberta-mean"].embed("query: the cat"))


def test_files_come_back_and_go_along(runs: dict[str, Run], tmp_path: Path) -> None:
    name = "roberta-mean"
    run = runs[name]
    export_run(str(run.folder.path), str(tmp_path / "out"))
    files = (*FILES, "sentence_bert_config.json")
    for file in files:
        assert (tmp_path / "out" / file).read_bytes() == (FIXTURES / name / file).read_bytes()
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.library_name == "sentence-transformers"
    import_model(str(tmp_path / "out"), str(tmp_path / "again"))
    again = load(tmp_path / "again")
    np.testing.assert_array_equal(again.embed("the cat"), run.embed("the cat"))
    other = RunFolder(tmp_path / "other")
    copy_pretrained_files(run.folder, other)
    assert read_embedding_config(other.pretrained) == read_embedding_config(run.folder.pretrained)


def test_import_says_what_embed_will_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        import_model(str(FIXTURES / "bert-cls"), str(tmp_path / "run"))
    assert "embed gives its vectors (pooling first, normalized, at most 20 tokens)" in caplog.text


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("modules.json", {}, "modules  are not supported|no list of modules"),
        ("modules.json", [{"type": "a.Transformer"}], "is no list of modules"),
        ("modules.json", [{"type": "a.Transformer", "path": ""}], "modules Transformer are not"),
        ("modules.json", [{"type": "a.Pooling", "path": ".."}], "Pooling in folder '..' is not"),
        ("modules.json", [{"type": "a.Dense", "path": "../x"}], "Dense in folder '../x' is not"),
        ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, "pooling weightedmean is not"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "pooling cls and mean is not"),
        ("1_Pooling/config.json", {}, "pooling none is not supported"),
    ],
)
def test_what_is_not_supported_is_named(
    file: str, content: Any, words: str, tmp_path: Path
) -> None:
    shutil.copytree(FIXTURES / "bert-mean", tmp_path / "source")
    (tmp_path / "source" / file).write_text(json.dumps(content))
    with pytest.raises(UserError, match=words) as caught:
        import_model(str(tmp_path / "source"), str(tmp_path / "run"))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_modules_that_change_a_vector_are_named(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "bert-mean", tmp_path / "source")
    path = tmp_path / "source" / "modules.json"
    dense = {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    path.write_text(json.dumps([*json.loads(path.read_text()), dense]))
    with pytest.raises(UserError, match="modules Transformer, Pooling, Dense are not supported"):
        import_model(str(tmp_path / "source"), str(tmp_path / "run"))


def test_prompts_are_checked(runs: dict[str, Run], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'title': is none of the model \(known are .*query"):
        runs["roberta-mean"].embed("a", prompt_name="title")
    with pytest.raises(UserError, match="give one of them"):
        runs["roberta-mean"].embed("a", prompt="b", prompt_name="query")
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "bert-mean", source)
    pooling = source / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps(json.loads(pooling.read_text()) | {"include_prompt": False}))
    import_model(str(source), str(tmp_path / "run"))
    run = load(tmp_path / "run")
    with pytest.raises(UserError, match="include_prompt false"):
        run.embed("a", prompt="b")
    assert run.embed("a").shape == (16,)


def test_verb_writes_what_python_returns(
    runs: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs["bert-mean"]
    workdir = str(run.folder.path)
    (tmp_path / "texts.txt").write_text("the dog\n\nthe moon\n")
    texts = ("--text", "the cat", "--input", str(tmp_path / "texts.txt"))
    output = str(tmp_path / "vectors.npy")
    result = command(capsys, "embed", workdir, *texts, "--output", output, "--json")
    assert (result.status, json.loads(result.output)["shape"]) == (0, [3, 16])
    expected = run.embed(["the cat", "the dog", "the moon"])
    np.testing.assert_array_equal(np.load(output), expected)
    shown = command(capsys, "embed", workdir, *texts, "--pooling", "max", "--normalize", "yes")
    cosines = run.embed(["the cat", "the dog"], pooling="max", normalize=True)
    first = shown.output.splitlines()[1]
    assert first.startswith(f" 1.000 {cosines[0] @ cosines[1]:6.3f} ")
    assert first.endswith("'the cat'")
    for line, words in (
        (("--text", "a", "--output", "vectors.txt"), "ends with .npy"),
        ((), "has no texts"),
        (("--input", str(tmp_path / "missing")), "No such file"),
    ):
        failed = command(capsys, "embed", workdir, *line)
        assert failed.status != 0
        assert words in failed.error


def test_runs_of_other_origin_have_vectors(tmp_path: Path) -> None:
    """A language model that was trained here: the last token, after one that begins a text."""
    run = train.fit(tiny(tmp_path, num_layers=1, dropout=0.0, steps=1), tmp_path / "run")
    assert run.tokenizer is not None
    tokens = np.append(run.tokenizer.eos_token_id, run.tokenizer.encode("the cat"))
    hidden = np.asarray(run.model.apply({"params": run.params}, tokens[None]).hidden[0, -1])
    found = run.embed(["the cat", "sat"])
    np.testing.assert_allclose(found[0], hidden / np.linalg.norm(hidden), atol=1e-5)
