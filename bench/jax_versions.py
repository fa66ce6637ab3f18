"""Differences between the supported versions of JAX (0.7 to 0.12), each with its reason.

All other code works the same way with every version.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.extend import core

JAX_VERSION = tuple(int(part) for part in jax.__version__.split(".")[:2])


# jaxlib 0.7.2 cannot (and 0.10.2 can) compile a program for CPUs whose results lie in
# `pinned_host` memory ("No registered implementation for untyped custom call to
# annotate_device_placement").
CPU_HAS_PINNED_HOST = JAX_VERSION >= (0, 10)


# jaxlib 0.7.2 cannot (and 0.10.2 can) run some products of bfloat16 with float32 sums on CPUs
# ("DotThunk::Execute: BF16 x BF16 = F32"), such as those of a whole training step.
CPU_TRAINS_IN_BFLOAT16 = JAX_VERSION >= (0, 10)


def jaxprs_in_params(params: Mapping[str, Any]) -> Iterator[core.Jaxpr]:
    """Yield the programs within an equation's parameters, such as the body of a scan.

    `jax.extend.core` has a function of this name in jax 0.10, and not in 0.7.
    """
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, core.ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, core.Jaxpr):
                yield each
