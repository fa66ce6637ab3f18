"""The kinds of feed-forward: a closed union."""

from transformer.feedforward import FeedForward, FeedForwardConfig
from transformer.mixture import Mixture, MixtureConfig

AnyFeedForward = FeedForwardConfig | MixtureConfig
"""The configuration of one of them."""


def feed_forward_type(config: AnyFeedForward) -> type[FeedForward] | type[Mixture]:
    """The module that a configuration is for.

    It is called `module(x, keys, real=..., want=...)` and returns a `FeedForwardOutput`.
    """
    return Mixture if isinstance(config, MixtureConfig) else FeedForward


def causal(config: AnyFeedForward) -> bool:
    """Whether what a token gets is independent of later ones: not so if they compete for places."""
    return not (isinstance(config, MixtureConfig) and config.capacity)
