"""`bench.softmax_profile` counts each event once and no enclosing events."""

from collections import Counter

from bench.softmax_profile import Span, alone, by_part


def test_nested_events_are_counted_once() -> None:
    spans = [
        Span("ynn_fusion.3", 10, 40),
        Span("ThunkExecutor::Execute", 0, 100),
        Span("Await", 30, 40),
        Span("while.2", 45, 60),
        Span("copy_fusion", 45, 50),
        Span("ThunkExecutor::Execute", 100, 110),
    ]
    actual = alone(spans)
    assert actual == Counter(
        {
            "ThunkExecutor::Execute": 100 - 30 - 15 + 10,
            "ynn_fusion.3": 20,
            "Await": 10,
            "while.2": 10,
            "copy_fusion": 5,
        }
    )
    assert by_part(actual) == Counter(
        {
            "starting parts": 75,
            "matmuls": 20,
            "waiting for the other thread": 10,
            "copies into another order": 5,
        }
    )
