"""Evaluation: evaluator, metrics, averaged weights, early stopping."""
