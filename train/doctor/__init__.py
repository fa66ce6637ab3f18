"""Checks of a machine's hardware, environment and package versions, for the `doctor` verb."""
