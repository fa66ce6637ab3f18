import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from train.runtime.signals import (
    PREEMPTED_EXIT_STATUS,
    STOP_SIGNALS,
    StopRequest,
    exit_on_stop_signal,
)


@pytest.fixture(autouse=True)
def default_hangup() -> Iterator[None]:
    """Run each test with SIGHUP at its default: under nohup it is ignored, also by children."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_is_recorded_without_ending_the_process(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.requested_by() is None
        os.kill(os.getpid(), number)
        assert stop.requested_by() == number.name
    assert signal.getsignal(number) is before


def test_handlers_are_unchanged_outside_the_main_thread() -> None:
    result: list[str | None] = []

    def enter() -> None:
        with StopRequest() as stop:
            result.append(stop.requested_by())

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert result == [None]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("second", [each for each in STOP_SIGNALS if each != signal.SIGHUP])
def test_second_signal_ends_the_process(second: signal.Signals) -> None:
    program = (
        "import os, signal\n"
        "from train.runtime.signals import StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(stop.requested_by(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"  # by a scheduler and by the queue of a sweep
        "    stop._repeats_until = 0\n"  # five seconds later
        f"    os.kill(os.getpid(), {second:d})\n"
        "    print('still here', flush=True)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "SIGTERM\n"
    assert ran.returncode == -second


NOTIFIED = """
import os, signal, time
from train.parallel.distributed import initialize_distributed
initialize_distributed()
import jax
from jax.experimental import multihost_utils
from train.runtime.signals import StopRequest
if jax.process_index() == 1:
    os.kill(os.getpid(), signal.SIGTERM)
multihost_utils.sync_global_devices("sent")
time.sleep(5)  # JAX looks for it every second
with StopRequest() as stop:
    for step in range(180, 200):  # of a run that goes on
        multihost_utils.sync_global_devices(str(step))
        if stop.requested_by():
            print("stopped", step)
            break
"""


@pytest.mark.full
def test_preemption_before_the_first_resumed_step() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    kwargs = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", NOTIFIED],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **kwargs, "JAX_PROCESS_ID": str(index)},
        )
        for index in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [each.splitlines()[-1] for each in said] == ["stopped 180"] * 2


def run(program: str, *, ignored: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program; `ignored` is a signal that is ignored from its start, as nohup does."""
    trap = f"trap '' {ignored}; " if ignored else ""
    return subprocess.run(
        ["/bin/sh", "-c", f'{trap}exec "$0" -c "$1"', sys.executable, program],
        capture_output=True,
        text=True,
    )


def test_repeated_hangup_is_one_request() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.requested_by() == "SIGHUP"


def test_ignored_hangup_stays_ignored() -> None:
    """nohup ignores SIGHUP."""
    ran = run(
        "import os, signal\n"
        "from train.runtime.signals import StopRequest, exit_on_stop_signal\n"
        "with exit_on_stop_signal(), StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print(stop.requested_by())\n",
        ignored="HUP",
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("None\n", "", 0)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_signal_before_training_exits_with_a_message(number: signal.Signals) -> None:
    ran = run(
        "import os, time\n"
        "from train.runtime.signals import exit_on_stop_signal\n"
        "with exit_on_stop_signal():\n"
        f"    os.kill(os.getpid(), {number:d})\n"
        # Another thread may get the signal: the main thread sees it a little later.
        "    for _ in range(600):\n"
        "        time.sleep(0.1)\n"
        "    print('still here')\n"
    )
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    if number == signal.SIGINT:
        assert (ran.returncode, ran.stderr) == (130, "interrupted\n")
    else:
        assert ran.returncode == PREEMPTED_EXIT_STATUS
        assert ran.stderr.startswith(f"stopped by {number.name} while not training: nothing new")


def test_handlers_of_training_replace_those_before() -> None:
    before = [signal.getsignal(each) for each in STOP_SIGNALS]
    with exit_on_stop_signal(), StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested_by() == "SIGTERM"
    assert [signal.getsignal(each) for each in STOP_SIGNALS] == before
