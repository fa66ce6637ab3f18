"""Experiment configs: registry, reading and writing, resolution of `auto`."""
