"""What is trained: for each task its loss and its metrics."""
