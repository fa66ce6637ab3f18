"""Folder of a run: its files, the lock on it, and safe reading and writing."""
