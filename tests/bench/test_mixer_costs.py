"""The formulas of the table match the traced programs."""

import math

import pytest

from bench.race.mixer_costs import KINDS, traced_operations


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("length", "width"), [(7, 16), (13, 24)])
def test_flop_formula_matches_the_program(name: str, length: int, width: int) -> None:
    kind = KINDS[name]
    assert traced_operations(kind.block, width, length) == kind.operations(length, width)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.cheaper])
def test_attention_is_cheaper_up_to_a_length(name: str) -> None:
    kind, attention, width = KINDS[name], KINDS["attention"], 24
    assert kind.cheaper is not None
    last = math.floor(kind.cheaper(width))
    assert kind.operations(last + 1, width) < attention.operations(last + 1, width)
    if last > 1:
        assert kind.operations(last, width) >= attention.operations(last, width)
