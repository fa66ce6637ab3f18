"""Evaluate a run: held-out metrics, samples, the best checkpoint and early stopping."""
