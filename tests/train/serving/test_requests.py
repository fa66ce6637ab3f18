"""Requests of the API: what is read from them, and what is refused."""

from typing import Any

import pytest

from train.serving.requests import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    IGNORED_FIELDS,
    MAX_SEED,
    NEUTRAL_VALUES,
    RequestError,
    parse_chat,
    parse_completion,
)
from transformer.generation.sampling import SamplingConfig

USER = {"role": "user", "content": "hi"}


def test_defaults_are_those_of_the_api() -> None:
    request = parse_completion({"prompt": "a"})
    assert request.prompts == ("a",)
    assert (request.max_tokens, request.default_max_tokens) == (None, 16)
    assert (request.num_choices, request.stop) == (1, ())
    assert request.sampling == SamplingConfig(temperature=1, top_k=0, top_p=1)
    assert (request.stream, request.include_usage) == (False, False)
    chat = parse_chat({"messages": [USER]})
    assert (chat.max_tokens, chat.default_max_tokens) == (None, None)


def test_seed_is_drawn_unless_given() -> None:
    seeds = {parse_completion({}).seed for _ in range(9)}
    assert len(seeds) > 1
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
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
    assert (request.stop, request.stream, request.include_usage) == (("x",), True, True)


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"prompt": 3}, "prompt", "prompt: is neither a string nor a list of token ids"),
        ({"prompt": []}, "prompt", "prompt: is an empty list"),
        ({"prompt": [True]}, "prompt", "prompt: is neither"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens 0: give an integer, 1 or more"),
        ({"max_tokens": 2.5}, "max_tokens", "max_tokens 2.5: give an integer"),
        ({"n": 129}, "n", "n 129: give an integer, 1 to 128"),
        ({"seed": -1}, "seed", "seed -1: give an integer, 0 to 4294967295"),
        ({"temperature": -1}, "temperature", "temperature -1.0: give 0"),
        ({"temperature": "hot"}, "temperature", "temperature 'hot': give a number"),
        ({"temperature": float("nan")}, "temperature", "temperature nan"),
        ({"top_p": 0}, "top_p", "top_p 0.0: give a probability"),
        ({"top_k": -2}, "top_k", "top_k -2: give an integer"),
        ({"stop": [""]}, "stop", "stop: give a string"),
        ({"stop": ["a"] * 17}, "stop", "stop: give at most 16 strings of at most 1000 characters"),
        ({"stream": 1}, "stream", "stream 1: give true or false"),
        ({"stream": True, "n": 2}, "stream", "stream: has one answer at a time"),
        ({"stream": True, "prompt": ["a", "b"]}, "stream", "stream: has one answer at a time"),
        ({"stream_options": []}, None, ""),
        ({"logprobs": 3}, "logprobs", "logprobs: is not supported; leave it out"),
        ({"logprobs": 0}, "logprobs", "logprobs: is not supported; leave it out"),
        ({"temprature": 1}, "temprature", "temprature: is not a field of this API (did you mean t"),
        ({"messages": []}, "messages", "messages: is not a field of this API"),
        ({"prompt": ["a"] * 129}, "prompt", "prompt: is a list of 129; send at most 128 at once"),
        ({"n": 100, "prompt": ["a", "b"]}, "n", "n 100: with 2 prompts there are more than 128"),
        ({"temperature": 10**400}, "temperature", "temperature: is too large"),
        ({"prompt": [2**63]}, "prompt", "prompt: is neither"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "logit_bias: is not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "presence_penalty: is not supported"),
    ],
)
def test_wrong_fields_are_refused(changes: dict[str, Any], field: str | None, message: str) -> None:
    body = {"prompt": "a", **changes}
    if field is None:  # as good as absent
        parse_completion(body)
        return
    with pytest.raises(RequestError) as caught:
        parse_completion(body)
    assert str(caught.value).startswith(message)
    assert (caught.value.field, caught.value.status) == (field, 400)


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        ["hi"],
        [{"content": "hi"}],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
    ],
)
def test_wrong_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match=r"^messages") as caught:
        parse_chat({"messages": messages})
    assert caught.value.field == "messages"
