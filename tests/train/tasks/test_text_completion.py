import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.train.tasks.support import large_params
from train.data.data_config import TokenizerConfig
from train.data.tokenizer_training import train_tokenizer
from train.errors import UserError
from train.tasks.task import SampleOptions
from train.tasks.text_completion import complete_texts, encode_prompt
from transformer.attention.full import AttentionConfig
from transformer.generation.generate import generate
from transformer.generation.sampling import SamplingConfig
from transformer.layers.position_embedding import LearnedPositions
from transformer.models.block import BlockConfig
from transformer.models.config import TransformerConfig
from transformer.models.language_model import LanguageModel

END = 256
GREEDY = SamplingConfig(temperature=0)
CONFIG = TransformerConfig(
    vocab_size=257,
    d_model=20,
    num_layers=1,
    layer_pattern=(BlockConfig(mixer=AttentionConfig(num_heads=5)),),
    position_embedding=LearnedPositions(64),
)


FOLDER = SimpleNamespace(model_type="")  # the weights are no import's


def make_run(config: TransformerConfig) -> Any:
    """Return a run over bytes, whose weights are large enough for its choices to differ."""
    model = LanguageModel(config)
    params = large_params(model, 12)
    tokenizer = train_tokenizer(TokenizerConfig(kind="byte"), [])
    return SimpleNamespace(model=model, params=params, tokenizer=tokenizer, folder=FOLDER)


def complete(run: Any, prompts: list[str], **options: Any) -> list[str]:
    """Return the continuation of each prompt."""
    return complete_texts(
        run, [encode_prompt(run, each) for each in prompts], SampleOptions(**options)
    )


@pytest.fixture(scope="module")
def run() -> Any:
    return make_run(CONFIG)


def expected_tokens(run: Any, prompt: str, count: int, seed: int = 0) -> list[int]:
    """Return the tokens that `generate` returns after the end-of-text token and the prompt."""
    row = [END, *prompt.encode()]
    make_run = generate(
        run.model, run.params, [row], max_new_tokens=count, seed=seed, stop_token=END
    )
    return make_run.tokens[0]


@pytest.mark.full
def test_each_prompt_is_continued(run: Any) -> None:
    prompts = ["ab", "", "héé"]
    texts = complete(run, prompts, max_new_tokens=23, seed=4)
    expected = [
        bytes(expected_tokens(run, prompt, 23, 4)).decode(errors="replace") for prompt in prompts
    ]
    assert texts == expected
    assert len(set(texts)) == 3


def test_generation_ends_at_end_of_text(run: Any) -> None:
    """The model's constant hidden state makes that token certain, or impossible."""
    for push, expected in ((1e4, 0), (-1e4, 30)):
        embedding = np.array(run.params["embedding"])
        embedding[END] = push
        mean = np.asarray(run.params["final_norm"]["bias"])
        params = run.params | {
            "embedding": embedding,
            "final_norm": {"gain": np.zeros_like(mean), "bias": np.ones_like(mean)},
        }
        other: Any = SimpleNamespace(**{**vars(run), "params": params})
        pieces: list[str] = []
        complete(other, ["x"], max_new_tokens=30, on_text=pieces.append)
        assert len("".join(pieces)) <= expected
        assert bool(pieces) == bool(expected)


def test_streamed_pieces_join_to_the_text(run: Any) -> None:
    pieces: list[str] = []
    [text] = complete(run, ["ab"], max_new_tokens=40, seed=2, on_text=pieces.append)
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert all(pieces)
    with pytest.raises(ValueError, match="give 1 prompt, not 2"):
        complete(run, ["a", "b"], max_new_tokens=1, on_text=pieces.append)


@pytest.mark.full
def test_word_keeps_its_leading_space() -> None:
    """WordPiece marks a missing space by `##`, and the first word of a text never has one."""
    texts = ["the cat sat on the mat"] * 9
    tokenizer = train_tokenizer(TokenizerConfig(kind="wordpiece", vocab_size=60), texts)
    run = make_run(dataclasses.replace(CONFIG, vocab_size=tokenizer.vocab_size))
    run.tokenizer = tokenizer
    pieces: list[str] = []
    [text] = complete(run, ["the cat"], max_new_tokens=9, seed=3, on_text=pieces.append)
    row = [tokenizer.eos_token_id, *tokenizer.encode("the cat")]
    new = generate(run.model, run.params, [row], max_new_tokens=9, seed=3).tokens[0]
    assert "the cat" + text == tokenizer.decode([*row, *new])
    assert text == "".join(pieces)
    assert " " in text


def test_long_generation_reuses_positions(run: Any) -> None:
    # 61 of 64 positions are free after the start token and "ab"; then the newest 32 are kept.
    [text] = complete(run, ["ab"], max_new_tokens=100, sampling=GREEDY)
    tokens = [END, *b"ab"]
    for count in (61, 32, 7):
        visible = tokens if len(tokens) < 64 else tokens[-32:]
        tokens += generate(
            run.model, run.params, [visible], max_new_tokens=count, sampling=GREEDY
        ).tokens[0]
    assert END not in tokens[1:]
    assert text == bytes(tokens[3:]).decode(errors="replace")


@pytest.mark.full
def test_prompts_are_independent_when_positions_are_reused(run: Any) -> None:
    prompts = ["ab", "abcd", "ab", "xy"]
    texts = complete(run, prompts, max_new_tokens=80, seed=1)
    assert len(set(texts)) == 4  # equal prompts differ too
    assert complete(run, ["abcd"], max_new_tokens=80, seed=1) == [texts[1]]
    assert complete(run, ["xy", "ab"], max_new_tokens=80, seed=1) == [texts[3], texts[0]]


def test_no_prompts(run: Any) -> None:
    assert complete(run, [], max_new_tokens=3) == []


def test_prompts_that_cannot_be_continued_raise(run: Any) -> None:
    with pytest.raises(UserError, match="max_new_tokens 0"):
        complete(run, ["ab"], max_new_tokens=0)
    with pytest.raises(UserError, match="64 tokens leave no room for 1 more"):
        complete(run, ["a" * 63], max_new_tokens=100)


def test_error_names_unknown_characters(run: Any) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind="character"), ["abc"])
    other: Any = SimpleNamespace(**{**vars(run), "tokenizer": tokenizer})
    with pytest.raises(UserError, match="'z'"):
        complete(other, ["abz"], max_new_tokens=3)
