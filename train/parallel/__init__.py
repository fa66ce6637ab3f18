"""Meshes, shardings, placement of batches, and coordination of several processes."""
