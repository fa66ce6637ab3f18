"""Detect loss spikes and non-finite updates at every step, skip them, and roll back if needed."""
