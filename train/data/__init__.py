"""Data: text and examples in, batches of tokens out."""
