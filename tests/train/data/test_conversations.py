"""Instruction data: rendered text, tokens that count in the loss, packing, and errors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from train.data.buckets import bucket_by_rows
from train.data.chat_template import ChatTemplate, encode_chat, end_tokens
from train.data.conversations import pack, prepare_conversations
from train.data.data_config import TokenizerConfig
from train.data.example_configs import ConversationDataConfig
from train.data.examples import ExampleTrainingBatches
from train.data.tokenizer import Tokenizer
from train.errors import UsageError, UserError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}."
    "{% endgeneration %}{% else %}Q:{{ m.content }};{% endif %}{% endfor %}"
)
TURNS = (
    {"role": "user", "content": "a?"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c?"},
    {"role": "assistant", "content": "dd"},
)


def make_tokenizer(template: str = "") -> Tokenizer:
    """Return a tokenizer with a token per character, and special tokens."""
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    vocabulary = {each: i for i, each in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend).with_chat_template(template)


def counted(tokenizer: Tokenizer, messages: Any, first: int = 0) -> list[str]:
    """Return the parts that count in the loss, as text with special tokens."""
    template = ChatTemplate.of_tokenizer(tokenizer)
    tokens, inside = encode_chat(tokenizer, template.render_with_spans(messages, first))
    names = {number: name for name, number in tokenizer.vocabulary.items()}
    marks = "".join(names[int(t)] if own else "\0" for t, own in zip(tokens, inside, strict=True))
    return [part for part in marks.split("\0") if part]


def write(folder: Path, *records: Any) -> ConversationDataConfig:
    path = folder / "data.jsonl"
    lines = (each if isinstance(each, str) else json.dumps(each) for each in records)
    path.write_text("\n".join(lines) + "\n")
    return ConversationDataConfig(
        path=str(path), validation_path=str(path), max_length=64, tokenizer=TokenizerConfig("byte")
    )


def test_loss_counts_answers_and_their_ends() -> None:
    assert counted(make_tokenizer(CHATML), TURNS) == ["b<|im_end|>\n", "dd<|im_end|>\n"]
    assert counted(make_tokenizer(CHATML), TURNS, first=3) == ["dd<|im_end|>\n"]
    assert counted(make_tokenizer(MARKED), TURNS) == ["b.", "dd."]
    assert counted(make_tokenizer(MARKED), TURNS, first=2) == ["dd."]
    assert counted(make_tokenizer(), TURNS) == [" b<|endoftext|>", " dd<|endoftext|>"]


def test_texts_end_with_the_token_that_the_template_writes_too() -> None:
    tokenizer = make_tokenizer(CHATML)
    end_of_text, end = (tokenizer.vocabulary[each] for each in ("<|endoftext|>", "<|im_end|>"))
    assert end_tokens(tokenizer) == (end_of_text, end)
    assert end_tokens(make_tokenizer()) == (end_of_text,)
    refusing = "{{ raise_exception('no') }}"
    assert end_tokens(make_tokenizer(refusing)) == (end_of_text,)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "chat template: "),
        ("{{ raise_exception('only pairs') }}", "chat template: only pairs"),
        ("{{ messages.append(1) }}", "chat template: "),
        ("{{ ''.__class__.__mro__ }}", "chat template: "),
        ("{{ messages | length }}{{ messages[-1].content }}", "{% generation %}"),
    ],
)
def test_unsupported_templates_raise(template: str, message: str) -> None:
    tokenizer = make_tokenizer(template)
    with pytest.raises(UserError, match=message) as caught:
        ChatTemplate.of_tokenizer(tokenizer).render_with_spans(TURNS)
    assert "\n" not in str(caught.value)


def test_rows_hold_separate_whole_conversations(tmp_path: Path) -> None:
    """Targets are next tokens of the same conversation; only answers have weight."""
    records = [{"prompt": "q" * (3 + i), "completion": "a" * (2 + i % 4)} for i in range(9)] + [
        {"messages": list(TURNS)}
    ]
    corpus = prepare_conversations(write(tmp_path, *records), make_tokenizer(CHATML))
    split = corpus.split("train")
    buckets = bucket_by_rows(split.lengths, batch_size=len(split.lengths), max_buckets=1)
    batch = ExampleTrainingBatches(split, buckets, seed=0).host_batch(0, 0, 1)
    tokenizer = corpus.tokenizer
    names = {number: name for name, number in tokenizer.vocabulary.items()}
    result = []
    for row in range(len(batch["tokens"])):
        for number in range(1, batch["segments"][row].max() + 1):
            own = batch["segments"][row] == number
            tokens, targets = batch["tokens"][row][own], batch["targets"][row][own]
            np.testing.assert_array_equal(tokens[1:], targets[:-1])
            np.testing.assert_array_equal(batch["positions"][row][own], np.arange(own.sum()))
            weight = batch["weights"][row][own]
            result.append("".join(names[int(t)] for t in targets[weight > 0]))
    expected = ["a" * (2 + i % 4) + "<|endoftext|>" for i in range(9)]
    assert sorted(result) == sorted([*expected, "b<|im_end|>\ndd<|im_end|>\n"])
    assert not batch["weights"][batch["segments"] == 0].any()
    assert split.num_conversations == 10
    assert len(split.lengths) < 10
    apart = dataclasses.replace(write(tmp_path, *records), packing=False)
    assert len(prepare_conversations(apart, tokenizer).split("train").lengths) == 10


def test_packing_fills_rows() -> None:
    draw = np.random.RandomState(0)
    lengths = draw.randint(1, 100, 500).tolist()
    rows = pack(lengths, 100)
    assert sorted(i for row in rows for i in row) == list(range(500))
    sums = [sum(lengths[i] for i in row) for row in rows]
    assert max(sums) <= 100
    assert np.mean(sums) > 97
    assert pack([100, 1, 99], 100) == [[0], [2, 1]]


def test_truncated_and_skipped_conversations_are_reported(tmp_path: Path) -> None:
    records = [
        {"prompt": "q", "completion": "a" * 100},
        {"prompt": "q" * 100, "completion": "a"},
        {"prompt": "q", "completion": "a"},
    ]
    corpus = prepare_conversations(write(tmp_path, *records), make_tokenizer())
    assert "2 of 3 conversations are longer than data.max_length 64" in corpus.notes[0]
    assert "1 of 3 conversations have no answer" in corpus.notes[1]
    assert corpus.split("train").lengths.max() <= 64
    with pytest.raises(UserError, match="has no answers of an assistant"):
        prepare_conversations(write(tmp_path, records[1]), make_tokenizer())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "data.jsonl:1: not JSON"),
        ("[]", "data.jsonl:1: not a JSON object"),
        ({"prompt": "x"}, "has no field 'completion'"),
        ({"prompt": "x", "completion": 3}, "completion is not a list of messages"),
        ({"prompt": "x", "completion": [{"role": "a", "content": "b"}]}, "give two of a kind"),
        ({"messages": []}, "messages is not a list of messages"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no text 'content'"),
        ({"messages": list(TURNS), "tools": [1]}, "has tools"),
        ('{"prompt": "\\ud800", "completion": "x"}', "half a surrogate pair"),
    ],
)
def test_invalid_lines_raise(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        prepare_conversations(write(tmp_path, record), make_tokenizer())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["character", "wordpiece", "bpe"])
def test_trained_tokenizers_know_what_the_template_writes(tmp_path: Path, kind: Any) -> None:
    config = write(tmp_path, {"messages": list(TURNS)})
    config = dataclasses.replace(config, tokenizer=TokenizerConfig(kind, vocab_size=300))
    tokenizer = prepare_conversations(config).tokenizer
    text = ChatTemplate.of_tokenizer(tokenizer).render([{"role": "user", "content": "a b"}])
    tokens, _ = tokenizer.encode_with_special_tokens(text)
    assert tokenizer.decode(tokens).replace(" ", "").strip() == "User:ab"


def test_characters_that_a_chat_lacks_are_an_error(tmp_path: Path) -> None:
    config = write(tmp_path, {"messages": list(TURNS)})
    config = dataclasses.replace(config, tokenizer=TokenizerConfig("character"))
    tokenizer = prepare_conversations(config).tokenizer
    with pytest.raises(UserError, match="has characters that the tokenizer lacks"):
        tokenizer.encode_with_special_tokens("User: é<|endoftext|>")
    with pytest.raises(UsageError, match=r"data\.tokenizer\.kind: word cannot tell the end"):
        dataclasses.replace(config, tokenizer=TokenizerConfig("word"))


def test_template_is_saved_with_the_tokenizer(tmp_path: Path) -> None:
    make_tokenizer().save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": [{"name": "default", "template": "x"}], "eos_token": {"content": "e"}}'
    )
    loaded = Tokenizer.load(str(tmp_path))
    assert (loaded.chat_template, loaded.special_token_names) == ("x", {"eos_token": "e"})
    (tmp_path / "chat_template.jinja").write_text("y")
    assert Tokenizer.load(str(tmp_path / "tokenizer.json")).chat_template == "y"
    other = tmp_path / "other.jinja"
    other.write_text(CHATML)
    config = dataclasses.replace(
        write(tmp_path, {"messages": list(TURNS)}), chat_template=str(other)
    )
    assert prepare_conversations(config, loaded).tokenizer.chat_template == CHATML
