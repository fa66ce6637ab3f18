"""Drills: faults on purpose, and comparisons with other libraries case by case."""

from bench.entries import Entry

ENTRIES: tuple[Entry, ...] = ()
