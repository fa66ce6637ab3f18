"""Scores of texts: which tokens of a text are scored, after which context."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import train
from tests.train.support import light_compiler as light_compiler
from tests.train.support import tiny
from tests.train.tasks.support import tiny_translator
from train.assembly import make_engine, make_task, with_task
from train.data.bitext import encode_sentences
from train.data.tokenizer import Tokenizer
from train.errors import UserError
from train.run import Run
from train.run_folder.folder import RunFolder
from train.tasks.text_scores import encode_continuation
from transformer import EncoderDecoder, Hardware
from transformer.generation.log_likelihood import log_likelihoods


@pytest.fixture(scope="module")
def language(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("language")
    return train.fit(tiny(folder, num_layers=1, dropout=0.0, steps=1), folder / "run")


@pytest.fixture(scope="module")
def merging() -> Tokenizer:
    """A tokenizer in which "b" and "c" merge into one token."""
    import tokenizers

    model = tokenizers.models.BPE({"<eos>": 0, "a": 1, "b": 2, "c": 3, "bc": 4}, [("b", "c")])
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend)


def with_start(tokenizer: Tokenizer) -> Tokenizer:
    """Return the tokenizer with <eos> before every text, as published ones have <s>."""
    import tokenizers

    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 0)]
    )
    return Tokenizer(backend)


@pytest.mark.parametrize(
    ("text", "context", "row", "start"),
    [
        ("ab", None, [1, 2], 1),
        ("ab", "", [0, 1, 2], 1),
        ("ab", "c", [3, 1, 2], 1),
        ("ca", "ab", [1, 4, 1], 1),  # "bc" spans both, and is scored
        ("c", "b", [0, 4], 1),
    ],
)
def test_scored_tokens(
    merging: Tokenizer, text: str, context: str | None, row: list[int], start: int
) -> None:
    found, found_start = encode_continuation(merging, text, context)
    assert (found.tolist(), found_start) == (row, start)


@pytest.mark.parametrize(
    ("text", "context", "row", "start"),
    [("a", None, [0, 1], 1), ("ab", "", [0, 1, 2], 1), ("ab", "c", [0, 3, 1, 2], 2)],
)
def test_token_before_every_text_is_read_and_not_scored(
    merging: Tokenizer, text: str, context: str | None, row: list[int], start: int
) -> None:
    tokenizer = with_start(merging)
    assert tokenizer.added_token_ids[0].tolist() == [0]
    found, found_start = encode_continuation(tokenizer, text, context)
    assert (found.tolist(), found_start) == (row, start)


def test_text_without_scored_tokens_is_refused(merging: Tokenizer) -> None:
    with pytest.raises(UserError, match="the first is not scored"):
        encode_continuation(merging, "a", None)
    with pytest.raises(UserError, match="no tokens after its context"):
        encode_continuation(merging, "", "ab")


@pytest.mark.full
def test_parts_sum_to_the_whole(language: Run) -> None:
    """The chain rule: log p(a) + log p(b | a) = log p(a b)."""
    whole = language.score("the cat sat")
    first = language.score("the cat")
    second = language.score(" sat", context="the cat")
    assert isinstance(whole, tuple)
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert whole.total == pytest.approx(first.total + second.total, rel=1e-5)
    assert whole.num_tokens == first.num_tokens + second.num_tokens
    several = language.score(["the cat", " sat"], context=["", "the cat"])
    assert isinstance(several, list)
    assert several[1].total == pytest.approx(second.total, rel=1e-5)
    assert several[0].num_tokens == first.num_tokens + 1


@pytest.mark.full
def test_translation_is_scored_with_its_end(tmp_path: Path) -> None:
    experiment = tiny_translator(tmp_path)
    task = make_task(experiment)
    corpus = task.prepare_corpus()
    experiment = with_task(experiment, task.resolve(corpus))
    engine = make_engine(experiment, Hardware())
    run = Run(
        engine.model,
        engine.init().params,
        corpus.tokenizer,
        experiment=experiment,
        folder=RunFolder.create(tmp_path / "run"),
        step=0,
    )
    assert run.tokenizer is not None
    found = run.score(["das", "ein rotes"], context="the red cat")
    [source] = encode_sentences(run.tokenizer, ["the red cat"])
    targets = encode_sentences(run.tokenizer, ["das", "ein rotes"])
    rows = [np.append(run.tokenizer.eos_token_id, target) for target in targets]
    assert isinstance(run.model, EncoderDecoder)
    assert found == log_likelihoods(run.model, run.params, rows, sources=[source] * 2)
    with pytest.raises(UserError, match=r"^context: is missing; give the source"):
        run.score("das")


@pytest.mark.full
def test_each_text_needs_a_context_if_one_has(language: Run) -> None:
    with pytest.raises(UserError, match="context: 2 for 1 texts"):
        language.score(["ab"], context=["a", "b"])
    with pytest.raises(UserError, match="does not predict the next token"):
        dataclasses.replace(language, tokenizer=None).score("ab")
