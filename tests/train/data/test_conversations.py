import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import models

from train.data.chat_template import ChatTemplate, encode_chat, end_tokens
from train.data.conversations import (
    ConversationDataConfig,
    pack,
    parse_conversation,
    prepare_conversations,
)
from train.data.data_config import TokenizerConfig
from train.data.preferences import parse_pair
from train.data.tokenizer import Tokenizer
from train.errors import UserError

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}."
    "{% endgeneration %}{% else %}Q:{{ m.content }};{% endif %}{% endfor %}"
)
HISTORY = (
    "{% for m in messages %}{{ m.role[0] ~ ':' }}{% if m.role == 'assistant' %}"
    "{% if loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls %}<{{ call.function.name }}>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
"""Reasoning is written in the last turn alone."""

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
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return ConversationDataConfig(
        path=str(path), validation_path=str(path), max_length=64, tokenizer=TokenizerConfig("byte")
    )


def test_loss_counts_answers_and_their_ends() -> None:
    assert counted(make_tokenizer(CHATML), TURNS) == ["b<|im_end|>\n", "dd<|im_end|>\n"]
    assert counted(make_tokenizer(CHATML), TURNS, first=3) == ["dd<|im_end|>\n"]
    assert counted(make_tokenizer(MARKED), TURNS) == ["b.", "dd."]
    assert counted(make_tokenizer(MARKED), TURNS, first=2) == ["dd."]
    assert counted(make_tokenizer(), TURNS) == [" b<|endoftext|>", " dd<|endoftext|>"]


def test_answers_of_weight_zero_are_not_learned() -> None:
    for template, parts in ((CHATML, ["dd<|im_end|>\n"]), (MARKED, ["dd."])):
        for field in ({"weight": 0}, {"train": False}, {"train": 0}):
            turns = [TURNS[0], TURNS[1] | field, TURNS[2], TURNS[3] | {"weight": 1}]
            assert counted(make_tokenizer(template), turns) == parts
            assert counted(make_tokenizer(template), turns[:2]) == []


def test_answers_are_found_where_a_template_rewrites_earlier_turns() -> None:
    call = {"function": {"name": "add"}}
    turns = [
        TURNS[0],
        {"role": "assistant", "content": "b", "reasoning": "why"},
        TURNS[2],
        {"role": "assistant", "tool_calls": [call, call]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "7", "thinking": "so"},
    ]
    parts = ["b;", "<add><add>;", "<think>so</think>7;"]
    assert counted(make_tokenizer(HISTORY), turns) == parts


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
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
    ids=range(6),
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
    batch = split.batch(np.arange(len(split.lengths)), (int(split.lengths.max()),))
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
    assert "1 of 3 conversations have no answer to learn" in corpus.notes[1]
    assert corpus.split("train").lengths.max() <= 64
    with pytest.raises(UserError, match="has no answers of an assistant"):
        prepare_conversations(write(tmp_path, records[1]), make_tokenizer())


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([], "data.jsonl:1: is not an object"),
        ({"prompt": "x"}, r"has no fields of a conversation \(it has prompt\)"),
        ({"prompt": "x", "completion": 3}, "completion is not a list of messages"),
        ({"prompt": "x", "completion": [{"role": "a", "content": "b"}]}, "give two of a kind"),
        ({"messages": []}, "messages is not a list of messages"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\] has no text 'content'"),
        ({"messages": list(TURNS), "tools": [1]}, "jsonl:1: chat template: does not read tools"),
        ({"messages": list(TURNS), "functions": [1]}, "functions is not supported; give tools"),
        ({"messages": [TURNS[0], TURNS[1] | {"tool_calls": [1]}]}, "nothing of tool_calls"),
        ({"messages": [TURNS[0], TURNS[1] | {"thinking": "x"}]}, "writes nothing of thinking"),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 0.5}]}, r"messages\[1\] has weight 0.5"),
        ({"messages": [TURNS[0] | {"content": [{"type": "image"}]}]}, "a part 'image' that is not"),
        ({"conversations": [{"from": "moon", "value": "x"}]}, "is from 'moon', which is no known"),
    ],
)
def test_invalid_lines_raise(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare_conversations(write(tmp_path, record), make_tokenizer())


def test_formats_of_conversations() -> None:
    """Alpaca, ShareGPT, and others of their kind give the same messages."""
    question, answer = {"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}
    parts = [{"type": "text", "text": "a\n"}, {"type": "text", "text": "b"}]
    said = [{"from": "human", "value": "a\nb"}, {"from": "gpt", "value": "c", "weight": None}]
    rows: list[Any] = [
        {"messages": [{"role": "user", "content": parts}, answer | {"tool_calls": None}]},
        {"conversations": said, "tools": None},
        {"conversations": [question, answer], "tools": "[]"},
        {"instruction": "a", "input": "b", "output": "c"},
        {"instruction": "a\nb", "input": "", "output": "c", "system": ""},
        {"instruction": "a", "context": "b", "response": "c"},
        {"question": "a\nb", "answer": "c"},
    ]
    for row in rows:
        assert parse_conversation("x", row).content == ((question, answer), (), {})
    system = {"role": "system", "content": "s"}
    for row in (rows[1] | {"system": "s"}, rows[3] | {"system_prompt": "s"}):
        assert parse_conversation("x", row).messages == (system, question, answer)
    row = rows[0] | {"tools": '[{"name": "f"}]', "chat_template_kwargs": {"today": 1}, "id": 7}
    conversation = parse_conversation("x", row)
    assert conversation.variables == {"tools": [{"name": "f"}], "today": 1}
    assert conversation.unread == ("id",)
    text = ChatTemplate(HISTORY).render(conversation.messages, variables=conversation.variables)
    assert text == 'u:a\nb;a:<think></think>c;[{"name": "f"}]'


def test_formats_of_pairs() -> None:
    question, good, bad = ({"role": r, "content": c} for r, c in zip("uaa", "qgb", strict=True))
    good["role"] = bad["role"] = "assistant"
    said = {"from": "gpt", "value": "g"}, {"from": "gpt", "value": "b"}
    rows: list[Any] = [
        {"prompt": [question], "chosen": [good], "rejected": [bad]},
        {"prompt": [question], "chosen": "g", "rejected": "b"},
        {"messages": [question], "chosen": good, "rejected": bad},
        {"conversations": [question], "chosen": said[0], "rejected": said[1]},
        {"chosen": [question, good], "rejected": [question, bad]},
        {"prompt": "q", "chosen": [question, good], "rejected": [question, bad]},
    ]
    for row in rows:
        pair = parse_pair("x", row)
        assert pair.chosen.content == ((question,), (good,), {})
        assert pair.rejected.content == ((question,), (bad,), {})
    texts = parse_pair("x", {"prompt": "q", "chosen": "g", "rejected": "b"})
    assert texts.rejected.content == ("q", "b", {})
    asked = parse_pair("x", {"system": "s", "question": "q", "chosen": "g", "rejected": "b"})
    assert [each["content"] for each in asked.chosen.messages] == ["s", "q", "g"]
    with pytest.raises(UserError, match="do not begin with the same prompt"):
        parse_pair("x", {"prompt": "other", "chosen": [question, good], "rejected": [question]})
    with pytest.raises(UserError, match=r"no prompt beside its texts \(it has chosen, rejected"):
        parse_pair("x", {"chosen": "q g", "rejected": "q b"})


def test_fields_without_effect_are_reported(tmp_path: Path) -> None:
    turns = [TURNS[0] | {"name": "Ann", "id": 3}, TURNS[1] | {"weight": 1, "train": True}]
    records = [{"messages": turns, "source": "web"}, {"messages": list(TURNS), "score": 1}]
    corpus = prepare_conversations(write(tmp_path, *records), make_tokenizer(CHATML))
    assert corpus.notes[:2] == (
        "fields of rows that are not read: source, score",
        "fields of messages that the chat template does not name: name, id",
    )


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
