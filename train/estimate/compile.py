"""Compile the real training step for a target with the target's own compiler."""

import dataclasses
import re
import time
from typing import Any

import jax

from train.errors import UsageError
from train.estimate.batch_shapes import sharded_batch_shapes
from train.estimate.compiled_memory import bytes_per_device
from train.estimate.hlo import Collective, find_collectives
from train.estimate.target import Target, target_devices
from train.experiment import Experiment
from train.jit_engine import JitEngine
from train.lora.layout import abstract_frozen
from train.parallel.mesh import make_mesh
from train.runtime.oom import is_oom_error

SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A compiled step; sizes are bytes of one chip."""

    weights: int
    optimizer: int
    """Optimizer state on the chip; 0 if it is placed in host memory."""
    other_state: int
    """Exponential moving average of the weights, counters and random keys."""
    batch: int
    arguments: int
    """Arguments of the step in the compiler's layout."""
    temporaries: int
    results: int
    """Outputs that do not reuse donated arguments."""
    peak: int
    """Peak memory of the step."""
    collectives: tuple[Collective, ...]
    compile_seconds: float
    """Duration of the compilation."""
    rejection: str = ""
    """Reason of a compiler that rejects the step as too large: its largest arrays, or its message.
    Sizes are then lower bounds. Empty for a step that compiled."""
    engine: Any = None
    """Engine that made the step."""
    program: Any = None
    """Executable program; runs only on local devices."""

    def without_program(self) -> "CompiledStep":
        """Return the same figures without fields that only this process can use."""
        return dataclasses.replace(self, engine=None, program=None)

    def fits(self, available_bytes: int) -> bool:
        """Return True if the step compiled and its peak is within the available bytes."""
        return not self.rejection and self.peak <= available_bytes


def compile_step(experiment: Experiment, target: Target) -> CompiledStep:
    """Compile the step of an experiment whose sizes are resolved. Nothing is allocated.

    Raises:
      UserError: The target's compiler is not installed.
      UsageError: The mesh does not divide the model or the batch.
    """
    mesh = make_mesh(experiment.mesh, target_devices(target))
    try:
        engine = JitEngine(experiment, mesh, target.hardware)
        state: Any = engine.abstract_state()
        batch: Any = sharded_batch_shapes(experiment, mesh)
    except ValueError as error:
        raise UsageError(str(error)) from error
    frozen = bytes_per_device(abstract_frozen(engine))
    weights, optimizer = bytes_per_device(state.params), bytes_per_device(state.optimizer)
    sizes: dict[str, Any] = dict(
        weights=weights + frozen,
        optimizer=0 if experiment.mesh.optimizer_placement == "host" else optimizer,
        other_state=bytes_per_device(state) - weights - optimizer,
        batch=bytes_per_device(batch),
    )
    start = time.perf_counter()
    try:
        program = engine.lower_step(state, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_oom_error(error):
            raise
        return CompiledStep(
            **sizes,
            **parse_rejection(str(error), sum(sizes.values()), target.memory_bytes),
            compile_seconds=time.perf_counter() - start,
        )
    seconds = time.perf_counter() - start
    stats: Any = program.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    total = stats.argument_size_in_bytes + results + stats.temp_size_in_bytes
    return CompiledStep(
        **sizes,
        arguments=stats.argument_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        results=results,
        peak=total + stats.generated_code_size_in_bytes,
        collectives=find_collectives(program.as_text() or "", mesh),
        compile_seconds=seconds,
        engine=engine,
        program=program,
    )


def parse_rejection(message: str, arguments: int, available_bytes: int) -> dict[str, Any]:
    """Return the sizes that a compiler reports for a step that it rejects as too large.

    Args:
      message: The compiler's message. TPU compilers report all memory in use; newer ones call it
        temporaries, arguments included.
      arguments: Bytes of the step's arguments.
      available_bytes: Bytes of the chip. The step needs more than that.
    """
    used = re.search(rf"Used {_SIZE}\s+of {_SIZE} hbm", message) or re.search(
        rf"HLO temporaries \({_SIZE}\) exceeds", message
    )
    peak = max(_bytes(used[1], used[2]) if used else arguments, available_bytes + 1)
    largest = re.findall(r"Size: ([\d.]+[KMGT]?)\s+Operator: op_name=\"([^\"]*)\"", message)
    return dict(
        arguments=arguments,
        temporaries=peak - arguments,
        results=0,
        peak=peak,
        collectives=(),
        rejection="; ".join(f"{size} {operation}" for size, operation in largest[:3])
        or " ".join(message.split("HLO module:")[0].split()),
    )


_SIZE = r"([\d.]+)([KMGT]?)"


def _bytes(number: str, unit: str) -> int:
    return int(float(number) * SIZE_UNITS[unit])
