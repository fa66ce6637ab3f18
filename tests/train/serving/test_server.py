"""The server of a tiny run, by requests over a socket."""

import base64
import contextlib
import dataclasses
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from tests.train.support import NO_DETECTOR, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.interop.huggingface import import_model
from train.run import Run
from train.serving.answers import Generator
from train.serving.embedder import Embedder, is_text_encoder
from train.serving.server import Server

ROOT = Path(__file__).parents[3]

JSON = {"Content-Type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("serving")
    experiment = tiny(folder, num_layers=1, dropout=0.0, steps=2, recovery=NO_DETECTOR)
    return train.fit(experiment, folder / "run")


@contextlib.contextmanager
def serving(
    run: Run,
    max_tokens: int = 20,
    *,
    generator: Generator | Embedder | None = None,
    host: str = "127.0.0.1",
    **settings: Any,
) -> Iterator[Server]:
    generator = generator or Generator(run, max_tokens, 30, max_batch_size=4)
    with Server((host, 0), generator, "tiny", **settings) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def generator(run: Run) -> Generator:
    return Generator(run, 20, 30, max_batch_size=4)


@pytest.fixture(scope="module")
def server(run: Run, generator: Generator) -> Iterator[Server]:
    with serving(run, generator=generator) as made:
        yield made


def ask(server: Server, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Return the status and the JSON object of an answer."""
    host = str(server.server_address[0])
    connection = http.client.HTTPConnection(host, server.server_port, timeout=120)
    data = body if isinstance(body, bytes | None) else json.dumps(body)
    headers = {name.replace("_", "-"): value for name, value in (JSON | headers).items()}
    connection.request("GET" if body is None else "POST", path, data, headers)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


def stream(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a streamed answer, which ends with [DONE]."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    connection.request("POST", path, json.dumps({**body, "stream": True}), JSON)
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    events = answer.read().decode().split("\n\n")
    connection.close()
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(each.removeprefix("data: ")) for each in events[:-2]]


@pytest.fixture(scope="module")
def seed(server: Server) -> int:
    """Return a seed with which the text does not end early."""

    def has_long_text(seed: int) -> bool:
        body = {"prompt": "the", "max_tokens": 20, "seed": seed}
        return len(ask(server, "/v1/completions", body)[1]["choices"][0]["text"]) > 15

    return next(filter(has_long_text, range(50)))


def test_models_and_health(server: Server) -> None:
    status, models = ask(server, "/v1/models")
    assert (status, models["object"]) == (200, "list")
    [model] = models["data"]
    assert (model["id"], model["object"]) == ("tiny", "model")
    assert ask(server, "/v1/models/tiny") == (200, model)
    assert ask(server, "/health") == (200, {"status": "ok"})


def test_completion_is_that_of_the_run(server: Server, run: Run) -> None:
    body = {"model": "tiny", "prompt": ["the cat", "a"], "max_tokens": 5, "temperature": 0}
    status, answer = ask(server, "/v1/completions", body)
    assert (status, answer["object"], answer["model"]) == (200, "text_completion", "tiny")
    expected = run.generate(["the cat", "a"], max_new_tokens=5, temperature=0)
    assert [each["text"] for each in answer["choices"]] == expected
    assert [each["index"] for each in answer["choices"]] == [0, 1]
    usage = answer["usage"]
    assert usage["prompt_tokens"] == 8 + 2  # with the token that begins a text
    assert usage["completion_tokens"] == 10
    assert usage["total_tokens"] == 20


def test_seed_and_choices(server: Server) -> None:
    body = {"prompt": "the", "max_tokens": 8, "seed": 5, "n": 3}
    texts = [each["text"] for each in ask(server, "/v1/completions", body)[1]["choices"]]
    assert len(set(texts)) == 3
    again = ask(server, "/v1/completions", body)[1]["choices"]
    assert [each["text"] for each in again] == texts
    one = ask(server, "/v1/completions", {**body, "n": 1})[1]["choices"]
    assert one[0]["text"] == texts[0]


def test_tokens_are_a_prompt_as_they_are(server: Server, run: Run) -> None:
    assert run.tokenizer is not None
    row = [run.tokenizer.eos_token_id, *run.tokenizer.encode("the").tolist()]
    body = {"max_tokens": 4, "temperature": 0}
    _, of_tokens = ask(server, "/v1/completions", {**body, "prompt": row})
    _, of_text = ask(server, "/v1/completions", {**body, "prompt": "the"})
    assert of_tokens["choices"] == of_text["choices"]


def test_echo_has_the_log_probability_of_each_token(server: Server, run: Run) -> None:
    assert run.tokenizer is not None
    prompts = ["the cat sat", "a red"]
    body = {"prompt": prompts, "max_tokens": 0, "echo": True, "logprobs": 2}
    status, answer = ask(server, COMPLETIONS, body)
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 0
    scores = run.score(prompts, context="")
    assert isinstance(scores, list)
    for text, score, choice in zip(prompts, scores, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        assert logprobs["tokens"] == ["<|endoftext|>", *text]  # one that no text has begins it
        assert logprobs["text_offset"] == [0, *range(len(text))]
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        assert sum(logprobs["token_logprobs"][1:]) == pytest.approx(score.total, rel=1e-5)
        shown = zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        )
        for token, value, top in list(shown)[1:]:
            assert top[token] == value
            values = sorted(top.values(), reverse=True)
            # The likeliest two, and the token itself.
            assert len(top) == (2 if value in values[:2] else 3)
            assert list(top.values()) == values


def test_log_probabilities_of_an_answer(server: Server, run: Run, seed: int) -> None:
    """With the token that ended it, and without those of a stop string."""
    assert run.tokenizer is not None
    body = {"prompt": "the", "max_tokens": 8, "seed": seed, "logprobs": 0}
    choice = ask(server, COMPLETIONS, body)[1]["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["text_offset"] == list(range(3, 3 + len(choice["text"])))
    assert logprobs["top_logprobs"] is None
    scores: Any = run.score(["the" + choice["text"], "the"], context="")
    whole, prompt = scores
    assert sum(logprobs["token_logprobs"]) == pytest.approx(whole.total - prompt.total, rel=1e-4)
    status, answer = ask(server, COMPLETIONS, {**body, "max_tokens": 20})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")  # beyond the positions
    stopped = ask(server, COMPLETIONS, {**body, "stop": choice["text"][4:6]})[1]["choices"][0]
    assert stopped["logprobs"]["tokens"] == list(stopped["text"])

    def is_ended(seed: int) -> bool:
        nonlocal choice
        choice = ask(server, COMPLETIONS, {**body, "seed": seed})[1]["choices"][0]
        return bool(choice["finish_reason"] == "stop")

    next(filter(is_ended, range(100)))
    assert choice["logprobs"]["tokens"] == [*choice["text"], "<|endoftext|>"]


def test_too_much_to_score_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.serving.answers.MAX_SCORED_TOKENS", 20)
    with serving(run, 20) as server:
        body = {"prompt": "the cat", "max_tokens": 5, "logprobs": 1}
        assert ask(server, COMPLETIONS, body)[0] == 200
        status, answer = ask(server, COMPLETIONS, {**body, "n": 2})
    assert (status, answer["error"]["param"]) == (400, "logprobs")


EMBEDDINGS = "/v1/embeddings"


def test_embeddings_are_those_of_the_run(tmp_path: Path) -> None:
    """Of a folder of sentence-transformers, against the package's vectors."""
    fixture = Path(__file__).parents[1] / "sentence_transformers" / "bert-mean"
    import_model(str(fixture), str(tmp_path / "run"))
    run = train.load(tmp_path / "run")
    assert is_text_encoder(run)
    reference = np.load(fixture / "reference.npz")
    texts = reference["texts"].tolist()
    with serving(run, generator=Embedder(run, 60)) as server:
        status, answer = ask(server, EMBEDDINGS, {"input": texts, "model": "tiny"})
        assert (status, answer["object"], answer["model"]) == (200, "list", "tiny")
        assert [each["index"] for each in answer["data"]] == list(range(len(texts)))
        found = np.array([each["embedding"] for each in answer["data"]])
        np.testing.assert_allclose(found, reference["plain"], atol=1e-5)
        body = {"input": texts[0], "encoding_format": "base64", "dimensions": found.shape[1]}
        _, of_one = ask(server, EMBEDDINGS, body)
        vector = np.frombuffer(base64.b64decode(of_one["data"][0]["embedding"]), "<f4")
        np.testing.assert_allclose(vector, found[0], atol=1e-6)
        assert run.tokenizer is not None
        before, after = run.tokenizer.added_token_ids
        row = [*before.tolist(), *run.tokenizer.encode(texts[0]).tolist(), *after.tolist()]
        assert of_one["usage"] == {"prompt_tokens": len(row), "total_tokens": len(row)}
        _, of_tokens = ask(server, EMBEDDINGS, {"input": [row]})
        np.testing.assert_allclose(of_tokens["data"][0]["embedding"], found[0], atol=1e-6)
        for field, value in (("input", [999]), ("input", "a" * 5000), ("dimensions", 3)):
            status, answer = ask(server, EMBEDDINGS, {"input": "the", field: value})
            assert (status, answer["error"]["param"]) == (400, field)
        status, answer = ask(server, COMPLETIONS, {"prompt": "the"})
        assert status == 400
        assert "is a text encoder" in answer["error"]["message"]


def test_embeddings_of_a_language_model_are_refused(server: Server, run: Run) -> None:
    assert not is_text_encoder(run)
    status, answer = ask(server, EMBEDDINGS, {"input": "the"})
    assert (status, answer["error"]["param"]) == (400, "model")
    assert "no text encoder; serve the run of one" in answer["error"]["message"]


@pytest.mark.parametrize("n", [1, 2])
def test_stop_strings_end_the_text(server: Server, n: int, seed: int) -> None:
    body = {"prompt": "the", "max_tokens": 20, "seed": seed, "n": n}
    whole = ask(server, "/v1/completions", body)[1]["choices"][0]["text"]
    stop = whole[4:6]
    _, answer = ask(server, "/v1/completions", {**body, "stop": ["never", stop]})
    choice = answer["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", [False, True])
def test_stream_joins_to_the_whole(server: Server, stop: bool, seed: int) -> None:
    body: dict[str, Any] = {"prompt": "the", "max_tokens": 20, "seed": seed}
    if stop:
        body["stop"] = ask(server, "/v1/completions", body)[1]["choices"][0]["text"][10:12]
    whole = ask(server, "/v1/completions", body)[1]
    events = stream(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    *pieces, last = events
    assert "".join(each["choices"][0]["text"] for each in pieces) == whole["choices"][0]["text"]
    reasons = [each["choices"][0]["finish_reason"] for each in pieces]
    assert reasons == [None] * (len(pieces) - 1) + [whole["choices"][0]["finish_reason"]]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len({each["id"] for each in events}) == 1
    assert stop or len(pieces) > 2


def test_chat(run: Run) -> None:
    assert run.tokenizer is not None
    tokenizer = run.tokenizer.with_chat_template("{{ messages[-1]['content'] }}. ")
    messages = [{"role": "user", "content": "the cat"}]
    body = {"messages": messages, "max_tokens": 6, "temperature": 0}
    with serving(dataclasses.replace(run, tokenizer=tokenizer)) as server:
        status, answer = ask(server, "/v1/chat/completions", body)
        first, *pieces, last = stream(server, "/v1/chat/completions", body)
    assert (status, answer["object"]) == (200, "chat.completion")
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert answer["usage"]["prompt_tokens"] == len("the cat. ")
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    texts = [each["choices"][0]["delta"]["content"] for each in pieces]
    assert "".join(texts) == choice["message"]["content"] != ""
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "finish_reason": choice["finish_reason"],
    }


def user(content: str, **more: Any) -> dict[str, Any]:
    """Return the body of a chat with one message."""
    return {"messages": [{"role": "user", "content": content}], **more}


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v1/nothing", {}, 404, "POST /v1/nothing: is not served"),
        (COMPLETIONS, None, 404, "GET /v1/completions: is not served; use GET /v1/models"),
        (COMPLETIONS, b"{", 400, "body: is not JSON"),
        (COMPLETIONS, [1], 400, "body: is no JSON object"),
        (COMPLETIONS, {"model": "gpt"}, 404, "model 'gpt': is not served"),
        (COMPLETIONS, {"model": "a" * 5000}, 404, "model 'aaa"),
        (COMPLETIONS, {"max_tokens": 21}, 400, "max_tokens 21: is more than"),
        (COMPLETIONS, {"prompt": [10**6]}, 400, "prompt 0: "),
        (COMPLETIONS, {"prompt": "a" * 15}, 400, "prompt: is longer than the 15 tokens"),
        (COMPLETIONS, {"prompt": [1] * 16}, 400, "prompt: is longer than the 15 tokens"),
        (COMPLETIONS, {"prompt": "a" * 2000}, 400, "prompt: is longer than the 15 tokens"),
        (COMPLETIONS, {"prompt": "\N{SNOWMAN}"}, 400, "the text: has characters that the"),
        (CHAT, user("\ud800"), 400, "the text: surrogates not allowed at"),
        (CHAT, {"messages": [{"role": "assistant", "content": "a"}]}, 400, "messages: end with"),
        (CHAT, user("a", tools=[{"type": "function"}]), 400, "chat template: does not read tools"),
    ],
)
def test_wrong_requests_have_an_error(
    server: Server, path: str, body: Any, status: int, message: str
) -> None:
    found, answer = ask(server, path, body)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"].startswith(message)
    assert len(answer["error"]["message"]) < 1100


def raw(server: Server, request: bytes) -> bytes:
    """Return all that the server sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=120) as connection:
        connection.sendall(request)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


HIDDEN = b"GET /health HTTP/1.1\r\n\r\n"

POST = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("request_lines", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN), b"200"),
        (b"POST /v1/nothing HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(HIDDEN), b"404"),
        (POST + b"\r\n", b"411"),
        (POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", b"411"),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", b"411"),
        (b"GET /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"200"),
    ],
)
def test_body_is_not_read_as_a_request(server: Server, request_lines: bytes, status: bytes) -> None:
    answer = raw(server, request_lines + HIDDEN)
    assert answer.startswith(b"HTTP/1.0 " + status)
    assert answer.count(b"HTTP/1.") == 1


def test_refused_body_is_read(run: Run) -> None:
    """So that a client that is still sending it gets the answer."""
    with serving(run, api_key="secret") as server:
        assert ask(server, "/v1/completions", {"prompt": "a" * (8 << 20)})[0] == 401


@pytest.mark.parametrize("chunked", [False, True])
def test_large_body_is_refused(server: Server, chunked: bool) -> None:
    """Before it has arrived, and without losing the answer of a client that still sends it."""
    size = 64 << 20
    length = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
    status = raw(server, POST + length + b"\r\n\r\n" + b"a" * size).partition(b"\r\n")[0]
    assert status.split()[1] == (b"411" if chunked else b"413")


HAS_ALL_LOOPBACK = pytest.mark.skipif(sys.platform == "darwin", reason="has 127.0.0.1 alone")

LOCAL, PAGE = {"Host": "localhost:1"}, {"Origin": "https://example.com"}


@pytest.mark.parametrize(
    ("host", "allowed_hosts", "headers", "status"),
    [
        ("127.0.0.1", (), {"Host": "[::1]:80"}, 200),
        ("127.0.0.1", (), {"Host": "LocalHost:123"}, 200),
        ("127.0.0.1", (), {"Host": ""}, 403),
        pytest.param("127.0.0.2", (), {"Host": "127.0.0.2"}, 200, marks=HAS_ALL_LOOPBACK),
        ("127.0.0.1", (), {"Host": "localhost.example.com"}, 403),
        ("127.0.0.1", (), {"Host": "[::"}, 403),
        ("127.0.0.1", (), LOCAL | PAGE, 403),
        ("127.0.0.1", (), LOCAL | {"Origin": "null"}, 403),
        ("127.0.0.1", (), LOCAL | {"Origin": "http://127.0.0.1:3000"}, 200),
        ("127.0.0.1", ("*.example.com",), {"Host": "a.example.com"}, 200),
        ("127.0.0.1", ("https://example.com:1/",), LOCAL | PAGE, 200),
        ("127.0.0.1", ("example.org",), {"Host": "example.com"}, 403),
        ("127.0.0.1", ("[2001:db8::5]",), {"Host": "[2001:db8::5]:80"}, 200),
        ("0.0.0.0", (), {"Host": "example.com"}, 200),
        ("0.0.0.0", (), {"Host": "example.org"} | PAGE, 403),
        ("0.0.0.0", (), {"Host": "example.com"} | PAGE, 200),
        ("0.0.0.0", ("example.com",), {"Host": "example.org"}, 403),
        ("0.0.0.0", ("example.com",), LOCAL, 200),
    ],
)
def test_pages_of_other_hosts_are_refused(
    run: Run,
    generator: Generator,
    host: str,
    allowed_hosts: tuple[str, ...],
    headers: dict[str, str],
    status: int,
) -> None:
    with serving(run, generator=generator, host=host, allowed_hosts=allowed_hosts) as server:
        assert ask(server, "/v1/models", **headers)[0] == status
        assert ask(server, "/health", **headers)[0] == 200
        expected = 404 if status == 200 else status
        assert ask(server, "/v1/completions", {"model": "none"}, **headers)[0] == expected


def test_content_that_pages_may_send_is_refused(server: Server) -> None:
    for content_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        status, answer = ask(server, "/v1/completions", {}, Content_Type=content_type)
        assert (status, answer["error"]["message"][:12]) == (415, "Content-Type")
    body = {"prompt": "the", "max_tokens": 1}
    content_type = "Application/JSON; charset=utf-8"
    assert ask(server, "/v1/completions", body, Content_Type=content_type)[0] == 200


@contextlib.contextmanager
def endless(run: Run, max_batch_size: int) -> Iterator[Server]:
    """Yield a server whose answers get one token and never end."""
    generator = Generator(run, 20, 30, max_batch_size)
    with pytest.MonkeyPatch.context() as patch, serving(run, generator=generator) as server:
        patch.setattr(generator.decoding._batch, "advance", lambda count: time.sleep(0.01))
        yield server
        generator.decoding.close()


def generator_of(server: Server) -> Generator:
    assert isinstance(server.answers, Generator)
    return server.answers


def begin(server: Server, **fields: Any) -> http.client.HTTPConnection:
    """Send a request and return its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=120)
    body = {"prompt": "the", "max_tokens": 20, "temperature": 0, **fields}
    connection.request("POST", "/v1/completions", json.dumps(body), JSON)
    return connection


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("changes", [{"stream": True}, {}, {"n": 2}, {"stop": "never"}], ids=str)
def test_generation_ends_when_the_client_leaves(run: Run, changes: dict[str, Any]) -> None:
    with endless(run, max_batch_size=2) as server:
        batch = generator_of(server).decoding._batch
        connection = begin(server, **changes)
        wait_until(lambda: len(batch.rows) == changes.get("n", 1))
        connection.close()
        wait_until(lambda: not batch.rows)


def test_more_requests_than_may_wait_are_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.serving.decoding_thread.MAX_WAITING", 1)
    with endless(run, max_batch_size=1) as server:
        decoding = generator_of(server).decoding
        running = begin(server)
        wait_until(lambda: bool(decoding._batch.rows))
        waiting = begin(server)
        wait_until(lambda: bool(decoding._waiting))
        refused = begin(server).getresponse()
        assert (refused.status, refused.getheader("Retry-After")) == (503, "1")
        assert "1 answers waiting" in json.loads(refused.read())["error"]["message"]
        running.close()  # the one that waits takes its place
        wait_until(lambda: not decoding._waiting)
        waiting.close()


def test_large_bodies_are_limited_and_may_not_take_long(
    run: Run, generator: Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("train.serving.server.MAX_LARGE_BODIES", 1)
    body = json.dumps({"prompt": "the", "max_tokens": 1, "user": "a" * (1 << 17)}).encode()
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    with serving(run, generator=generator) as server:
        address = "127.0.0.1", server.server_port
        with socket.create_connection(address, timeout=120) as first:
            first.sendall(head + body[:-1])
            wait_until(lambda: not server.large_bodies._value)
            refused = raw(server, head + body)
            assert refused.startswith(b"HTTP/1.0 503 ")
            assert b"\r\nRetry-After: 1\r\n" in refused
            assert ask(server, COMPLETIONS, {"prompt": "the", "max_tokens": 1})[0] == 200
            first.sendall(body[-1:])
            assert first.recv(13) == b"HTTP/1.0 200 "
        monkeypatch.setattr("train.serving.server.CLIENT_SECONDS", 0.0)
        with socket.create_connection(address, timeout=120) as slow:
            slow.sendall(head + b" ")
            assert slow.recv(13) == b"HTTP/1.0 408 "


def test_requests_at_once_get_their_own_answers(server: Server, run: Run) -> None:
    """More than the batch has rows; those of 20 tokens outlast the model's 16 positions."""
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.3, "top_k": 4, "seed": 3},
        {"temperature": 0.7, "top_p": 0.8, "seed": 2**32 - 1},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0},
    ]
    prompts = ["the", "a cat", "sat", "cat", "the", ""]
    lengths = [20, 5, 20, 9, 20, 1]
    found: dict[int, str] = {}

    def one(index: int) -> None:
        body = {"prompt": prompts[index], "max_tokens": lengths[index], **settings[index]}
        found[index] = ask(server, COMPLETIONS, body)[1]["choices"][0]["text"]

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, prompt in enumerate(prompts):
        expected = run.generate(prompt, max_new_tokens=lengths[index], **settings[index])
        assert found[index] == expected


def test_key_is_needed_if_there_is_one(run: Run) -> None:
    with serving(run, api_key="secret") as server:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            assert ask(server, "/v1/models", **headers)[0] == 401
            assert ask(server, "/v1/completions", {}, **headers)[0] == 401
        assert ask(server, "/v1/models", Authorization="Bearer secret")[0] == 200
        assert ask(server, "/v1/models", Authorization="bearer secret")[0] == 200
        assert ask(server, "/health")[0] == 200


def test_failure_is_an_error_and_the_server_lives(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise error

    for error, expected in (
        (RuntimeError("a defect"), 500),
        (MemoryError("a large request"), 503),
    ):
        for streamed in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(generator_of(server).decoding._batch, "add", fail)
                caplog.clear()
                status, answer = ask(server, "/v1/completions", {"stream": streamed})
            assert (status, answer["error"]["type"]) == (expected, "server_error")
            said = "send fewer prompts" if expected == 503 else str(error)
            assert said in caplog.text
            assert expected == 500 or said in answer["error"]["message"]
    assert ask(server, "/health")[0] == 200


def test_default_of_max_tokens_is_within_the_limit(run: Run) -> None:
    """A client that names no number gets an answer from a server that allows fewer than 16."""
    with serving(run, max_tokens=3) as made:
        status, answer = ask(made, "/v1/completions", {"prompt": "the", "temperature": 0})
        assert (status, answer["usage"]["completion_tokens"] <= 3) == (200, True)
