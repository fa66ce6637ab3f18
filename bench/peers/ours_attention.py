"""Contender ours: causal softmax attention alone, forward and backward."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.peers.jax_memory import bytes_in_use, peak_bytes
from bench.protocol import Work, serve
from train.runtime.local_hardware import local_hardware
from train.runtime.startup import restart_with_huge_pages
from transformer import Mask, MaskPattern
from transformer.attention.attend import attend
from transformer.attention.reference import ScoreSpec


def build(settings: dict[str, Any]) -> Work:
    """Compile `attend` with the requested backend; a step ends with the three gradients."""
    width = settings["head_dim"]
    shape = (4, settings["batch"], settings["length"], settings["num_heads"], width)
    drawn = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    q, k, v, cotangent = (jnp.asarray(each, settings["precision"]) for each in drawn)
    mask = Mask(MaskPattern(causal=True, window=settings["window"]))
    if settings["segments"]:
        length, count = settings["length"], settings["segments"]
        ids = 1 + jnp.arange(length, dtype=jnp.int32) * count // length
        mask = mask.replace(segments=jnp.broadcast_to(ids, (settings["batch"], length)))
    score_spec = ScoreSpec(1 / math.sqrt(width))
    kwargs: Any = dict(backend=settings["backend"], hardware=local_hardware())

    def step(q: jax.Array, k: jax.Array, v: jax.Array, mask: Mask) -> Any:
        run_attend = lambda q, k, v: attend(q, k, v, mask, score_spec, **kwargs).y  # noqa: E731
        _, vjp_fn = jax.vjp(run_attend, q, k, v)
        return vjp_fn(cotangent)

    program = jax.jit(step).lower(q, k, v, mask).compile()
    before = bytes_in_use()

    def run(steps: int) -> float:
        for _ in range(steps - 1):
            program(q, k, v, mask)
        gradients = program(q, k, v, mask)
        return float(sum(jnp.abs(each.astype(jnp.float32)).mean() for each in gradients))

    versions = {"jax": jax.__version__}
    return Work(run, versions, {}, lambda: peak_bytes() - before)


if __name__ == "__main__":
    restart_with_huge_pages()  # as `python -m train` does
    serve(build)
