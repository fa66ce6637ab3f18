"""Optimizers, learning-rate schedules and the dynamic loss scale."""
