"""Weight-free attention over a few keys per query, without scoring all pairs."""
