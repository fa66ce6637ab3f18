"""Contender ours: causal softmax attention alone, forward and backward."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.protocol import Work, peak_resident_bytes, resident_bytes, serve
from train.runtime.local_hardware import local_hardware
from train.runtime.startup import restart_with_huge_pages
from transformer import Mask, MaskPattern
from transformer.attention.attend import ScoreSpec, attend


def build(settings: dict[str, Any]) -> Work:
    """Compile `attend` with the requested backend; a step ends with the three gradients."""
    width = settings["head_dim"]
    shape = (4, 1, settings["length"], settings["num_heads"], width)
    drawn = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    q, k, v, cotangent = (jnp.asarray(each) for each in drawn)
    mask, score_spec = Mask(MaskPattern(causal=True)), ScoreSpec(1 / math.sqrt(width))
    kwargs: Any = dict(backend=settings["backend"], hardware=local_hardware())

    def run_attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(q, k, v, mask, score_spec, **kwargs).y

    def step(*heads: jax.Array) -> Any:
        _, vjp_fn = jax.vjp(run_attend, *heads)
        return vjp_fn(cotangent)

    program = jax.jit(step).lower(q, k, v).compile()
    before = resident_bytes()

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            jax.block_until_ready(program(q, k, v))
        gradients = program(q, k, v)
        return float(sum(jnp.abs(each).mean() for each in gradients))

    versions = {"jax": jax.__version__}
    return Work(run, versions, {}, lambda: peak_resident_bytes() - before)


if __name__ == "__main__":
    restart_with_huge_pages()  # as `python -m train` does
    serve(build)
