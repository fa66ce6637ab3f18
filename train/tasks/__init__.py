"""Tasks: what a run learns, one module a task, and their registry."""
