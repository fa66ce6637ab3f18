"""Memory of compiled steps, and libtpu's message for a step too large for a chip of 32 GiB."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.train.support import LENGTH, tiny
from tests.train.support import light_compiler as light_compiler
from train.assembly import make_engine
from train.engines.jit_engine import JitEngine
from train.estimate.batch_shapes import sharded_batch_shapes
from train.estimate.compile import CompiledStep, parse_rejection, trace_residual_bytes
from train.estimate.description import describe
from train.estimate.description_tables import temporaries_differences
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
    """On eight devices, arguments equal the description to the byte; the differences add up."""
    base = tiny(tmp_path, mesh=MeshConfig(data=2, fsdp=2, tensor=2), grad_accum_steps=2)
    base = dataclasses.replace(base, model=dataclasses.replace(base.model, vocab_size=30))
    described = describe(base, Hardware(count=8), with_compiler=True)
    compiled = described.compiled_memory
    assert compiled is not None
    assert compiled.devices == 8
    text = 2 * LENGTH * 4  # a quarter of 8 windows
    assert compiled.batch == 7 * text + 2 * 4
    assert compiled.arguments == compiled.state + compiled.batch - 2 * text  # no source text
    counters = 3 * 4 + 8  # step, cursor, optimizer step and a key
    full = described.memory.weights + described.memory.optimizer - 4 + counters
    assert full / 8 < compiled.state < full
    assert compiled.donated == compiled.state
    assert 0 < compiled.results < 1024
    assert compiled.gradients == 2 * 4 * described.parameters.allocated // 8
    actual = sum(temporaries_differences(compiled).values())
    assert actual == compiled.temporaries - compiled.estimated_temporaries
    assert json.loads(json.dumps(described.as_dict()))["compiler_bytes"]["devices"] == 8
    text_out = io.StringIO()
    described.print(Console(file=text_out, width=80))
    assert "Compiled memory of one device of 8" in text_out.getvalue()


def test_residuals_shrink_with_remat(
    tmp_path: Path,
) -> None:
    kept = {}
    for remat in ("none", "full"):
        base = tiny(tmp_path)
        model = dataclasses.replace(base.model, vocab_size=30, remat=remat)
        experiment = dataclasses.replace(base, model=model)
        engine = make_engine(experiment, Hardware())
        assert isinstance(engine, JitEngine)
        kept[remat], _ = trace_residual_bytes(
            engine, sharded_batch_shapes(experiment, engine.mesh), 1
        )
    inputs = 2 * 8 * LENGTH * 16 * 4  # of two layers, D 16
    assert inputs <= kept["full"] < inputs + 8 * LENGTH * 16 * 4 * 8
    assert kept["none"] > 4 * kept["full"]
