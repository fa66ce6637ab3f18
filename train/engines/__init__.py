"""The training step compiled for a set of devices, and the placement of its arrays."""
