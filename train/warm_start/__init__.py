"""Weights that a run starts with: of another run, an adapter, or word vectors."""
