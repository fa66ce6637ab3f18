"""Serving: an HTTP API that answers with a run's model."""
