"""Traces of some training steps, for XProf, TensorBoard and Perfetto."""

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax

from train.files import AnyPath
from train.runtime.writing import explain_write_errors, is_local

StepFn = Callable[[Any, Any], Any]
"""Training step: (state, batch) -> (state, metrics)."""


@contextlib.contextmanager
def profile_steps(
    step_fn: StepFn,
    steps: tuple[int, int] | None,
    folder: AnyPath,
    start_step: int,
    show: Callable[[str], None],
) -> Iterator[StepFn]:
    """Return the step function, which traces some of its calls.

    Args:
      step_fn: Compiled step. It is returned as it is if nothing is to be traced.
      steps: First and last step to trace; None: none.
      folder: Folder that the trace is written below.
      start_step: Step before the first call.
      show: Prints a line.
    """
    if steps is None or jax.process_index() != 0:
        yield step_fn
        return
    first, last = steps
    if start_step >= last:
        show(f"profile {first}:{last}: step {start_step} is done already; nothing is traced")
        yield step_fn
        return
    step, trace = start_step, contextlib.ExitStack()

    def traced(state: Any, batch: Any) -> Any:
        nonlocal step
        step += 1
        if step == max(first, start_step + 1):
            trace.enter_context(_trace(folder, show))
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            result = step_fn(state, batch)
        if step == last:
            jax.block_until_ready(result)  # the devices are some steps behind
            trace.close()
        return result

    with trace:
        yield traced


@contextlib.contextmanager
def _trace(folder: AnyPath, show: Callable[[str], None]) -> Iterator[None]:
    """Trace the block. A remote folder gets the files at the end."""
    with explain_write_errors(folder), contextlib.ExitStack() as stack:
        local = folder
        if not is_local(folder):
            local = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # Not the link of Perfetto: it waits until somebody opens it.
        with jax.profiler.trace(str(local), create_perfetto_trace=True):
            yield
        if local is not folder:
            for file in (each for each in local.rglob("*") if each.is_file()):
                copy = folder / file.relative_to(local).as_posix()
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(file.read_bytes())
    show(f"profile: written to {folder}")
