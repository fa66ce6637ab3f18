"""The scripts in `examples/` run and do what they claim."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from tests.train.support import lines_of
from train.warm_start.word_vectors import read_word_vectors

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def default_rank_promotion() -> Iterator[None]:
    """Restore JAX's default configuration."""
    with jax.numpy_rank_promotion("allow"):
        yield


TESTED_ELSEWHERE = {"own_mixer", "own_task"}


def test_every_example_is_tested() -> None:
    tested = set(re.findall(r'load\("(\w+)"\)', Path(__file__).read_text()))
    assert tested | TESTED_ELSEWHERE == {path.stem for path in EXAMPLES.glob("*.py")}


@pytest.mark.full
def test_own_training_loop_learns() -> None:
    _, losses = load("own_training_loop").train(steps=150)
    assert losses[0] > 2
    assert losses[-1] < 1


@pytest.mark.full
def test_ensemble_members_learn_and_differ() -> None:
    example = load("ensemble")
    params, losses = example.train(steps=60)
    assert losses.shape == (example.MEMBERS,)
    assert np.all(losses < 2)
    tables = params["embedding"]
    assert not np.array_equal(tables[0], tables[1])


@pytest.mark.full
def test_frozen_layers_keep_their_bits_and_others_learn() -> None:
    example = load("freeze_and_load")
    before, loaded, after = example.main()
    jax.tree.map(
        lambda b, frozen, a: np.testing.assert_array_equal(b[frozen], a[frozen]),
        before,
        loaded,
        after,
    )
    trees = (before, loaded, after)
    before, loaded, after = (tree["layers"]["place_0"]["mixer"]["query"] for tree in trees)
    assert np.all(loaded[:2])
    assert not np.any(loaded[2:])
    assert np.any(before[2:] != after[2:])


@pytest.mark.full
def test_exported_model_gives_the_same_logits() -> None:
    assert max(load("export").main()) < 1e-5


@pytest.mark.full
def test_ablation_finds_a_necessary_head() -> None:
    example = load("head_ablation")
    params = example.train(steps=200)
    tokens = example.make_batch(jax.random.key(10**6))
    first, last = example.read_layers(params, tokens)
    assert last < 0.1 < 2 < first  # only the last layer knows the repeated token
    losses = np.array(example.ablate(params, tokens))
    assert losses.shape == (example.LAYERS, example.HEADS)
    assert losses.max() > 10 * last


@pytest.mark.full
def test_word_vectors_of_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat\nthe dog saw the cat\n" * 20)
    output = tmp_path / "vectors.txt"
    load("word_vectors").main(str(tmp_path / "text.txt"), output, words=20, width=3, steps=2)
    rows, table = read_word_vectors(str(output))
    assert {"cat", "dog", "mat"} <= set(rows)
    assert table.shape == (len(rows), 3)
    assert f"vectors of {len(rows)} words, from 260 words" in capsys.readouterr().out


def test_questions_on_python_and_their_answers(tmp_path: Path) -> None:
    questions, pairs = tmp_path / "questions.jsonl", tmp_path / "pairs.jsonl"
    load("python_questions").main(str(questions), str(pairs))
    answers = {}
    for question, answer in (line["messages"] for line in lines_of(questions)):
        assert (question["role"], answer["role"]) == ("user", "assistant")
        answers[question["content"]] = answer["content"]
    assert len(answers) > 1000
    assert answers["What does bisect.insort_left do?"].startswith("Insert item x in list a, and")
    for pair in lines_of(pairs):
        [question], [chosen], [rejected] = pair["prompt"], pair["chosen"], pair["rejected"]
        assert answers[question["content"]] == chosen["content"] != rejected["content"]
