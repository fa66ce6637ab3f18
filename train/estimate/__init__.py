"""Estimates of memory, time and cost of training: what `describe` and `plan` compute."""
