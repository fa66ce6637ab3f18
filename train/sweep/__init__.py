"""Sweeps: a grid of settings and seeds, trained by a resumable queue, with a table and a figure."""
