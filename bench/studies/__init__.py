"""Studies: many runs with several seeds, which go on where they stopped."""

from bench.entries import Entry

ENTRIES: tuple[Entry, ...] = ()
