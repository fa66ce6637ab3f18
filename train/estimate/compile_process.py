"""Compile a step in a process of its own: a compiler that does not belong to this JAX may crash.

jax 0.7.2 with the libtpu 0.0.21.1 that Colab has, for example, ends in a segmentation fault within
jax for whatever is compiled for a TPU that is not there.
"""

from __future__ import annotations

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
"""libtpu lets one process at a time load it, for the sake of the chips; this one uses none."""


@dataclasses.dataclass(frozen=True)
class CompilerFailure:
    """An error of the compiler's own, in its words."""

    message: str


class NotImportable:
    """The answer of a process that cannot import a class of the experiment."""


def compile_in_subprocess(experiment: Experiment, target: Target) -> CompiledStep:
    """Return `compile_step` of an experiment and a target, computed by another process.

    Raises what `compile_step` raises, and UserError if the process dies: the line names the
    versions of JAX and of the compiler, and what to install.
    """
    with tempfile.TemporaryDirectory(prefix="plan-") as name:
        request, answer = pathlib.Path(name, "request"), pathlib.Path(name, "answer")
        request.write_bytes(pickle.dumps((experiment, target)))
        command = [sys.executable, "-m", __name__, str(request), str(answer)]
        path = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run(
            command,
            env={**os.environ, **SUBPROCESS_ENVIRONMENT, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if not answer.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            status = done.returncode
            how = f"died of {signal.Signals(-status).name}" if status < 0 else f"failed ({last})"
            raise UserError(_explained(target, how))
        found = pickle.loads(answer.read_bytes())
    if isinstance(found, NotImportable):
        # A mixer of a config file or of a notebook: only this process knows its class.
        return compile_step(experiment, target)
    if isinstance(found, CompilerFailure):
        raise UserError(_explained(target, f"failed ({found.message})"))
    if isinstance(found, Exception):
        raise found
    step: CompiledStep = found
    return step


def _explained(target: Target, how: str) -> str:
    """Return the line that says how the compiler ended, and what to do."""
    from train.doctor.versions import installed_version, plugin_remedy

    package = COMPILER_PACKAGES[target.chip.platform][0].replace("_", "-")
    jax, version = installed_version("jax"), installed_version(package)
    told = f"target {target.name}: its compiler, {package} {version} with jax {jax}, {how}"
    remedy = plugin_remedy(package) or "upgrade both together"
    return f"{told}; {remedy}, or --compile-best 0 for the estimate alone"


def _compiled(request: bytes) -> CompiledStep | NotImportable:
    try:
        experiment, target = pickle.loads(request)
    except (AttributeError, ImportError):
        return NotImportable()
    return compile_step(experiment, target).without_program()


def main() -> None:
    """Read a request, compile, and write the answer: the step, or the error to raise."""
    request, answer = map(pathlib.Path, sys.argv[1:3])
    found: object
    try:
        found = _compiled(request.read_bytes())
    except UserError as error:
        found = error
    except Exception as error:  # noqa: BLE001 (compilers fail in ways of their own)
        words = " ".join(str(error).split()) or type(error).__name__
        found = CompilerFailure(words[:200])
    written = answer.with_name("writing")
    written.write_bytes(pickle.dumps(found))
    written.rename(answer)


if __name__ == "__main__":
    main()
