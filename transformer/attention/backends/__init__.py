"""Implementations of `attend`, with equal results."""
