"""Build a deeper model on a trained one: load its weights, freeze them, train the layers on top.

    python examples/freeze_and_load.py

Layers are stacked along the first axis of each weight, so a deeper model has longer weights.
"""

import jax
import jax.numpy as jnp
import optax
from flax import serialization

from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LanguageModel,
    RoPE,
    TransformerConfig,
)

block = BlockConfig(
    mixer=AttentionConfig(num_heads=2, position=RoPE()), feed_forward=FeedForwardConfig(d_ff=64)
)


def make_model(num_layers):
    """Return a model of this depth."""
    config = TransformerConfig(17, d_model=32, num_layers=num_layers, layer_pattern=(block,))
    return LanguageModel(config)


def load_matching(new, old):
    """Return `new` with the values of `old`, and a tree of booleans: which entries were loaded."""
    values = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(old)}
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path), new)
    merged = jax.tree.map(lambda name, x: x.at[: len(values[name])].set(values[name]), names, new)
    loaded = jax.tree.map(
        lambda name, x: jnp.zeros(x.shape, bool).at[: len(values[name])].set(True), names, new
    )
    return merged, loaded


def train(model, params, trainable, steps=60):
    """Train the entries that are True in `trainable`. The others do not change."""
    optimizer = optax.adam(5e-3)
    tokens = (jnp.arange(12) * jnp.arange(1, 9)[:, None]) % 17  # multiples of 1 to 8

    @jax.jit
    def step(params, opt_state):
        def loss_fn(params):
            logits = model.apply({"params": params}, tokens[:, :-1]).logits
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        # `optax.masked` freezes entire weights; here, some layers of a stacked weight are frozen.
        updates = jax.tree.map(lambda u, t: jnp.where(t, u, 0), updates, trainable)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = optimizer.init(params)
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state)
    print(f"{model.config.num_layers} layers: loss {loss:.4f}")
    return params


def main():
    """Train two layers, then freeze them and train two more on top of them."""
    small, large = make_model(2), make_model(4)
    params = small.init_params(jax.random.key(0))
    params = train(small, params, jax.tree.map(lambda x: jnp.ones(x.shape, bool), params))
    old = serialization.msgpack_restore(serialization.to_bytes(params))  # as read from a file
    merged, loaded = jax.jit(load_matching)(large.init_params(jax.random.key(1)), old)
    return merged, loaded, train(large, merged, jax.tree.map(jnp.logical_not, loaded))


if __name__ == "__main__":
    main()
