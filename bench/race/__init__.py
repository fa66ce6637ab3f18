"""Races against other implementations, and profiles of our own programs."""

from bench.entries import Entry

ENTRIES: tuple[Entry, ...] = ()
