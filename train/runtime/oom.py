"""Explain out-of-memory errors: the largest consumers, and the settings to lower."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from train.engines.engine import Engine
from train.errors import UserError
from train.estimate.description_tables import format_bytes
from train.experiment import Experiment
from train.runtime.local_hardware import host_memory_bytes

LARGER_DEVICES_REMEDY = "use devices with more memory, or more of them"
"""Remedy for a trained run that is only evaluated or sampled: its size is fixed."""

_HOST_BYTES_PER_TOKEN = 16
"""Bytes of a token in a host batch: token, target, position and segment, int32 each."""

_MIN_ACTIVATION_BYTES = 2
"""Bytes of an activation in bfloat16 or float16, the smallest types that layers compute in."""


@contextlib.contextmanager
def explain_oom(remedies: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Raise a UserError with remedies in place of an out-of-memory error.

    Args:
      remedies: Called after the error, to return the remedies to name.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_oom_error(error):
            raise
        raise UserError(oom_message(remedies(), str(error))) from error


def check_minimum_memory(engine: Engine, experiment: Experiment) -> None:
    """Raise UserError for an experiment that cannot fit, whatever XLA does.

    The sizes are lower bounds, not estimates. Without this check, a batch or a model that is far
    too large takes minutes to build. On a CPU the operating system would then kill the process
    without an error message.
    """
    device = jax.local_devices()[0]
    local_devices, host_bytes = jax.local_device_count(), host_memory_bytes()
    device_bytes = (device.memory_stats() or {}).get("bytes_limit", 0) * local_devices
    if device.platform == "cpu":
        device_bytes = host_bytes
    state = sum(map(_shard_bytes, jax.tree.leaves(engine.abstract_state()))) * local_devices
    model = experiment.model
    rows = experiment.batch_size // jax.process_count()
    tokens = rows * experiment.data.shortest_row
    # Every rematerialization policy saves at least the input of each layer.
    values = tokens * model.d_model * model.num_layers
    layer_inputs = values * _MIN_ACTIVATION_BYTES // experiment.grad_accum_steps
    remedies = generic_remedies(experiment)
    state_remedies = [each for each in remedies if each.startswith(("set mesh.", "lower model."))]
    activation_memory = host_bytes if model.remat == "offload" else device_bytes
    for consumer, size, memory, helpful in (
        ("the training state", state, device_bytes, state_remedies),
        ("the inputs of the layers", layer_inputs, activation_memory, remedies),
        ("a batch's tokens", tokens * _HOST_BYTES_PER_TOKEN, host_bytes, remedies),
    ):
        if memory and size > memory:
            raise UserError(
                f"memory: {consumer} would take {format_bytes(size)}, and the machine has "
                f"{format_bytes(memory)}; {', or '.join(helpful)}"
            )


def _shard_bytes(leaf: Any) -> int:
    """Return the bytes of an array's shard in device memory."""
    if leaf.sharding.memory_kind == "pinned_host":
        return 0
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def is_oom_error(error: BaseException) -> bool:
    """Return True if an error says that memory ran out."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or "RESOURCE_EXHAUSTED" in text
        or "out of memory" in text.lower()
    )


def oom_message(remedies: Sequence[str], message: str) -> str:
    """Return one line with the requested amount, if `message` names it, and the remedies."""
    # The compiler, the allocators of GPU and TPU, and the CPU client word it differently.
    amount = re.search(
        r"(?:allocat\w+|Used|requested)\D{0,40}(\d[\d.]* ?(?:[KMGT]i?B?|B|bytes)?)", message
    )
    requested = f" asking for {amount.group(1).strip()}" if amount else ""
    return f"memory: ran out{requested}; {', or '.join(remedies)}"


def suggest_remedies(experiment: Experiment) -> list[str]:
    """Return the changes of settings that `plan` estimates to fit on this machine.

    Without an estimate, return generic remedies, the most effective first.
    """
    from train.estimate.remedies import plan_remedies
    from train.estimate.target import local_target

    return plan_remedies(experiment, local_target()) or generic_remedies(experiment)


def generic_remedies(experiment: Experiment) -> list[str]:
    """Return the changes of settings that lower the memory of training."""
    microbatches, batch = experiment.grad_accum_steps, experiment.batch_size
    batch_tokens = experiment.batch_tokens
    remedies = []
    if batch_tokens or batch > microbatches:
        size = f"data.batch_tokens (now {batch_tokens})" if batch_tokens else ""
        size = size or f"batch_size (now {batch})"
        remedies.append(f"raise grad_accum_steps (now {microbatches}) or lower {size}")
    if experiment.model.remat != "full":
        remedies.append(f"set model.remat to full (now {experiment.model.remat})")
    length = experiment.sequence_length
    remedies.append(f"lower data.{experiment.data.length_field} (now {length})")
    remedies.append(
        f"lower model.d_model (now {experiment.model.d_model}) or "
        f"model.num_layers (now {experiment.model.num_layers})"
    )
    if jax.device_count() > 1 and experiment.mesh.fsdp == 1:
        remedies.insert(0, f"set mesh.fsdp to {jax.device_count()} (now 1)")
    return remedies
