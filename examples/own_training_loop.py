"""Train a model in your own training loop: a model, a loss, an optimizer of Optax, and `jax.jit`.

    python examples/own_training_loop.py

The task: copy a word of random letters after a separator. The loss of the copied half falls to 0.
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

LETTERS, WORD, BATCH = 8, 5, 64
SEPARATOR = LETTERS

block = BlockConfig(
    mixer=AttentionConfig(num_heads=4, position=RoPE()),
    feed_forward=FeedForwardConfig(d_ff=128),
    residual_dropout=0.05,
)
model = LanguageModel(
    TransformerConfig(vocab_size=LETTERS + 1, d_model=64, num_layers=2, layer_pattern=(block,))
)


def make_batch(rng):
    """Return sequences [B, 2 W + 1]: a word, the separator, the word again."""
    words = jax.random.randint(rng, (BATCH, WORD), 0, LETTERS)
    return jnp.concatenate([words, jnp.full((BATCH, 1), SEPARATOR), words], axis=1)


def loss_fn(params, tokens, dropout_rngs=None):
    """Return the mean cross-entropy of the second word."""
    logits = model.apply({"params": params}, tokens[:, :-1], dropout_rngs=dropout_rngs).logits
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses[:, WORD:].mean()


def train(steps=300, seed=0):
    """Return the trained parameters and the losses."""
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps))

    @jax.jit
    def train_step(params, opt_state, rng):
        batch_rng, dropout_rng = jax.random.split(rng)
        # One random key for each example: dropout does not depend on how a batch is split.
        dropout_rngs = jax.random.split(dropout_rng, BATCH)
        loss, grads = jax.value_and_grad(loss_fn)(params, make_batch(batch_rng), dropout_rngs)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    rng, init_rng = jax.random.split(jax.random.key(seed))
    params = model.init_params(init_rng)
    opt_state, losses = optimizer.init(params), []
    for step in range(steps):
        params, opt_state, loss = train_step(params, opt_state, jax.random.fold_in(rng, step))
        losses.append(float(loss))
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d}  loss {losses[-1]:.4f}")
    return params, losses


if __name__ == "__main__":
    params, _ = train()
    print(f"held-out loss {loss_fn(params, make_batch(jax.random.key(1))):.4f}")
