"""Layers: weights, linear maps, norms, embeddings, feed-forwards and experts."""
