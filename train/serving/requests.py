"""Requests of the OpenAI API for completions, chat completions and embeddings: fields and checks.

The field names and defaults are those of OpenAI's API reference ("Create completion", "Create chat
completion", "Create embeddings"), with `top_k` added. Fields are supported, accepted only with a
value that has no effect, or refused.
"""

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from train.config.shipped import did_you_mean
from train.data.chat_template import NO_VARIABLES, Message
from train.data.conversations import VARIABLES, parse_message, parse_variables
from train.errors import UserError
from transformer.generation.sampling import SamplingConfig
from transformer.validation import Bounds, NonNegativeInt, PositiveInt, Seed, check_settings

MAX_ANSWERS = 128
"""Most answers to one request, of all its prompts together. They are computed as one batch."""

MAX_MESSAGES = 10_000
"""Most messages of a conversation: a template takes seconds for more."""

MAX_LOGPROBS = 5
"""Most likeliest tokens that are named at each place."""

MAX_INPUTS = 2048
"""Most texts whose vectors are asked for at a time."""

MAX_CHARACTERS_PER_TOKEN = 64
"""Most characters of a prompt for each token that the server reads. A prompt with more is refused
before it is tokenized, which takes time and 100 times its memory."""

MAX_STOPS, MAX_STOP_LENGTH = 16, 1000
"""Most stop strings, and characters of one: every piece of text is compared with all."""

COMMON_FIELDS = frozenset(
    {
        *("model", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop"),
        *("stream", "stream_options"),
    }
)
COMPLETION_FIELDS = COMMON_FIELDS | {"prompt", "logprobs", "echo"}
CHAT_FIELDS = COMMON_FIELDS | {"messages", "max_completion_tokens", *VARIABLES}
EMBEDDING_FIELDS = frozenset({"model", "input", "encoding_format", "dimensions"})

IGNORED_FIELDS = frozenset(
    {
        *("metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options"),
        *("prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"),
    }
)
"""Fields that do not concern the answer."""

NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "min_p": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("medium",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": ("medium",),
}
"""Fields that are not supported, and the values with which they change nothing. So does null."""


class RequestError(UserError):
    """A request that cannot be answered."""

    def __init__(self, message: str, field: str | None = None, status: int = 400):
        super().__init__(message)
        self.field, self.status = field, status


@contextlib.contextmanager
def as_request_errors(field: str) -> Iterator[None]:
    """Raise a RequestError of this field in place of another UserError."""
    try:
        yield
    except RequestError:
        raise
    except UserError as error:
        raise RequestError(str(error), field) from error


@contextlib.contextmanager
def value_errors_as_request_errors() -> Iterator[None]:
    """Raise a RequestError in place of a ValueError, whose first word is the field."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        raise RequestError(message, message.split()[0].rstrip(":")) from error


def check_length(field: str, num_tokens: int, max_tokens: int) -> None:
    """Raise RequestError if a text has more tokens than the server reads."""
    if num_tokens > max_tokens:
        raise RequestError(
            f"{field}: is longer than the {max_tokens} tokens that this server reads; shorten it",
            field,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbeddingRequest:
    """Checked request for vectors of texts."""

    inputs: Sequence[str | tuple[int, ...]]
    """Texts or tokens."""
    encoding_format: Literal["float", "base64"]
    """Numbers, or the bytes of little-endian float32 numbers in base64."""
    dimensions: PositiveInt | None
    """Numbers of a vector. None: as many as the model's vectors have."""

    def __post_init__(self) -> None:
        check_settings(self, "")
        if not 0 < len(self.inputs) <= MAX_INPUTS:
            raise ValueError(f"input: has {len(self.inputs)} texts; give 1 to {MAX_INPUTS}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """Checked request for completions."""

    prompts: Sequence[str | tuple[int, ...]]
    """Texts or tokens to continue. Empty in a chat."""
    messages: Sequence[Message]
    """Conversation to answer. Empty for prompts."""
    variables: Mapping[str, Any]
    """`tools` and other variables of the chat template."""
    max_tokens: NonNegativeInt | None
    """None: `default_max_tokens`. 0: the prompt alone, with `echo`."""
    default_max_tokens: int | None
    """Used unless the server allows fewer. None: as many as it allows."""
    sampling: SamplingConfig
    n: Annotated[int, Bounds(1, MAX_ANSWERS)]
    """Answers to each prompt."""
    seed: Seed
    stop: Sequence[Any]
    """Texts that end an answer; not part of it."""
    stream: bool
    include_usage: bool
    """End a stream with the number of tokens."""
    logprobs: Annotated[int, Bounds(0, MAX_LOGPROBS)] | None
    """Give the log-probability of each token, and of so many that are likeliest in its place."""
    echo: bool
    """Begin an answer with its prompt."""

    def __post_init__(self) -> None:
        check_settings(self, "")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens 0: asks for no token; give 1 or more, or echo true")
        if self.stream and (self.echo or self.logprobs is not None):
            raise ValueError("stream: has neither logprobs nor echo; leave them or stream out")
        num_prompts = max(1, len(self.prompts))
        if self.n * num_prompts > MAX_ANSWERS:
            raise ValueError(
                f"n {self.n}: with {num_prompts} prompts there are more than {MAX_ANSWERS} "
                "answers; send several requests"
            )
        if self.stream and self.n * num_prompts > 1:
            raise ValueError("stream: has one answer at a time; give one prompt, and n 1")
        if len(self.stop) > MAX_STOPS or not all(
            isinstance(each, str) and 0 < len(each) <= MAX_STOP_LENGTH for each in self.stop
        ):
            raise ValueError(
                f"stop: give at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters"
            )


def parse_completion(body: Mapping[str, Any]) -> GenerationRequest:
    """Return the checked request of `/v1/completions`.

    Raises:
      RequestError: A field is missing, wrong or not supported.
    """
    body = _check_fields(body, COMPLETION_FIELDS)
    prompts = _parse_texts("prompt", body.get("prompt", ""))
    return _make_request(body, prompts, (), NO_VARIABLES, default_max_tokens=16)


def parse_embedding(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Return the checked request of `/v1/embeddings`.

    Raises:
      RequestError: A field is missing, wrong or not supported.
    """
    body = _check_fields(body, EMBEDDING_FIELDS)
    inputs = _parse_texts("input", body.get("input", []))
    with value_errors_as_request_errors():
        return EmbeddingRequest(
            inputs=inputs,
            encoding_format=body.get("encoding_format", "float"),
            dimensions=body.get("dimensions"),
        )


def parse_chat(body: Mapping[str, Any]) -> GenerationRequest:
    """Return the checked request of `/v1/chat/completions`.

    Raises:
      RequestError: A field is missing, wrong or not supported.
    """
    body = _check_fields(body, CHAT_FIELDS)
    messages = body.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        raise RequestError(f"messages: give a list of 1 to {MAX_MESSAGES} messages", "messages")
    with as_request_errors("messages"):
        parsed = tuple(parse_message(f"messages[{i}]", each) for i, each in enumerate(messages))
    with as_request_errors("tools"):
        variables = parse_variables("request", body)
    if body.get("tool_choice") == "none":
        variables.pop("tools", None)
    return _make_request(body, (), parsed, variables, default_max_tokens=None)


def _check_fields(body: Mapping[str, Any], supported: frozenset[str]) -> dict[str, Any]:
    """Return the fields of a request that are not null.

    Raises:
      RequestError: A field is not known, or asks for what is not supported.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in supported or name in IGNORED_FIELDS:
            continue
        if name not in NEUTRAL_VALUES:
            name = name[:100]
            guess = did_you_mean(name, supported)
            raise RequestError(f"{name}: is not a field of this API{guess}; leave it out", name)
        # By type too: 0 and False are equal, but `logprobs` 0 asks for those of the chosen tokens.
        neutral = [(each, isinstance(each, bool)) for each in NEUTRAL_VALUES[name]]
        if (value, isinstance(value, bool)) not in neutral:
            raise RequestError(f"{name}: is not supported; leave it out", name)
    return given


def _parse_texts(field: str, value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Return one text, or several, each a string or token ids."""
    is_list = isinstance(value, list) and not all(type(each) is int for each in value)
    return tuple(_parse_text(field, each) for each in (value if is_list else [value]))


def _parse_text(field: str, text: Any) -> str | tuple[int, ...]:
    if isinstance(text, str):
        return text
    is_list = isinstance(text, list) and bool(text)
    if not is_list or not all(type(each) is int and abs(each) < 2**31 for each in text):
        raise RequestError(
            f"{field}: is neither a string nor a list of token ids; give one, or a list of them",
            field,
        )
    return tuple(text)


def _make_request(
    body: Mapping[str, Any],  # without nulls
    prompts: Sequence[str | tuple[int, ...]],
    messages: Sequence[Message],
    variables: Mapping[str, Any],
    default_max_tokens: int | None,
) -> GenerationRequest:
    stop, top_k = body.get("stop", []), body.get("top_k", 0)
    stream_options = body.get("stream_options") or {}
    if not isinstance(stream_options, dict):
        raise RequestError("stream_options: is not an object; give one", "stream_options")
    # False is how some clients write that they need none.
    logprobs = None if body.get("logprobs") is False else body.get("logprobs")
    with value_errors_as_request_errors():
        return GenerationRequest(
            prompts=prompts,
            messages=messages,
            variables=variables,
            max_tokens=body.get("max_completion_tokens", body.get("max_tokens")),
            default_max_tokens=default_max_tokens,
            sampling=SamplingConfig(
                temperature=body.get("temperature", 1.0),
                top_k=0 if top_k == -1 else top_k,  # -1 is how other servers write "all"
                top_p=body.get("top_p", 1.0),
            ),
            n=body.get("n", 1),
            seed=body.get("seed", secrets.randbits(32)),
            stop=[stop] if isinstance(stop, str) else stop,
            stream=body.get("stream", False),
            include_usage=stream_options.get("include_usage") or False,
            logprobs=logprobs,
            echo=body.get("echo", False),
        )
