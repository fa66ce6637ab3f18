"""Hugging Face models, in and out: one declarative map for each family of architectures."""
