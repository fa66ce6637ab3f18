"""Experiments as data. Each file holds `EXPERIMENTS`, by name; the first is the file's own."""
