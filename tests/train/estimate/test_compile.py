"""Memory of compiled steps, and libtpu's message for a step too large for a chip of 32 GiB."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.train.support import LENGTH, tiny
from tests.train.support import light_compiler as light_compiler
from train.estimate.compile import CompiledStep, parse_rejection
from train.estimate.describe import describe
from train.parallel.mesh import MeshConfig
from transformer import Hardware

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


@pytest.mark.full
def test_compiled_memory_matches_the_described_step(tmp_path: Path) -> None:
    """On eight devices, arguments equal the description to the byte."""
    base = tiny(tmp_path, mesh=MeshConfig(data=2, fsdp=2, tensor=2), grad_accum_steps=2)
    base = dataclasses.replace(base, model=dataclasses.replace(base.model, vocab_size=30))
    described = describe(base, Hardware(count=8), with_compiler=True)
    compiled = described.compiled
    assert compiled is not None
    text = 2 * LENGTH * 4  # a quarter of 8 windows
    assert compiled.batch == 7 * text + 2 * 4
    state = compiled.weights + compiled.optimizer + compiled.other_state
    assert compiled.arguments == state + compiled.batch - 2 * text  # no source text
    counters = 3 * 4 + 8  # step, cursor, optimizer step and a key
    full = described.memory.weights + described.memory.optimizer - 4 + counters
    assert full / 8 < state < full
    assert 0 < compiled.results < 1024
    assert json.loads(json.dumps(described.as_dict()))["compiler_bytes"]["peak"] == compiled.peak
    text_out = io.StringIO()
    described.print(Console(file=text_out, width=80))
    assert "Memory of one device of 8" in text_out.getvalue()
