"""Compiles a step in a process of its own: a compiler that does not belong to this JAX may crash.

jax 0.7.2 with the libtpu 0.0.21.1 that Colab has, for example, ends in a segmentation fault within
jax for whatever is compiled for a TPU that is not there.
"""

from __future__ import annotations

import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile

from train.errors import UserError
from train.experiment import Experiment
from train.plan.compiled import CompiledStep, compile_step
from train.plan.target import COMPILERS, Target

ALONE = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
"""libtpu lets one process at a time load it, for the sake of the chips; this one uses none."""


def compile_apart(experiment: Experiment, target: Target) -> CompiledStep:
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
            env={**os.environ, **ALONE, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
        if not answer.exists():
            raise UserError(_death(target, done.returncode, done.stderr))
        found = pickle.loads(answer.read_bytes())
    if isinstance(found, Exception):
        raise found
    step: CompiledStep = found
    return step


def _death(target: Target, status: int, errors: str) -> str:
    """Return the line that says how the compiler ended, and what to do."""
    from train.doctor.versions import check_plugin, installed, requirements

    package = COMPILERS[target.chip.platform][0].replace("_", "-")
    jax, version = installed("jax") or "?", installed(package) or "?"
    wanted = {each.name: each for each in requirements("jax", extras=True)}.get(package)
    pair = check_plugin(package, version, wanted, jax)
    last = (errors.strip().splitlines() or [f"status {status}"])[-1]
    how = f"died of {signal.Signals(-status).name}" if status < 0 else f"failed ({last[:200]})"
    alone = "--compile-best 0 gives the estimate alone"
    if pair.remedy:
        told = f"{package} {pair.detail}; {pair.remedy}, or {alone}"
        return f"target {target.name}: its compiler {how}: {told}"
    return (
        f"target {target.name}: its compiler, {package} {version} with jax {jax}, {how}; "
        f"upgrade both together, or {alone}"
    )


def main() -> None:
    """Read a request, compile, and write the answer: the step, or the error to raise."""
    request, answer = map(pathlib.Path, sys.argv[1:3])
    experiment, target = pickle.loads(request.read_bytes())
    try:
        found: object = compile_step(experiment, target).without_program()
    except UserError as error:
        found = error
    written = answer.with_name("writing")
    written.write_bytes(pickle.dumps(found))
    written.rename(answer)


if __name__ == "__main__":
    main()
