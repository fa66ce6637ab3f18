"""Generation for requests: where stop strings end a text, and which runs can answer."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.tasks.support import tiny_translator
from train.errors import UserError
from train.run import Run
from train.serving.answers import Generator, StopScanner, find_stop
from train.tasks.text_completion import StopCompletionError


def test_run_without_a_language_model_is_refused(tmp_path: Path) -> None:
    nothing: Any = None
    unused = Run(
        nothing, nothing, None, experiment=tiny_translator(tmp_path), folder=nothing, step=0
    )
    with pytest.raises(UserError, match=r"^serve: task Translation has no language model; use"):
        Generator(unused, 20, 30)


@pytest.mark.parametrize(
    ("stops", "pieces", "sent", "found"),
    [
        ((), ["ab", "c"], ["ab", "c"], False),
        (("xy",), ["ax", "b"], ["a", "xb"], False),
        (("xy",), ["ax", "yb"], ["a"], True),
        (("xyz", "b"), ["xy", "b"], ["xy"], True),
        (("aab",), ["aa", "ab"], ["a"], True),
        (("b", "ab"), ["cab"], ["c"], True),
        (("abcd", "c"), ["ab", "cd"], ["ab"], True),  # the first to be complete
        (("abcd", "c"), ["abcd"], ["ab"], True),
        (("xy",), ["ax"], ["a", "x"], False),
    ],
)
def test_stop_scanner(
    stops: tuple[str, ...], pieces: list[str], sent: list[str], found: bool
) -> None:
    received: list[str] = []
    scanner = StopScanner(stops, received.append)
    stopped = False
    try:
        for piece in pieces:
            scanner.push(piece)
        scanner.flush()
    except StopCompletionError:
        stopped = True
    assert stopped == found
    assert received == sent
    assert scanner.text == "".join(sent)
    place = find_stop("".join(pieces), stops)
    assert "".join(pieces)[:place] == scanner.text
