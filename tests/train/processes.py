"""Two processes of one program that JAX connects, for tests of several hosts."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def run_two_processes(program: str, *arguments: object) -> list[str]:
    """Run a program in two processes with one device each; return the last line that each prints.

    Its `sys.argv[1:]` are the coordinator's address, the number of the process, and `arguments`.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, address, str(index), *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "JAX_NUM_CPU_DEVICES": "1"},
        )
        for index in range(2)
    ]
    ended = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ended
    return [output.splitlines()[-1] for output, _ in ended]  # gloo also prints a line
