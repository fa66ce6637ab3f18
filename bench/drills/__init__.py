"""Fault-injection drills, run by `make drills`: longer and harsher than the tests."""
