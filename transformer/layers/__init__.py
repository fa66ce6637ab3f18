"""Layers: parameters, embedding, norms, feed-forward, mixture of experts, block, stack."""
