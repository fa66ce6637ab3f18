"""Compile the real training step, for a target with its own compiler or for the local devices.

A step for absent hardware is compiled by another process, since a compiler that does not match JAX
may crash: jax 0.7.2 with libtpu 0.0.21.1 (as on Colab) ends with a segmentation fault for every
program compiled for an absent TPU.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import math
import multiprocessing
import os
import pickle
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.assembly import make_engine_on
from train.errors import UsageError, UserError, short_reason
from train.estimate.batch_shapes import (
    max_batch_shape,
    sharded_batch_shapes,
    unsharded_batch_shapes,
)
from train.estimate.target import COMPILER_PACKAGES, Clock, Target, target_devices
from train.experiment import Experiment
from train.parallel.mesh import make_mesh
from train.runtime.oom import is_oom_error

SIZE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"


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
    compile_seconds: float
    """Duration of the compilation."""
    rejection: str = ""
    """Reason of a compiler that rejects the step as too large: its largest arrays, or its message.
    Sizes are then lower bounds. Empty for a step that compiled."""
    engine: Any = None
    """Engine that made the step; None if another process did."""
    program: Any = None
    """Executable program of local devices; None if another process made it."""

    def fits(self, available_bytes: int) -> bool:
        """Return True if the step compiled and its peak is within the available bytes."""
        return not self.rejection and self.peak <= available_bytes

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("engine", "program")
        }


def compile_step(experiment: Experiment, target: Target) -> CompiledStep:
    """Compile the step of an experiment whose sizes are resolved. Nothing is allocated.

    A `pmap` step is measured as the `jit` step of the same mesh, which can be lowered.

    Raises:
      UserError: The target's compiler is not installed.
      UsageError: The mesh does not divide the model or the batch.
    """
    mesh = make_mesh(experiment.mesh, target_devices(target))
    try:
        engine = make_engine_on(
            mesh, dataclasses.replace(experiment, compile="jit"), target.hardware
        )
        state: Any = engine.abstract_state()
        batch: Any = sharded_batch_shapes(experiment, mesh)
    except ValueError as error:
        raise UsageError(str(error)) from error
    frozen = bytes_per_device(engine.abstract_frozen())
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
    reported = int(float(used[1]) * SIZE_UNITS[used[2]]) if used else arguments
    peak = max(reported, available_bytes + 1)
    largest = re.findall(r"Size: ([\d.]+[KMGT]?)\s+Operator: op_name=\"([^\"]*)\"", message)
    return dict(
        arguments=arguments,
        temporaries=peak - arguments,
        results=0,
        peak=peak,
        rejection="; ".join(f"{size} {operation}" for size, operation in largest[:3])
        or " ".join(message.split("HLO module:")[0].split()),
    )


def bytes_per_device(tree: Any) -> int:
    """Return the bytes that one device stores of a tree of sharded arrays."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def compile_in_subprocess(experiment: Experiment, target: Target) -> CompiledStep:
    """Return `compile_step(experiment, target)` computed by another process.

    Raises the errors of `compile_step`, and UserError if the process dies: the message names the
    versions of JAX and of the compiler, and what to install.
    """
    request, spawn = pickle.dumps((experiment, target)), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as pool:
        try:
            step = pool.submit(compile_request, request).result()
        except UserError:
            raise
        except Exception as error:
            package, extra = COMPILER_PACKAGES[target.chip.platform]
            installed = (
                each for each in importlib.metadata.distributions() if each.name == package
            )
            version = next((each.version for each in installed), "of no known version")
            raise UserError(
                f"target {target.name}: its compiler, {package} {version} with jax "
                f"{jax.__version__}, failed ({short_reason(error)}); in an environment of its own: "
                f"pip install 'jax[{extra}]=={jax.__version__}', or --compile-best 0 for estimates "
                "only"
            ) from error
    return compile_step(experiment, target) if step is None else step


def compile_request(request: bytes) -> CompiledStep | None:
    """Return the compiled step of a pickled experiment and target, without what stays here.

    None for a class that only the asking process knows, such as a mixer of a config file.
    """
    # libtpu allows one process at a time, to guard the chips; this one uses no chip.
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    try:
        experiment, target = pickle.loads(request)
    except (AttributeError, ImportError):
        return None
    return dataclasses.replace(compile_step(experiment, target), engine=None, program=None)


TIMED_STEPS = 3
"""Steps that are timed, after one warm-up step."""


def time_step(
    experiment: Experiment,
    compiled: CompiledStep,
    steps: int = TIMED_STEPS,
    clock: Clock = time.perf_counter,
) -> float:
    """Return the seconds of the fastest of several steps on a random batch.

    The minimum, not the mean: other processes may use the machine.
    """
    engine = compiled.engine
    state: Any = engine.init()
    batch = engine.put_batch(random_batch(experiment))
    zeros = lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding)  # noqa: E731
    frozen = jax.tree.map(zeros, engine.abstract_frozen())  # of a LoRA run
    seconds = []
    for _ in range(1 + steps):
        jax.block_until_ready((state, batch))
        start = clock()
        state, _ = jax.block_until_ready(compiled.program(state, batch, frozen))
        seconds.append(clock() - start)
    return min(seconds[1:])


def random_batch(experiment: Experiment) -> dict[str, np.ndarray]:
    """Return this host's rows of a batch: random tokens without padding."""
    rows = max_batch_shape(experiment)[0] // jax.process_count()
    generator = np.random.default_rng(0)
    num_tokens = experiment.task.num_labels or experiment.model.vocab_size
    batch: dict[str, np.ndarray] = {}
    for name, leaf in unsharded_batch_shapes(experiment, rows).items():
        if name in ("positions", "examples"):
            batch[name] = np.broadcast_to(np.arange(leaf.shape[-1], dtype=leaf.dtype), leaf.shape)
        elif name in ("segments", "source_segments", "weights"):
            batch[name] = np.ones(leaf.shape, leaf.dtype)
        else:
            batch[name] = generator.integers(num_tokens, size=leaf.shape).astype(leaf.dtype)
    return batch
