"""Compilation, and libtpu's message for a step that is too large for a chip of 32 GiB."""

import pytest

from train.estimate.compile import CompiledStep, parse_rejection

GIB = 2**30
MEMORY = 32 * GIB
TEMPORARIES = (
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
    "required for HLO temporaries (32.39G) exceeds available HBM (31.24G). HLO module: jit_step."
)
ALL = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.50G of 31.25G hbm. "
    'Size: 12.00G Operator: op_name="jit(step)/exp" Size: 3.00G Operator: op_name="jit(step)/dot"'
)


@pytest.mark.parametrize(
    ("message", "peak", "why"),
    [
        (TEMPORARIES, int(32.39 * GIB), "required for HLO temporaries (32.39G) exceeds"),
        (ALL, int(40.5 * GIB), "12.00G jit(step)/exp; 3.00G jit(step)/dot"),
        ("RESOURCE_EXHAUSTED: no number", MEMORY + 1, "RESOURCE_EXHAUSTED: no number"),
    ],
)
def test_rejected_step_does_not_fit(message: str, peak: int, why: str) -> None:
    reported = parse_rejection(message, 4 * GIB, MEMORY)
    assert reported["peak"] == peak
    assert reported["arguments"] + reported["temporaries"] == peak
    assert why in reported["rejection"]
    assert "HLO module" not in reported["rejection"]
    step = CompiledStep(
        weights=GIB, optimizer=2 * GIB, other_state=0, batch=GIB, compile_seconds=1.0, **reported
    )
    assert not step.fits(MEMORY)
    assert not step.fits(100 * MEMORY)  # even if the sizes seem to fit
