"""Shipped experiments. Each file holds a dict `EXPERIMENTS` by name; the first is its default."""
