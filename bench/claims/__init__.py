"""Small experiments behind the claims of docs/claims.md, and the figures of the documentation."""

from bench.entries import Entry

ENTRIES: tuple[Entry, ...] = ()
