"""Text generation: sampling, beam search and translation."""
