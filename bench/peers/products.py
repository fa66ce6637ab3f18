"""Contender products: the products with weights of a training step, and nothing else.

Their time is the floor of the step on this machine with XLA's matrix products. The program is the
gradient of a network without norms, attention and activations, with the matrices of GPT-2.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bench.peers.jax_memory import peak_bytes
from bench.protocol import Work, serve

Layer = dict[str, jax.Array]


def build(settings: dict[str, Any]) -> Work:
    """Draw the matrices; a step is one gradient of the network with respect to all of them."""
    width, layers = settings["width"], settings["layers"]
    tokens = settings["batch"] * settings["context"]
    dtype = jnp.dtype(settings["precision"])
    keys = iter(jax.random.split(jax.random.key(0), 9 * layers + 2))

    def matrix(*shape: int) -> jax.Array:
        return (jax.random.normal(next(keys), shape) * shape[0] ** -0.5).astype(dtype)

    x, table = matrix(tokens, width), matrix(width, settings["vocabulary"])
    stack = [
        {name: matrix(width, width) for name in ("query", "key", "value", "output")}
        | {"up": matrix(width, 4 * width), "down": matrix(4 * width, width)}
        # Without them the gradients of the three projections would be one product.
        | {"key_gain": matrix(width), "value_gain": matrix(width)}
        for _ in range(layers)
    ]

    def loss(stack: list[Layer], table: jax.Array, x: jax.Array) -> jax.Array:
        for w in stack:
            mixed = x @ w["query"] + x @ w["key"] * w["key_gain"] + x @ w["value"] * w["value_gain"]
            x = mixed @ w["output"] @ w["up"] @ w["down"]
        return 0.5 * jnp.sum(jnp.square((x @ table).astype(jnp.float32)))

    # Of the input too: in a model it is the gradient of the layer before.
    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    def run(steps: int) -> None:
        for _ in range(steps):
            jax.block_until_ready(gradients(stack, table, x))

    return Work(run, {"jax": jax.__version__}, peak_memory=peak_bytes)


if __name__ == "__main__":
    serve(build)
