"""Questions as rows and windows, spans of answers, and the loss and scores of SQuAD."""

import collections
import itertools
import json
import re
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import train
from tests.train.tasks.support import tiny_answerer
from train.assembly import make_task
from train.data.question_answers import (
    Question,
    QuestionAnsweringDataConfig,
    cut_windows,
    make_question_split,
    prepare_questions,
)
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.tasks.metrics import score_answer
from train.tasks.question_answering import (
    QuestionAnswering,
    QuestionAnsweringTask,
    best_span,
    split_prompt,
)
from transformer.interop.pretrained import read_model

FIXTURE = Path(__file__).parents[2] / "transformer" / "interop" / "fixtures" / "bert-answers"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "who", "?", "keats", "wrote", "it", ".", "##s", "a"]


@pytest.fixture
def bert(tmp_path: Path) -> Tokenizer:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    return Tokenizer.load(str(tmp_path))


def test_best_span_has_the_largest_sum_of_both_logits() -> None:
    logits = np.random.RandomState(0).normal(size=(9, 2))
    spans = [(i, j) for i, j in itertools.product(range(9), repeat=2) if 0 <= j - i < 3]
    expected = max(spans, key=lambda span: logits[span[0], 0] + logits[span[1], 1])
    assert best_span(logits, 3)[:2] == expected


def test_prompt_is_a_question_and_a_context() -> None:
    assert split_prompt("Who?\nKeats.\nHe wrote it.") == ("Who?", "Keats.\nHe wrote it.")
    with pytest.raises(UserError, match="has no context"):
        split_prompt("Who wrote it?")


def test_pair_has_the_tokens_and_types_of_bert(bert: Tokenizer) -> None:
    pair = bert.encode_pair("Who?", "Keats  wrote")
    assert pair.tokens.tolist() == [2, 4, 5, 3, 6, 7, 3]
    assert pair.types.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert pair.start == 4
    assert pair.spans.tolist() == [[0, 5], [7, 12]]


def test_pair_has_two_tokens_between_texts_of_mpnet(tmp_path: Path) -> None:
    words = ["<s>", "<pad>", "</s>", "[UNK]", "who", "keats"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "MPNetTokenizer"}')
    pair = Tokenizer.load(str(tmp_path)).encode_pair("who", "keats")
    assert pair.tokens.tolist() == [0, 4, 2, 2, 5, 2]
    assert pair.types.tolist() == [0, 0, 0, 0, 0, 0]


def test_pair_of_a_tokenizer_without_own_tokens_is_framed() -> None:
    words = {"[CLS]": 0, "<eos>": 1, "who": 2, "keats": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(words, "who"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pair = Tokenizer(backend).encode_pair("who who", "keats who")
    assert pair.tokens.tolist() == [0, 2, 2, 1, 3, 2, 1]
    assert pair.types.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert (pair.start, pair.spans.tolist()) == (4, [[0, 5], [6, 9]])


@pytest.mark.parametrize(("length", "overlap"), [(8, 1), (9, 3), (20, 5), (13, 0)])
def test_windows_are_those_of_the_tokenizers_library(
    bert: Tokenizer, length: int, overlap: int
) -> None:
    context = " ".join(np.random.RandomState(0).choice(WORDS[4:10], size=13))
    backend = tokenizers.Tokenizer.from_str(bert.to_json())
    backend.enable_truncation(length, stride=overlap, strategy="only_second")
    first = backend.encode("who?", context)
    expected = [each.ids for each in (first, *first.overflowing)]
    windows = cut_windows(bert.encode_pair("who?", context), length, overlap)
    assert [each.tokens.tolist() for each in windows] == expected
    for each in windows:
        texts = [context[slice(*span)] for span in each.spans]
        assert texts == [WORDS[token] for token in each.tokens[each.start : -1]]


def test_targets_are_the_tokens_that_cover_the_answer(bert: Tokenizer) -> None:
    context = "it wrote it. keatss wrote a"
    # Within a word: all of its tokens that the answer touches.
    start = context.index("keatss wrote")
    question = Question("who?", context, (("eatss wrote", start + 1), ("it", 0)), "here")
    split = make_question_split(bert, [question], 9, 1)
    found = [
        [WORDS[token] for token in tokens[first : last + 1]]
        for tokens, (first, last) in zip(
            (split.tokens[row] for row in range(len(split.tokens))), split.targets, strict=True
        )
    ]
    # Windows of four tokens: the second begins with the last token of the first.
    assert found == [["[CLS]"], ["keats", "##s", "wrote"], ["[CLS]"]]
    batch = split.batch(np.array([1, -1]), (11,))
    assert batch["weights"].tolist() == [[1, 1], [0, 0]]
    assert batch["targets"].tolist() == [split.targets[1].tolist(), [0, 0]]
    assert batch["segments"].sum(1).tolist() == [9, 0]


SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Poems",
            "paragraphs": [
                {
                    "context": "Keats wrote it.",
                    "qas": [
                        {
                            "id": "1",
                            "question": " Who wrote it?",
                            "answers": [{"text": "Keats", "answer_start": 0}],
                        },
                        {"id": "2", "question": "When?", "is_impossible": True, "answers": []},
                    ],
                }
            ],
        }
    ],
}


def test_files_of_squad_and_rows_are_read_alike(tmp_path: Path) -> None:
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD, indent=1))
    rows = [
        {"text": ["Keats"], "answer_start": [0]},
        {"text": [], "answer_start": []},
    ]
    with (tmp_path / "rows.jsonl").open("w") as stream:
        for question, answers in zip(("Who wrote it?", "When?"), rows, strict=True):
            row = {"question": question, "context": "Keats wrote it.", "answers": answers}
            stream.write(json.dumps(row) + "\n")
    found = []
    for name in ("squad.json", "rows.jsonl"):
        path = str(tmp_path / name)
        config = QuestionAnsweringDataConfig(path=path, validation_path=path)
        corpus = prepare_questions(config)
        found.append([each[:3] for each in corpus.split("train").questions])
    assert found[0] == found[1]
    assert found[0][0] == ("Who wrote it?", "Keats wrote it.", (("Keats", 0),))
    assert found[0][1][2] == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": {"text": ["wrote"], "answer_start": [5]}}, "does not stand at character 5"),
        ({"answers": {"text": ["wrote"], "answer_start": [-9]}}, "does not stand at character -9"),
        ({"answers": {"text": ["wrote"], "answer_start": []}}, "have no text and answer_start"),
        ({"answers": "wrote"}, "have no text and answer_start"),
        ({"question": 3}, "have no text and answer_start"),
    ],
)
def test_wrong_rows_are_refused_by_their_place(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    row = {"question": "Who?", "context": "Keats wrote it.", "answers": []} | change
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match=rf"a\.jsonl:1: .*{message}"):
        prepare_questions(QuestionAnsweringDataConfig(path=str(tmp_path / "a.jsonl")))


def test_loss_is_that_of_transformers_whatever_the_padding() -> None:
    """Of BertForQuestionAnswering on the fixture's model, with these tokens and positions."""
    draw = np.random.RandomState(0)
    tokens, types = draw.randint(3, 51, (3, 13)), np.array([[0] * 5 + [1] * 8] * 3)
    targets = np.array([[6, 8], [0, 0], [3, 12]])
    pretrained, params = read_model(FIXTURE)
    data = QuestionAnsweringDataConfig()
    task = QuestionAnsweringTask(QuestionAnswering(), pretrained.config, data)
    loss_fn = task.make_loss_fn(pretrained.make_model())
    for rows, columns in ((0, 0), (1, 4)):
        pad = lambda array: np.pad(array, ((0, rows), (0, columns)))  # noqa: B023, E731
        batch: Any = {
            "tokens": pad(tokens),
            "token_types": pad(types),
            "segments": pad(np.ones_like(tokens)),
            "targets": np.pad(targets, ((0, rows), (0, 0))),
            "weights": np.pad(np.ones((3, 2), np.float32), ((0, rows), (0, 0))),
        }
        loss = loss_fn(params, batch, None)["loss"]
        assert float(loss.total / loss.weight) == pytest.approx(2.9333415, abs=1e-5)


def official_scores(answer: str, gold: list[str]) -> tuple[float, float]:
    """Return the scores of evaluate-v2.0.py, written after it."""

    def normalize(text: str) -> str:
        text = "".join(each for each in text.lower() if each not in set(string.punctuation))
        return " ".join(re.sub(re.compile(r"\b(a|an|the)\b", re.UNICODE), " ", text).split())

    def f1(expected: str) -> float:
        theirs, ours = normalize(expected).split(), normalize(answer).split()
        common = collections.Counter(theirs) & collections.Counter(ours)
        num_same = sum(common.values())
        if not theirs or not ours:
            return float(theirs == ours)
        if num_same == 0:
            return 0
        precision, recall = num_same / len(ours), num_same / len(theirs)
        return 2 * precision * recall / (precision + recall)

    gold = [each for each in gold if normalize(each)] or [""]
    return max(float(normalize(answer) == normalize(x)) for x in gold), max(map(f1, gold))


def test_scores_are_those_of_the_official_script() -> None:
    texts = [
        *("", "the", "The Cat!", "a cat", "cat's", "cats", "the cat the dog", "dog, cat, dog"),
        *("An  apple\n a day", "apple-day", "Über die 3.5%", "über die 35"),
    ]
    for answer in texts:
        for gold in ([], *([each] for each in texts), texts[2:5], ["the", "dog"]):
            expected = pytest.approx(official_scores(answer, gold))
            assert tuple(score_answer(answer, gold)) == expected, (answer, gold)


def test_answers_are_the_best_over_windows_and_empty_where_nothing_is_likelier(
    bert: Tokenizer,
) -> None:
    context = "it wrote it. keats wrote a"
    questions = [Question("who?", context, (), "here")] * 2
    split = make_question_split(bert, questions, 9, 1)
    data = QuestionAnsweringDataConfig(max_length=9, overlap=1)
    task = QuestionAnsweringTask(QuestionAnswering(), Any, data)  # type: ignore[arg-type]
    assert split.question_indices.tolist() == [0, 0, 1, 1]
    logits = {row: np.zeros((12, 2)) for row in range(3)}
    logits[0][5] = [1, 1]
    logits[1][6] = [2, 1]
    logits[1][9:] = 50  # padding, and what ends the row, are no answers
    logits[1][1] = 50  # nor is the question
    logits[0][0] = 9  # nothing, by one window alone
    assert task.find_answers(split, logits, True) == {0: "wrote"}
    logits[1][0] = [3, 1]
    assert task.find_answers(split, logits, True) == {0: ""}
    assert task.find_answers(split, logits, False) == {0: "wrote"}


def test_a_model_learns_to_answer(tmp_path: Path) -> None:
    experiment = tiny_answerer(tmp_path)
    assert make_task(experiment).config.may_abstain is None  # type: ignore[attr-defined]
    run = train.fit(experiment, str(tmp_path / "run"), quiet=True)
    assert run.experiment.task.may_abstain is True  # type: ignore[attr-defined]
