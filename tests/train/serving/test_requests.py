"""Requests of the API: what is read from them, and what is refused."""

from typing import Any

import pytest

from train.serving.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    RequestError,
    parse_chat,
    parse_completion,
    parse_embedding,
)
from transformer.generation.sampling import SamplingConfig

USER = {"role": "user", "content": "hi"}


def test_defaults_are_those_of_the_api() -> None:
    request = parse_completion({"prompt": "a"})
    assert request.prompts == ("a",)
    assert (request.max_tokens, request.default_max_tokens) == (None, 16)
    assert (request.n, request.stop) == (1, [])
    assert request.sampling == SamplingConfig(temperature=1, top_k=0, top_p=1)
    assert (request.stream, request.include_usage) == (False, False)
    chat = parse_chat({"messages": [USER]})
    assert (chat.max_tokens, chat.default_max_tokens) == (None, None)


def test_seed_is_drawn_unless_given() -> None:
    seeds = {parse_completion({}).seed for _ in range(9)}
    assert len(seeds) > 1
    assert all(0 <= seed <= 2**32 - 1 for seed in seeds)
    assert parse_completion({"seed": 7}).seed == 7


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], "b"], ((1, 2), "b")),
    ],
)
def test_prompts_are_texts_or_tokens(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert parse_completion({"prompt": prompt}).prompts == expected


def test_content_may_have_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parse_chat({"messages": [{"role": "user", "content": parts}]})
    assert request.messages == ({"role": "user", "content": "ab"},)


def test_fields_of_messages_and_tools_are_kept() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "add"}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    result = {"role": "tool", "content": "7", "tool_call_id": "1"}
    body = {"messages": [USER | {"name": "Bo"}, answer, result], "tools": [tool]}
    request = parse_chat(body)
    given = {"role": "assistant", "tool_calls": [call]}
    assert request.messages == (USER | {"name": "Bo"}, given, result)
    assert request.variables == {"tools": [tool]}
    assert parse_chat(body | {"tool_choice": "none"}).variables == {}


def test_null_is_as_good_as_absent() -> None:
    fields = {*COMPLETION_FIELDS, *CHAT_FIELDS, *IGNORED_FIELDS, *NEUTRAL_VALUES, "new"}
    nulls = dict.fromkeys(fields) | {"seed": 0}
    assert parse_completion(nulls) == parse_completion({"seed": 0})
    messages = {"messages": [USER], "seed": 0}
    assert parse_chat(nulls | messages) == parse_chat(messages)


def test_given_settings_are_read() -> None:
    body = {
        "messages": [USER],
        "max_completion_tokens": 3,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": -1,
        "tool_choice": "auto",
        "logprobs": False,
        "stop": "x",
        "stream": True,
        "stream_options": {"include_usage": True},
        "user": "somebody",
        "tools": None,
        "frequency_penalty": 0.0,
        "response_format": {"type": "text"},
    }
    request = parse_chat(body)
    assert request.max_tokens == 3
    assert request.sampling == SamplingConfig(temperature=0, top_k=0, top_p=0.5)
    assert (request.stop, request.stream, request.include_usage) == (["x"], True, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", 3),
        ("prompt", []),
        ("prompt", [True]),
        ("prompt", [2**31]),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("n", 129),
        ("seed", -1),
        ("seed", 2**32),
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_k", -2),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", "a" * 1001),
        ("stream", 1),
        ("stream_options", [1]),
        ("logprobs", 6),
        ("logprobs", True),
        ("echo", 1),
        ("logit_bias", {"5": 1}),
        ("presence_penalty", 0.5),
        ("temprature", 1),
        ("messages", []),
    ],
)
def test_wrong_fields_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field}") as caught:
        parse_completion({"prompt": "a", field: value})
    assert (caught.value.field, caught.value.status) == (field, 400)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("n", {"n": 100, "prompt": ["a", "b"]}),
        ("n", {"prompt": ["a"] * 129}),
        ("stream", {"stream": True, "n": 2}),
        ("stream", {"stream": True, "prompt": ["a", "b"]}),
        ("stream", {"stream": True, "logprobs": 0}),
        ("stream", {"stream": True, "echo": True}),
    ],
)
def test_too_many_answers_are_refused(field: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{field}") as caught:
        parse_completion(body)
    assert caught.value.field == field


def test_largest_values_are_accepted() -> None:
    stop = ["a" * 1000] * 16
    request = parse_completion({"prompt": [2**31 - 1], "n": 128, "seed": 2**32 - 1, "stop": stop})
    assert request.prompts == ((2**31 - 1,),)
    assert (request.n, request.seed, request.stop) == (128, 2**32 - 1, stop)
    assert len(parse_completion({"prompt": ["a"] * 128}).prompts) == 128
    assert not parse_completion({"stream_options": []}).include_usage


def test_logprobs_and_echo() -> None:
    request = parse_completion({"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 0})
    assert (request.max_tokens, request.echo, request.logprobs) == (0, True, 0)
    assert parse_completion({"prompt": "a", "logprobs": False}).logprobs is None
    with pytest.raises(RequestError, match=r"^echo: is not supported"):
        parse_chat({"messages": [USER], "echo": True})


def test_embedding() -> None:
    request = parse_embedding({"input": ["a", [5, 6]], "encoding_format": "base64", "user": "b"})
    assert request.inputs == ("a", (5, 6))
    assert request.encoding_format == "base64"
    assert parse_embedding({"input": [5, 6]}).inputs == ((5, 6),)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input", []),
        ("input", [[]]),
        ("input", None),
        ("input", ["a"] * 2049),
        ("encoding_format", "hex"),
        ("dimensions", 0),
        ("prompt", "a"),
    ],
)
def test_wrong_embeddings_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{field}") as caught:
        parse_embedding({"input": "a", field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("messages", [None, [], "hi", ["hi"], [{"content": "hi"}]])
def test_wrong_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match=r"^messages") as caught:
        parse_chat({"messages": messages})
    assert caught.value.field == "messages"
