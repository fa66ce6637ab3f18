"""Scaling laws: sweeps over model size and data, and the fits to their results."""
