"""Word vectors of a file as the first embeddings of a run."""

import dataclasses
import functools
import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from tests.train.support import (
    NO_DETECTOR,
    command,
    light_compiler,  # noqa: F401
    lines_of,
    shared_programs,  # noqa: F401
)
from tests.train.tasks.support import tiny_classifier
from train.cli.config_verbs import with_model_of
from train.data.data_config import TokenizerConfig
from train.engines.lora import LoRAConfig
from train.errors import UsageError, UserError
from train.experiment import Experiment
from train.optim.schedules import ScheduleConfig
from train.warm_start.word_vectors import copy_scaled, read_word_vectors, rows_of_words


def write_vectors(file: Path, words: list[str], width: int, scale: float = 5.0) -> np.ndarray:
    """Write vectors as GloVe does; return them."""
    vectors = np.random.default_rng(3).normal(size=(len(words), width)) * scale
    lines = (" ".join([w, *(f"{x:.5f}" for x in v)]) for w, v in zip(words, vectors, strict=True))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return vectors


@pytest.fixture
def still(tmp_path: Path) -> Experiment:
    """A run of one step, whose learning rate is too small to change a weight."""
    schedule = ScheduleConfig("constant", learning_rate=1e-30, warmup_steps=0)
    return tiny_classifier(tmp_path, dropout=0.0, steps=1, schedule=schedule, recovery=NO_DETECTOR)


def fit(experiment: Experiment, workdir: Path, init_from: Path | str = "") -> train.Run:
    return train.fit(experiment, str(workdir), init_from=str(init_from), quiet=True)


@pytest.mark.parametrize("form", ["glove", "word2vec", "gzip"])
def test_formats(tmp_path: Path, form: str) -> None:
    text = "\ufeffthe 0.5 -1 2\n. . . 1e-3 0 4\ncafé 1 2 3\nthe 7 7 7\n"
    if form == "word2vec":
        text = f"4 3\n{text}".replace("\n", " \n")  # word2vec ends lines with a space
    file = tmp_path / ("vectors.txt.gz" if form == "gzip" else "vectors.txt")
    encoded = text.encode()
    file.write_bytes(gzip.compress(encoded) if form == "gzip" else encoded)
    rows, table = read_word_vectors(str(file))
    assert dict(rows) == {"the": 0, ". . .": 1, "café": 2}
    np.testing.assert_array_equal(
        table, np.array([[0.5, -1, 2], [1e-3, 0, 4], [1, 2, 3]], np.float32)
    )


@pytest.mark.parametrize("end", [b"\n", b""], ids=["lines", "no lines"])
@pytest.mark.parametrize("suffix", [".bin", ".bin.gz"])
def test_binary_format_of_word2vec(tmp_path: Path, end: bytes, suffix: str) -> None:
    vectors = np.random.default_rng(0).normal(size=(4, 5)).astype("<f4")
    vectors[1, 2] = np.frombuffer(b"\n \n\n", "<f4")[0]  # bytes that look like text
    words = ["the", "New_York", "café", "the"]
    content = b"4 5\n" + b"".join(
        word.encode() + b" " + vector.tobytes() + end
        for word, vector in zip(words, vectors, strict=True)
    )
    file = tmp_path / f"vectors{suffix}"
    file.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    rows, table = read_word_vectors(str(file))
    assert dict(rows) == {"the": 0, "New_York": 1, "café": 2}
    np.testing.assert_array_equal(table, vectors[:3])
    assert table.dtype == np.float32


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("v.bin", b"2 2\na " + bytes(8), "has 1 words, and its first line says 2; fetch it again"),
        ("v.bin", b"2 2\na " + bytes(8) + b"b " + bytes(6), "has 1 words, and its first line says"),
        ("v.bin", b"1 1\na \x00\x00\x80\x7f", "the vector of 'a' has a number that is not"),
        ("v.bin", b"\xba\x16\x4f\x2f\x0c" + bytes(90), "give the vectors as text"),
        ("v.bin", b"3 2\n" + b"x" * 3000, "has 0 words, and its first line says 3"),
        ("v.bin", b"2 9\n" + b"cat 0.25 -1.5\n" * 40, "if it is text, name it .txt"),
        ("v.bin", b"", "does not begin with the numbers of words and of columns"),
        ("v.bin", b"0 5\n", "has no word vectors"),
        ("v.txt", b"3 2\ncat 1 2\n", "has 1 words, and its first line says 3; fetch it again"),
        ("v.txt", b"", "has no word vectors"),
        ("v.txt", b"2 3\n", "has 0 words, and its first line says 2"),
        ("v.txt", b"the 1 2 3\na 1 2\n", "line 2: is not a word and 3 numbers"),
        ("v.txt", b"the 1 2 3\na 1 2 nan\n", "the vector of 'a' has a number that is not"),
        ("v.txt", b"the 1 2 3\na 1 2 1e39\n", "the vector of 'a' has a number that is not"),
        ("v.txt", b"the\n", "line 1: is not a word and 1 numbers"),
        ("v.txt", b"a text that is no table\n", "line 1: is not a word and 5 numbers"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, complaint: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        read_word_vectors(str(tmp_path / name))


assert_equal = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-25)


def test_embeddings_begin_with_the_vectors(tmp_path: Path, still: Experiment) -> None:
    """The rows of known words, at the scale of the initial embeddings; the others stay."""
    plain = fit(still, tmp_path / "plain")
    assert plain.tokenizer is not None
    known = ["cat", "saw", "the"]
    ids = [plain.tokenizer.vocabulary[word] for word in known]
    vectors = write_vectors(
        tmp_path / "v.txt", ["elsewhere", *known], plain.params["embedding"].shape[1]
    )[1:]

    started = fit(still, tmp_path / "started", tmp_path / "v.txt")
    before, after = (np.asarray(run.params["embedding"]) for run in (plain, started))
    scaled = vectors * np.std(before) / np.std(vectors)
    np.testing.assert_allclose(after[ids], scaled, rtol=1e-4, atol=1e-6)
    others = np.setdiff1d(np.arange(len(before)), ids)
    np.testing.assert_array_equal(after[others], before[others])
    for name in plain.params.keys() - {"embedding"}:
        jax.tree.map(assert_equal, plain.params[name], started.params[name])
    [event] = [
        each
        for each in lines_of(tmp_path / "started/logbook.jsonl")
        if each["event"] == "warm start"
    ]
    assert event["resized"] == {"embedding": 3}

    (tmp_path / "v.txt").unlink()
    resumed = fit(dataclasses.replace(still, steps=2), tmp_path / "started", tmp_path / "v.txt")
    assert resumed.step == 2
    jax.tree.map(assert_equal, started.params, resumed.params)


def test_cases_of_words() -> None:
    """A token has its own vector if there is one, else that of the word in another case."""
    tokenizer = SimpleNamespace(
        vocabulary={"Cat": 0, "cat": 1, "Dog": 2, "Axe": 3, "paris": 4, "x": 5},
        has_word_tokens=True,
    )
    words = {"axe": 0, "cat": 10, "dog": 11, "Dog": 12, "Paris": 13, "PARIS": 14}
    found = rows_of_words(words, "v.txt", cast("Any", tokenizer))
    assert found == [(0, 10), (1, 10), (2, 12), (3, 0), (4, 13)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scale_of_the_initial_embeddings(dtype: str) -> None:
    """Of a large table too, whose sums NumPy cannot compute in bfloat16."""
    draw = np.random.default_rng(0)
    table = np.asarray(jnp.asarray(draw.normal(size=(1000, 128)) * 0.02, dtype))
    vectors = draw.normal(size=(3000, 128)).astype(np.float32) * 5
    rows = [(token, 2 * token) for token in range(0, 1000, 2)]
    result = copy_scaled(table, vectors, rows, "v.txt")
    assert result.dtype == table.dtype
    assert np.std(result[::2].astype(np.float64)) == pytest.approx(0.02, rel=0.02)
    np.testing.assert_array_equal(result[1::2], table[1::2])
    equal = np.full_like(vectors, 0.1), np.tile(vectors[:1], (3000, 1)), np.zeros_like(vectors)
    for each in equal:
        with pytest.raises(UserError, match=r"v\.txt: the vectors of this run's words are equal"):
            copy_scaled(table, each, rows, "v.txt")


def test_vectors_that_do_not_suit_the_run_are_refused(tmp_path: Path, still: Experiment) -> None:
    file, width = tmp_path / "v.txt", still.model.d_model
    data: Any = still.data
    data = dataclasses.replace(data, tokenizer=TokenizerConfig("byte"))
    in_bytes = dataclasses.replace(still, data=data)
    adapted = dataclasses.replace(still, lora=LoRAConfig(rank=2))
    for word, columns, experiment, words in (
        ("cat", 3, still, r"v\.txt: has 3 numbers for each word"),
        ("elsewhere", width, still, "none of its 1 words is among the"),
        ("cat", width, adapted, "needs a trained model"),
        ("cat", width, in_bytes, "need tokens that are words"),
    ):
        write_vectors(file, [word], columns)
        with pytest.raises(UserError, match=words):
            fit(experiment, tmp_path / "run", file)
    with pytest.raises(UserError, match=r"init_adapter a: is for a trained model, and .*v\.txt is"):
        train.fit(still, str(tmp_path / "run"), init_from=str(file), init_adapter="a")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UsageError, match="is a file of word vectors, which has no model"):
        with_model_of(str(file), still)


@pytest.mark.full
def test_sweep_begins_with_the_vectors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\n"
        "from tests.train.tasks.support import tiny_classifier\n"
        f"EXPERIMENTS = {{'own': tiny_classifier(Path({str(tmp_path)!r}), steps=1)}}\n"
    )
    config, file = str(tmp_path / "own.py:own"), str(tmp_path / "v.txt")
    write_vectors(tmp_path / "v.txt", ["cat", "saw"], tiny_classifier(tmp_path).model.d_model)
    swept = ("--seeds", "2", "--workdir", str(tmp_path / "sweep"), "--init-from", file)
    done = command(capsys, "sweep", config, *swept)
    assert done.status == 0, done.error
    assert f'"source": "{file}"' in (tmp_path / "sweep/seed=1/logbook.jsonl").read_text()
