"""Running out of memory, explained: what is large, and which settings to lower."""

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence

import jax

from train.data.config import DataConfig
from train.errors import UserError
from train.experiment import Experiment

ELSEWHERE = "use devices with more memory, or more of them"
"""What helps a run that is only looked at, and is as large as it is."""


@contextlib.contextmanager
def explain_exhaustion(remedies: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Turns the compiler's or the device's out-of-memory error into one line with remedies."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not exhausted(error):
            raise
        raise UserError(advice(remedies(), str(error))) from error


def exhausted(error: BaseException) -> bool:
    """Whether this error says that memory ran out."""
    text = str(error)
    return (
        isinstance(error, MemoryError)
        or "RESOURCE_EXHAUSTED" in text
        or "out of memory" in text.lower()
    )


def advice(remedies: Sequence[str], message: str) -> str:
    """One line: how much was asked for, and what to do."""
    asked = re.search(
        r"(?:allocat\w+|Used|requested)\D{0,40}(\d[\d.]* ?(?:[KMGT]i?B?|B|bytes)?)", message
    )
    amount = f" asking for {asked.group(1).strip()}" if asked else ""
    return f"memory: ran out{amount}; {', or '.join(remedies)}"


def smaller(experiment: Experiment) -> list[str]:
    """What is large, and the settings that would make it fit, by the estimates of a plan.

    Where those cannot tell, the settings that take less memory, those that help most first.
    """
    from train.plan.remedies import remedies as planned
    from train.plan.target import local_target

    return planned(experiment, local_target()) or known_to_help(experiment)


def known_to_help(experiment: Experiment) -> list[str]:
    """The settings that take less memory to train with."""
    length, batch, tokens = experiment.length, experiment.batch_size, experiment.batch_tokens
    remedies = []
    if tokens or batch > experiment.accumulate:
        smaller = f"data.batch_tokens (now {tokens})" if tokens else f"batch_size (now {batch})"
        remedies.append(f"raise accumulate (now {experiment.accumulate}) or lower {smaller}")
    if experiment.model.remat != "full":
        remedies.append(f"set model.remat to full (now {experiment.model.remat})")
    cut = "sequence_length" if isinstance(experiment.data, DataConfig) else "max_length"
    remedies.append(f"lower data.{cut} (now {length})")
    remedies.append(
        f"lower model.width (now {experiment.model.width}) or "
        f"model.layers (now {experiment.model.layers})"
    )
    if jax.device_count() > 1 and experiment.mesh.fsdp == 1:
        remedies.insert(0, f"set mesh.fsdp to {jax.device_count()} (now 1)")
    return remedies
