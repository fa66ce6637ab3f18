"""Contenders: each runs in its own process and, if necessary, its own environment."""
