import os
import signal
import subprocess
import sys
import threading

import pytest

from train.preemption import SIGNALS, StopRequest


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_noted_and_the_process_lives(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert stop.asked(1) is None
        os.kill(os.getpid(), number)
        assert stop.asked(2) == number.name
    assert signal.getsignal(number) is before


def test_signals_are_as_they_were_after_an_error() -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with pytest.raises(ValueError, match="this"), StopRequest():
        raise ValueError("this")
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_outside_of_the_main_thread_signals_are_left_alone() -> None:
    found: list[str | None] = []

    def enter() -> None:
        with StopRequest() as stop:
            found.append(stop.asked(1))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [None]
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_ends_the_process_at_once(second: signal.Signals) -> None:
    program = (
        "import os, signal\n"
        "from train.preemption import SIGNALS, StopRequest\n"
        "with StopRequest() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print(stop.signal, flush=True)\n"
        f"    os.kill(os.getpid(), {second:d})\n"
        "    print('still here', flush=True)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "SIGTERM\n"
    assert ran.returncode == -second
