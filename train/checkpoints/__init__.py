"""The checkpoints of a run, by Orbax: saved in the background, verified, restored exactly.

A checkpoint is a folder named by its step. It counts once it has a manifest of all its files, which
is written when they are (`manifest`, `sealing`); nothing is restored that does not agree with it.
"""

from train.checkpoints.checkpoints import Checkpoints
from train.checkpoints.restoring import Restored
from train.checkpoints.searching import Found, PassedOver
from train.checkpoints.words import none_good

__all__ = ["Checkpoints", "Found", "PassedOver", "Restored", "none_good"]
