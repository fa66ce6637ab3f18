"""Requests of the OpenAI API for completions and chat completions: their fields and checks.

The field names and defaults are those of OpenAI's API reference ("Create completion", "Create chat
completion"), with `top_k` added. Fields are supported, accepted only with a value that has no
effect, or refused.
"""

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from train.config.shipped import did_you_mean
from train.data.chat_template import NO_VARIABLES, Message
from train.data.conversations import VARIABLES, parse_message, parse_variables
from train.errors import UserError
from transformer.generation.sampling import SamplingConfig

MAX_SEED = 2**32 - 1

MAX_ANSWERS = 128
"""Most answers to one request, of all its prompts together. They are computed as one batch."""

MAX_MESSAGES = 10_000
"""Most messages of a conversation."""

MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
"""Most stop strings, and characters of one: every piece of text is compared with all."""

_COMMON_FIELDS = frozenset(
    {
        *("model", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop"),
        *("stream", "stream_options"),
    }
)
COMPLETION_FIELDS = _COMMON_FIELDS | {"prompt"}
CHAT_FIELDS = _COMMON_FIELDS | {"messages", "max_completion_tokens", *VARIABLES}

IGNORED_FIELDS = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
    }
)
"""Fields that do not concern the answer."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("medium",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Fields that are not supported, and the values with which they change nothing. So does null."""

MAX_NAME_LENGTH = 100
"""Most characters of an unknown name that is compared with known ones."""


class RequestError(UserError):
    """A request that cannot be answered."""

    def __init__(self, message: str, field: str | None = None, status: int = 400):
        super().__init__(message)
        self.field, self.status = field, status


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """Checked request for completions."""

    prompts: tuple[str | tuple[int, ...], ...]
    """Texts or tokens to continue. Empty in a chat."""
    messages: tuple[Message, ...]
    """Conversation to answer. Empty for prompts."""
    variables: Mapping[str, Any]
    """`tools` and other variables of the chat template."""
    max_tokens: int | None
    """None: `default_max_tokens`."""
    sampling: SamplingConfig
    num_choices: int
    """Answers to each prompt (`n`)."""
    seed: int
    stop: tuple[str, ...]
    """Texts that end an answer; not part of it."""
    stream: bool
    include_usage: bool
    """End a stream with the number of tokens."""
    default_max_tokens: int | None
    """Used unless the server allows fewer. None: as many as it allows."""


def parse_completion(body: Mapping[str, Any]) -> GenerationRequest:
    """Return the checked request of `/v1/completions`.

    Raises:
      RequestError: A field is missing, wrong or not supported.
    """
    prompt = body.get("prompt")
    prompt = "" if prompt is None else prompt
    several = prompt if isinstance(prompt, list) and not _is_token_list(prompt) else [prompt]
    if len(several) > MAX_ANSWERS:
        raise RequestError(
            f"prompt: is a list of {len(several)}; send at most {MAX_ANSWERS} at once", "prompt"
        )
    prompts = []
    for each in several:
        if not isinstance(each, str) and not _is_token_list(each):
            raise RequestError(
                "prompt: is neither a string nor a list of token ids; give one, or a list of them",
                "prompt",
            )
        prompts.append(each if isinstance(each, str) else tuple(each))
    if not prompts:
        raise RequestError("prompt: is an empty list; give at least one prompt", "prompt")
    _check_fields(body, COMPLETION_FIELDS)
    return _parse_common(body, tuple(prompts), (), NO_VARIABLES, default_max_tokens=16)


def parse_chat(body: Mapping[str, Any]) -> GenerationRequest:
    """Return the checked request of `/v1/chat/completions`.

    Raises:
      RequestError: A field is missing, wrong or not supported.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages: are missing; give a list with at least one", "messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(
            f"messages: are {len(messages)}; send at most {MAX_MESSAGES}", "messages"
        )
    with as_request_errors("messages"):
        parsed = tuple(parse_message(f"messages[{i}]", each) for i, each in enumerate(messages))
    _check_fields(body, CHAT_FIELDS)
    with as_request_errors("tools"):
        variables = parse_variables("request", body)
    if body.get("tool_choice") == "none":
        variables.pop("tools", None)
    return _parse_common(body, (), parsed, variables, default_max_tokens=None)


@contextlib.contextmanager
def as_request_errors(field: str) -> Iterator[None]:
    """Raise a RequestError of this field in place of another UserError."""
    try:
        yield
    except RequestError:
        raise
    except UserError as error:
        raise RequestError(str(error), field) from error


def _check_fields(body: Mapping[str, Any], supported: frozenset[str]) -> None:
    """Raise RequestError for a field that is not known, or asks for what is not supported."""
    for name, value in body.items():
        if value is None or name in supported or name in IGNORED_FIELDS:
            continue
        if name not in NEUTRAL_VALUES:
            name = name[:MAX_NAME_LENGTH]
            guess = did_you_mean(name, supported)
            raise RequestError(f"{name}: is not a field of this API{guess}; leave it out", name)
        # By type too: 0 and False are equal, but `logprobs` 0 asks for those of the chosen tokens.
        neutral = [(each, isinstance(each, bool)) for each in NEUTRAL_VALUES[name]]
        if (value, isinstance(value, bool)) not in neutral:
            raise RequestError(f"{name}: is not supported; leave it out", name)


def _parse_common(
    body: Mapping[str, Any],
    prompts: tuple[str | tuple[int, ...], ...],
    messages: tuple[Message, ...],
    variables: Mapping[str, Any],
    default_max_tokens: int | None,
) -> GenerationRequest:
    max_tokens = None
    for name in ("max_tokens", "max_completion_tokens"):
        max_tokens = _integer(body, name, max_tokens, 1)
    num_choices = _integer(body, "n", None, 1, MAX_ANSWERS) or 1
    if num_choices * max(1, len(prompts)) > MAX_ANSWERS:
        raise RequestError(
            f"n {num_choices}: with {len(prompts)} prompts there are more than {MAX_ANSWERS} "
            "answers; send several requests",
            "n",
        )
    seed = _integer(body, "seed", None, 0, MAX_SEED)
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(each, str) and each for each in stop):
        raise RequestError("stop: give a string, or a list of strings that are not empty", "stop")
    if len(stop) > MAX_STOPS or max(map(len, stop), default=0) > MAX_STOP_LENGTH:
        raise RequestError(
            f"stop: give at most {MAX_STOPS} strings of at most {MAX_STOP_LENGTH} characters",
            "stop",
        )
    stream = _boolean(body, "stream")
    if stream and num_choices * max(1, len(prompts)) > 1:
        raise RequestError("stream: has one answer at a time; give one prompt, and n 1", "stream")
    options = body.get("stream_options") or {}
    if not isinstance(options, dict):
        raise RequestError("stream_options: is not an object; give one", "stream_options")
    return GenerationRequest(
        prompts,
        messages,
        variables,
        max_tokens,
        _sampling(body),
        num_choices,
        secrets.randbelow(MAX_SEED + 1) if seed is None else seed,
        tuple(stop),
        stream,
        _boolean(options, "include_usage"),
        default_max_tokens,
    )


def _sampling(body: Mapping[str, Any]) -> SamplingConfig:
    top_k = _integer(body, "top_k", 0, -1) or 0
    top_k = max(top_k, 0)  # -1 is how other servers write "all"
    temperature, top_p = _number(body, "temperature"), _number(body, "top_p")
    try:
        return SamplingConfig(temperature, top_k, top_p)
    except ValueError as error:
        message = str(error).removeprefix("SamplingConfig.")
        raise RequestError(message, message.split()[0]) from error


def _is_token_list(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(type(each) is int and abs(each) < 2**31 for each in value)
    )


def _integer(
    body: Mapping[str, Any], name: str, default: int | None, low: int, high: int | None = None
) -> int | None:
    value = body.get(name)
    if value is None:
        return default
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < low or (high is not None and value > high):
        most = "or more" if high is None else f"to {high}"
        raise RequestError(f"{name} {value!r}: give an integer, {low} {most}", name)
    return int(value)


def _number(body: Mapping[str, Any], name: str) -> float:
    """Return a number, which is 1 unless it is given."""
    value = body.get(name)
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} {value!r}: give a number", name)
    try:
        return float(value)
    except OverflowError as error:
        raise RequestError(f"{name}: is too large; give a smaller number", name) from error


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise RequestError(f"{name} {value!r}: give true or false", name)
    return value
