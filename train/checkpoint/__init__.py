"""Checkpoints of a run: saved in the background with Orbax, verified, restored bit for bit."""
