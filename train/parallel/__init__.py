"""Parallelism: meshes, sharding, batches of a mesh, several hosts."""
