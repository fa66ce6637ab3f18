"""Studies: comparisons of many runs on a resumable queue, written to docs/results."""
