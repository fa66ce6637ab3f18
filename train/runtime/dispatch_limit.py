"""Limit of the programs in flight: how far the host runs ahead of the devices.

JAX dispatches asynchronously: a call returns before its program has run, and the host prepares the
next one meanwhile. Two things bound how many programs may be in flight:

- A deadlock on CPU. XLA's CPU client runs the programs of all its devices on one thread pool, with
  one thread for each device (or core, if there are more). A program over several devices needs a
  thread for each of them at the same time, since its collectives block a thread until all devices
  have arrived. A device accepts 32 programs. Dispatching one more blocks a thread of that same pool
  for each device until a program ends; the next program then lacks threads and never ends. The
  process hangs, or XLA aborts it after 40 seconds ("Termination timeout for all reduce").
- Memory. Programs in flight keep their inputs on the device: without a bound, an evaluation would
  hold all batches of its split.

Copies between host and devices use the pool too, but wait for nothing. A few at a time, as
`train/data/batches.py` prefetches them, only delay a program. An endless stream would starve it.
"""

import collections
from typing import Any

import jax
from jax.sharding import Mesh

from transformer.hardware import Hardware

MAX_PROGRAMS_IN_FLIGHT = 8
"""Unfinished programs allowed when a dispatch returns, where nothing else limits them: enough to
keep a device busy while the host is held up, few enough to keep their batches in device memory."""


def max_programs_in_flight(hardware: Hardware, mesh: Mesh) -> int:
    """Return how many programs over a mesh may be unfinished when a dispatch returns.

    0 on several CPU devices. Fewer than 32 would avoid the deadlock described above, but other
    programs (those of samples, for example) count too, and a CPU computes no faster with more than
    one in flight: all of them share its cores.
    """
    is_multi_cpu = hardware.platform == "cpu" and mesh.size > 1
    return 0 if is_multi_cpu else MAX_PROGRAMS_IN_FLIGHT


class DispatchLimit:
    """Queue of dispatched programs that waits for the oldest when it is full."""

    def __init__(self, max_in_flight: int):
        self._max_in_flight = max_in_flight
        self._in_flight: collections.deque[Any] = collections.deque()

    def add(self, outputs: Any) -> None:
        """Register a dispatched program, and wait until at most `max_in_flight` are unfinished.

        Args:
          outputs: Arrays of the program that no later program takes as donated inputs. Any will do:
            all outputs of a program become ready together.
        """
        self._in_flight.append(outputs)
        while len(self._in_flight) > self._max_in_flight:
            jax.block_until_ready(self._in_flight.popleft())
