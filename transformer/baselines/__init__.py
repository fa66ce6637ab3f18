"""The models that transformers replaced, as mixers."""
