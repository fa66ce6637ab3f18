"""Running out of memory, explained: what is large, and which settings to lower."""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from train.engine import Engine
from train.errors import UserError
from train.estimate.memory_tables import format_bytes
from train.experiment import Experiment
from train.runtime.host_memory import host_memory_bytes

_BYTES_OF_TOKEN = 16
"""In a batch on the host: token, target, position and segment, int32 each."""


_BYTES_OF_ACTIVATION = 2
"""In bfloat16 or float16, the least that a layer computes in."""


LARGER_DEVICES_REMEDY = "use devices with more memory, or more of them"
"""What helps a run that is only looked at, and is as large as it is."""


@contextlib.contextmanager
def explain_oom(remedies: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Turns the compiler's or the device's out-of-memory error into one line with remedies."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_oom_error(error):
            raise
        raise UserError(oom_message(remedies(), str(error))) from error


def check_minimum_memory(engine: Engine, experiment: Experiment) -> None:
    """Raise UserError for what no settings of XLA could make fit: lower bounds, no estimates.

    Without it, a batch or a model that is far too large takes minutes to build; and where the
    host's memory is the device's, the system ends the process without a word.
    """
    device = jax.local_devices()[0]
    local, host = jax.local_device_count(), host_memory_bytes()
    here = (device.memory_stats() or {}).get("bytes_limit", 0) * local
    if device.platform == "cpu":
        here = host
    state = sum(map(_bytes_of_device, jax.tree.leaves(engine.abstract_state()))) * local
    model = experiment.model
    rows = experiment.batch_size // jax.process_count()
    tokens = rows * experiment.data.shortest_row
    # The input of each layer is kept for the backward pass whatever is computed again.
    kept = (
        tokens
        * model.d_model
        * model.num_layers
        * _BYTES_OF_ACTIVATION
        // experiment.grad_accum_steps
    )
    remedies = generic_remedies(experiment)
    of_state = [each for each in remedies if each.startswith(("set mesh.", "lower model."))]
    for what, size, memory, helpful in (
        ("the training state", state, here, of_state),
        ("the inputs of the layers", kept, host if model.remat == "offload" else here, remedies),
        ("a batch's tokens", tokens * _BYTES_OF_TOKEN, host, remedies),
    ):
        if memory and size > memory:
            raise UserError(
                f"memory: {what} would take {format_bytes(size)}, and there are {format_bytes(memory)}; "
                f"{', or '.join(helpful)}"
            )


def _bytes_of_device(leaf: Any) -> int:
    if leaf.sharding.memory_kind == "pinned_host":
        return 0
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def is_oom_error(error: BaseException) -> bool:
    """Whether this error says that memory ran out."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or "RESOURCE_EXHAUSTED" in text
        or "out of memory" in text.lower()
    )


def oom_message(remedies: Sequence[str], message: str) -> str:
    """One line: how much was asked for, and what to do."""
    asked = re.search(
        r"(?:allocat\w+|Used|requested)\D{0,40}(\d[\d.]* ?(?:[KMGT]i?B?|B|bytes)?)", message
    )
    amount = f" asking for {asked.group(1).strip()}" if asked else ""
    return f"memory: ran out{amount}; {', or '.join(remedies)}"


def suggest_remedies(experiment: Experiment) -> list[str]:
    """What is large, and the settings that would make it fit, by the estimates of a plan.

    Where those cannot tell, the settings that take less memory, those that help most first.
    """
    from train.estimate.remedies import suggest_remedies as planned
    from train.estimate.target import local_target

    return planned(experiment, local_target()) or generic_remedies(experiment)


def generic_remedies(experiment: Experiment) -> list[str]:
    """The settings that take less memory to train with."""
    length, batch, tokens = (
        experiment.sequence_length,
        experiment.batch_size,
        experiment.batch_tokens,
    )
    remedies = []
    if tokens or batch > experiment.grad_accum_steps:
        smaller = f"data.batch_tokens (now {tokens})" if tokens else f"batch_size (now {batch})"
        remedies.append(
            f"raise grad_accum_steps (now {experiment.grad_accum_steps}) or lower {smaller}"
        )
    if experiment.model.remat != "full":
        remedies.append(f"set model.remat to full (now {experiment.model.remat})")
    remedies.append(f"lower data.{experiment.data.length_field} (now {length})")
    remedies.append(
        f"lower model.d_model (now {experiment.model.d_model}) or "
        f"model.num_layers (now {experiment.model.num_layers})"
    )
    if jax.device_count() > 1 and experiment.mesh.fsdp == 1:
        remedies.insert(0, f"set mesh.fsdp to {jax.device_count()} (now 1)")
    return remedies
