"""Error of a folder that cannot be read, or a model that cannot be written."""


class InteropError(ValueError):
    """Problem with a Hugging Face folder or model: the thing, the problem, the remedy, one line."""
