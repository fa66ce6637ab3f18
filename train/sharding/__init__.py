"""Where arrays lie: one mesh, and one table from logical axes to its axes."""

from train.sharding.activations import constrain_to
from train.sharding.batches import check_batches, in_turn, place_batch, row_parts
from train.sharding.memory import check_memory, in_host_memory
from train.sharding.mesh import MeshConfig, make_mesh
from train.sharding.rules import RULES, partition, parts, replicated
from train.sharding.state import like_parameters, parameter_shardings

__all__ = [
    "RULES",
    "MeshConfig",
    "check_batches",
    "check_memory",
    "constrain_to",
    "in_host_memory",
    "in_turn",
    "like_parameters",
    "make_mesh",
    "parameter_shardings",
    "partition",
    "parts",
    "place_batch",
    "replicated",
    "row_parts",
]
