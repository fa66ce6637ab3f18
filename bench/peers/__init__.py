"""The contenders: each runs in a process, and if need be in an environment, of its own."""
