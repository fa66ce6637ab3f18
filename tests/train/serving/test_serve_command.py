"""The command `serve`: its options, and a process that serves until Ctrl-C."""

import http.client
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import train
from tests.train.support import command, tiny
from tests.train.support import light_compiler as light_compiler

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", "70000"), ("max-tokens", "0"), ("max-prompt-tokens", "0"), ("api-key", "")],
)
def test_wrong_options(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = command(capsys, "serve", "nowhere", f"--{name}", value)
    assert result.status == 2
    assert result.error.startswith(f"error: {name.replace('-', '_')}")


# A job in the background of a shell, like a run of all tests, may have been told to ignore Ctrl-C.
PROGRAM = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("train", run_name="__main__")
"""


@pytest.mark.full
@pytest.mark.parametrize("busy", [False, True])
def test_command_serves_until_interrupted(tmp_path: Path, busy: bool) -> None:
    run = train.fit(tiny(tmp_path, steps=2), tmp_path / "run")
    words = [sys.executable, "-c", PROGRAM, "serve", str(run.folder.path), "--port", "0", "--json"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, cwd=ROOT, text=True, **pipes) as process:
        try:
            assert process.stdout is not None
            first = json.loads(process.stdout.readline())
            assert (first["model"], first["step"]) == ("tiny", 2)
            port = int(first["url"].removeprefix("http://127.0.0.1:").removesuffix("/v1"))
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status": "ok"}'
            others = []
            for count in range(2, 6) if busy else ():
                # A program for each number of answers: one is compiled after the other.
                others.append(http.client.HTTPConnection("127.0.0.1", port, timeout=120))
                body, headers = json.dumps({"n": count}), {"Content-Type": "application/json"}
                others[-1].request("POST", "/v1/completions", body, headers)
            if busy:
                others[0].getresponse().read()
            os.kill(process.pid, signal.SIGINT)
            output, errors = process.communicate(timeout=120)
            for each in (connection, *others):
                each.close()
        finally:
            process.kill()
    assert (process.returncode, output) == (0, "")
    assert "stopped\n" in errors  # the line of a request may follow it
