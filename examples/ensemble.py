"""Train an ensemble at once with `jax.vmap`: M models with stacked parameters, one program.

    python examples/ensemble.py

Each member learns the same sequences from another seed.
"""

import jax
import jax.numpy as jnp
import optax

from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    LanguageModel,
    RoPE,
    TransformerConfig,
)

MEMBERS, VOCAB, LENGTH = 4, 17, 12
block = BlockConfig(
    mixer=AttentionConfig(num_heads=2, position=RoPE()), feed_forward=FeedForwardConfig(d_ff=64)
)
config = TransformerConfig(vocab_size=VOCAB, d_model=32, num_layers=2, layer_pattern=(block,))
model = LanguageModel(config)
optimizer = optax.adam(5e-3)


def make_batch(rng, batch_size=16):
    """Return arithmetic sequences modulo VOCAB, [B, LENGTH]: a start and a step from 1 to 4."""
    starts, steps = jax.random.randint(rng, (2, batch_size, 1), 0, VOCAB)
    return (starts + (1 + steps % 4) * jnp.arange(LENGTH)) % VOCAB


def log_probabilities(params, tokens):
    """Return log probabilities of the next tokens, [B, T, V]."""
    return jax.nn.log_softmax(model.apply({"params": params}, tokens).logits[..., :VOCAB])


def loss_fn(params, tokens):
    """Return the mean cross-entropy from the third token on: the first two determine the rest."""
    predicted, targets = log_probabilities(params, tokens[:, :-1])[:, 1:], tokens[:, 2:]
    return -jnp.take_along_axis(predicted, targets[..., None], axis=-1).mean()


@jax.jit
@jax.vmap
def init(rng):
    """Return the parameters and the optimizer state of each member, stacked: [M, ...]."""
    params = model.init_params(rng)
    return params, optimizer.init(params)


@jax.jit
def train_step(params, opt_state, tokens):
    """Return parameters and optimizer states after a step on the same tokens, and losses [M]."""

    def update(params, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.vmap(update)(params, opt_state)


def train(steps=150):
    """Return the stacked parameters and the last losses of the members."""
    params, opt_state = init(jax.random.split(jax.random.key(0), MEMBERS))
    for step in range(steps):
        tokens = make_batch(jax.random.key(step + 1))
        params, opt_state, losses = train_step(params, opt_state, tokens)
    return params, losses


if __name__ == "__main__":
    params, losses = train()
    members = jax.vmap(log_probabilities, (0, None))(params, make_batch(jax.random.key(0)))
    print(f"losses {losses}, spread of probabilities {jnp.exp(members).std(axis=0).mean():.5f}")
