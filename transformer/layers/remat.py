"""Rematerialization: which values a layer saves for the backward pass, to recompute the others.

Chen et al. 2016. Memory of the saved values against time for computing the others twice
(docs/performance.md has measured both).
"""

from collections.abc import Callable
from typing import Any

import jax

from transformer.config import RematPolicy
from transformer.hardware import Hardware

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
    "offload": jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host"),
}
"""Values that each layer saves for the backward pass. `dots`: outputs of matmuls with weights (no
batch dimensions; attention's scores, the largest arrays of a layer, have them). `full`: only the
layer's input. `offload`: like `dots`, saved in host memory."""


def rematerialize(
    layer: Callable[..., Any], remat: RematPolicy, hardware: Hardware, *, scanned: bool
) -> Callable[..., Any]:
    """Return the function of a layer with a policy of `REMAT_POLICIES`.

    Args:
      layer: A function of the layer's weights and input.
      remat: The policy, not `none`.
      hardware: Decides whether there is a memory to offload to.
      scanned: True inside a scan over layers.

    Raises:
      ValueError: Saved values cannot be offloaded on this hardware.
    """
    if remat == "offload" and hardware.platform == "cpu":
        raise ValueError(
            "model.remat offload: a CPU computes in the host's memory already; set it to dots"
        )
    # Inside a scan the compiler cannot merge recomputed values with saved ones, and the barriers of
    # `prevent_cse` would only cost time.
    return jax.checkpoint(layer, policy=REMAT_POLICIES[remat], prevent_cse=not scanned)
