"""Compile a step in a subprocess, since a compiler that does not match JAX may crash.

For example, jax 0.7.2 with libtpu 0.0.21.1 (as on Colab) ends with a segmentation fault for every
program compiled for an absent TPU.
"""

import dataclasses
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile

from train.errors import UserError
from train.estimate.compile import CompiledStep, compile_step
from train.estimate.target import COMPILER_PACKAGES, Target
from train.experiment import Experiment

SUBPROCESS_ENVIRONMENT = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""libtpu allows one process at a time, to guard the chips; the subprocess uses no chip."""


@dataclasses.dataclass(frozen=True)
class CompilerFailure:
    """An internal error of the compiler."""

    message: str


class NotImportable:
    """The answer of a subprocess that cannot import a class of the experiment."""


def compile_in_subprocess(experiment: Experiment, target: Target) -> CompiledStep:
    """Return `compile_step(experiment, target)` computed by another process.

    Raises the errors of `compile_step`, and UserError if the process dies: the message names the
    versions of JAX and of the compiler, and what to install.
    """
    with tempfile.TemporaryDirectory(prefix="plan-") as name:
        request, answer = pathlib.Path(name, "request"), pathlib.Path(name, "answer")
        request.write_bytes(pickle.dumps((experiment, target)))
        # -P: the current folder is not put in front, where a train.py would hide this package.
        command = [sys.executable, "-P", "-m", __name__, str(request), str(answer)]
        path = os.pathsep.join(each or str(pathlib.Path.cwd()) for each in sys.path)
        completed = subprocess.run(
            command,
            env={**os.environ, **SUBPROCESS_ENVIRONMENT, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if not answer.exists():
            last = (completed.stderr.strip().splitlines() or ["no message"])[-1]
            status = completed.returncode
            outcome = (
                f"died of {signal.Signals(-status).name}" if status < 0 else f"failed ({last})"
            )
            raise UserError(_failure_message(target, outcome))
        answered = pickle.loads(answer.read_bytes())
    if isinstance(answered, NotImportable):
        # Only this process knows the class of a mixer from a config file or a notebook.
        return compile_step(experiment, target)
    if isinstance(answered, CompilerFailure):
        raise UserError(_failure_message(target, f"failed ({answered.message})"))
    if isinstance(answered, Exception):
        raise answered
    step: CompiledStep = answered
    return step


def _failure_message(target: Target, outcome: str) -> str:
    """Return the error message for a compiler that failed: outcome, versions and remedy."""
    from train.runtime.accelerators import installed_version, plugin_remedy

    package = COMPILER_PACKAGES[target.chip.platform][0].replace("_", "-")
    jax, version = installed_version("jax"), installed_version(package)
    message = f"target {target.name}: its compiler, {package} {version} with jax {jax}, {outcome}"
    remedy = plugin_remedy(package) or "upgrade both together"
    return f"{message}; {remedy}, or --compile-best 0 for estimates only"


def _compile_request(request: bytes) -> CompiledStep | NotImportable:
    try:
        experiment, target = pickle.loads(request)
    except (AttributeError, ImportError):
        return NotImportable()
    return compile_step(experiment, target).without_program()


def main() -> None:
    """Read a request, compile, and write the answer: the compiled step or the error to raise."""
    request, answer = map(pathlib.Path, sys.argv[1:3])
    result: object
    try:
        result = _compile_request(request.read_bytes())
    except UserError as error:
        result = error
    except Exception as error:  # noqa: BLE001 (compilers fail in ways of their own)
        text = " ".join(str(error).split()) or type(error).__name__
        result = CompilerFailure(text[:200])
    partial = answer.with_name("writing")
    partial.write_bytes(pickle.dumps(result))
    # A rename is atomic: the answer exists only if it is complete.
    partial.rename(answer)


if __name__ == "__main__":
    # The module of this name, not `__main__`: pickle notes where a class is from, and the parent's
    # `__main__` has no class of these names.
    from train.estimate import compile_process

    compile_process.main()
