"""What the compiler says of the memory of a training step, beside what is described.

The real training step, compiled for a target by its own compiler, and what that says of it.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.engine import JitEngine
    from train.experiment import Experiment
import re
import time

import jax

from train.engine import JitEngine
from train.errors import UsageError
from train.estimate.batch_shapes import sharded_batch_shapes
from train.estimate.compiled_memory import bytes_per_device
from train.estimate.hlo import Collective, find_collectives
from train.estimate.target import Target, target_devices
from train.experiment import Experiment
from train.parallel.mesh import make_mesh
from train.runtime.oom import is_oom_error

SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """A step as the compiler has made it; bytes are those of one chip."""

    weights: int
    optimizer: int
    """Its state; 0 if that lies with the host."""
    other_state: int
    """The moving average of the weights, counters and keys."""
    batch: int
    arguments: int
    """What the step is given, as the compiler lays it out."""
    temporaries: int
    results: int
    """Those that do not take the place of arguments."""
    peak: int
    """All of it, at the moment when it is most."""
    collectives: tuple[Collective, ...]
    compile_seconds: float
    """That compiling took."""
    rejection: str = ""
    """Of a step that the compiler refuses, as too large for a chip: the largest of what it would
    have to hold, or what the compiler says. Its sizes are then the least that they can be."""
    engine: Any = None
    """That made it."""
    program: Any = None
    """What can be run, on devices that are here."""

    def without_program(self) -> "CompiledStep":
        """Return the same figures without what only this process can use."""
        return dataclasses.replace(self, engine=None, program=None)

    def fits(self, available_bytes: int) -> bool:
        """In so many bytes of a chip; never if the compiler itself refuses it."""
        return not self.rejection and self.peak <= available_bytes


def compile_step(experiment: Experiment, target: Target) -> CompiledStep:
    """Compiles the step of an experiment that has its sizes; nothing is allocated.

    Raises UserError for a target without its compiler, UsageError for what cannot be divided.
    """
    mesh = make_mesh(experiment.mesh, target_devices(target))
    try:
        engine = JitEngine(experiment, mesh, target.hardware)
        state: Any = engine.abstract_state()
        batch: Any = sharded_batch_shapes(experiment, mesh)
    except ValueError as error:
        raise UsageError(str(error)) from error
    weights, optimizer = bytes_per_device(state.params), bytes_per_device(state.optimizer)
    known: dict[str, Any] = dict(
        weights=weights,
        optimizer=0 if experiment.mesh.optimizer_placement == "host" else optimizer,
        other_state=bytes_per_device(state) - weights - optimizer,
        batch=bytes_per_device(batch),
    )
    begun = time.perf_counter()
    try:
        program = engine.lower_step(state, batch).compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_oom_error(error):
            raise
        return CompiledStep(
            **known,
            **parse_rejection(str(error), sum(known.values()), target.memory_bytes),
            compile_seconds=time.perf_counter() - begun,
        )
    seconds = time.perf_counter() - begun
    stats: Any = program.memory_analysis()
    results = stats.output_size_in_bytes - stats.alias_size_in_bytes
    parts = stats.argument_size_in_bytes + results + stats.temp_size_in_bytes
    return CompiledStep(
        **known,
        arguments=stats.argument_size_in_bytes,
        temporaries=stats.temp_size_in_bytes,
        results=results,
        peak=parts + stats.generated_code_size_in_bytes,
        collectives=find_collectives(program.as_text() or "", mesh),
        compile_seconds=seconds,
        engine=engine,
        program=program,
    )


def parse_rejection(message: str, arguments: int, available_bytes: int) -> dict[str, Any]:
    """What a compiler that refuses a step tells of its memory.

    Args:
      message: Its words. Of a TPU's all memory that is used; what its newer wording calls that of
        temporaries has the arguments in it.
      arguments: Bytes that the step is given.
      available_bytes: Bytes that there are. It takes more than that, whatever else is known.
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
