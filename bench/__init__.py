"""Measurements side by side with other libraries, runnable by anyone."""
