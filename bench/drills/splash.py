"""Compile the TPU's attention kernel with the TPU's own compiler, on a machine without a TPU.

    pip install libtpu && python -m bench splash

Forward and backward, in bfloat16. Prints the memory that the kernel needs besides arguments and
results, and the memory of attention that materializes all scores.
"""

import functools
import os

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer import Mask, MaskPattern
from transformer.attention.backends.splash import attend_splash
from transformer.attention.reference import ScoreSpec, attend_reference

TOPOLOGY = "v5e:2x2"
LENGTH, HEADS, WIDTH = 4096, 8, 128


def drill() -> None:
    """Compile one chip's program for [1, T, N, H]; print the memory of both."""
    described = topologies.get_topology_desc(topology_name=TOPOLOGY, platform="tpu")
    mesh = Mesh(np.array(described.devices[:1]), ("one",))
    place = NamedSharding(mesh, PartitionSpec())
    array = jax.ShapeDtypeStruct((1, LENGTH, HEADS, WIDTH), jnp.bfloat16, sharding=place)
    documents = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32, sharding=place)
    for name, attend in (("splash", attend_splash), ("all scores", _reference)):
        for window in (0, 512):
            total = functools.partial(_total, attend, MaskPattern(causal=True, window=window))
            step = jax.jit(jax.grad(total, (0, 1, 2)))
            memory: Any = step.lower(array, array, array, documents).compile().memory_analysis()
            mib = memory.temp_size_in_bytes / 2**20
            print(f"{TOPOLOGY} T {LENGTH} window {window}: {name} needs {mib:,.1f} MiB")


def _total(attend: Any, pattern: MaskPattern, q: Any, k: Any, v: Any, ids: Any) -> Any:
    y = attend(q, k, v, Mask(pattern, segments=ids), ScoreSpec(0.1))
    return y.astype(jnp.float32).sum()


def _reference(*given: Any) -> Any:
    return attend_reference(*given)[0]
