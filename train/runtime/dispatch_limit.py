"""How far the host runs ahead of the devices.

JAX dispatches programs asynchronously: a call returns before its program has run, and the host
prepares the next one meanwhile. Two things bound how many programs may be in flight:

- XLA's CPU client runs the programs of all its devices on one pool of threads: one for each device,
  or for each core if there are more. A program over several devices needs a thread for each of them
  at the same time, since its collectives block a thread until all devices have arrived. A device
  accepts 32 programs; dispatching one more blocks a thread of that same pool for each device until
  a program ends. The next program to run then no longer gets all the threads that it needs, and
  never ends: the process hangs, or XLA aborts it after 40 seconds ("Termination timeout for all
  reduce").
- Programs in flight keep their inputs in device memory: without a bound, an evaluation would hold
  all the batches of its split.

Copies between host and devices use the pool too, but wait for nothing. A few at a time, as
`train/data/batches.py` makes them, only delay a program. An endless stream of them starves it.
"""

import collections
from typing import Any

import jax
from jax.sharding import Mesh

from transformer.hardware import Hardware

MAX_PROGRAMS_IN_FLIGHT = 8
"""Programs that may be unfinished when a dispatch returns, where nothing else limits them: enough
to keep a device busy while the host is held up, and few enough batches to keep in its memory."""


def max_programs_in_flight(hardware: Hardware, mesh: Mesh) -> int:
    """Return how many programs over a mesh may be unfinished when a dispatch returns.

    None on several CPU devices. Fewer than 32 would avoid the deadlock described above, but other
    programs count too (those of samples, say), and a CPU computes no faster for having more than
    one: its cores are shared by all of them.
    """
    return 0 if hardware.platform == "cpu" and mesh.size > 1 else MAX_PROGRAMS_IN_FLIGHT


class DispatchLimit:
    """Waits for the oldest program when more than `ahead` are in flight."""

    def __init__(self, max_in_flight: int):
        self._ahead = max_in_flight
        self._in_flight: collections.deque[Any] = collections.deque()

    def add(self, outputs: Any) -> None:
        """Note that a program was dispatched, and wait until at most `ahead` are unfinished.

        Args:
          outputs: Arrays of the program that no later program is given to overwrite (donated): all
            outputs of a program become ready together.
        """
        self._in_flight.append(outputs)
        while len(self._in_flight) > self._ahead:
            jax.block_until_ready(self._in_flight.popleft())
