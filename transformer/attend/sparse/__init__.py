"""Softmax over a few keys of each query: ways of finding them without looking at all."""
