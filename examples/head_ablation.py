"""Find the heads that a model needs: ablate one at a time, and decode the intermediate layers.

    python examples/head_ablation.py

The model learns to continue sequences whose second half repeats the first. It needs a head that
looks up what followed the same token before (an induction head, Olsson et al. 2022).
"""

import jax
import jax.numpy as jnp
import optax

from transformer import AttentionConfig, BlockConfig, LanguageModel, RoPE, TransformerConfig
from transformer.inspection import layer_values, logit_lens, zero_heads

VOCAB, LENGTH, LAYERS, HEADS = 24, 32, 2, 4
block = BlockConfig(mixer=AttentionConfig(num_heads=HEADS, position=RoPE()), feed_forward=None)
config = TransformerConfig(VOCAB, d_model=64, num_layers=LAYERS, layer_pattern=(block,))
model, optimizer = LanguageModel(config), optax.adam(3e-3)


def make_batch(rng, batch_size=64):
    """Return random tokens, repeated once: [B, LENGTH]."""
    half = jax.random.randint(rng, (batch_size, LENGTH // 2), 0, VOCAB)
    return jnp.concatenate([half, half], axis=1)


def second_half_loss(logits, tokens):
    """Return the mean cross-entropy of the repeated tokens, in nats."""
    predicted, targets = logits[:, LENGTH // 2 : -1], tokens[:, LENGTH // 2 + 1 :]
    return optax.softmax_cross_entropy_with_integer_labels(predicted, targets).mean()


def train(steps=600):
    """Return trained parameters."""

    @jax.jit
    def update(params, state, rng):
        tokens = make_batch(rng)

        def loss_fn(params):
            return second_half_loss(model.apply({"params": params}, tokens).logits, tokens)

        updates, state = optimizer.update(jax.grad(loss_fn)(params), state)
        return optax.apply_updates(params, updates), state

    params = model.init_params(jax.random.key(0))
    state = optimizer.init(params)
    for step in range(steps):
        params, state = update(params, state, jax.random.key(step))
    return params


def ablate(params, tokens):
    """Return the loss after removing each head, [LAYERS][HEADS]."""

    @jax.jit
    def loss_without(layer, head):
        edits = {"head_outputs": zero_heads(layer, head)}
        return second_half_loss(model.apply({"params": params}, tokens, edits=edits).logits, tokens)

    return [[float(loss_without(i, n)) for n in range(HEADS)] for i in range(LAYERS)]


def read_layers(params, tokens):
    """Return the loss of predictions from the residual stream after each layer."""
    output = model.apply({"params": params}, tokens, outputs={"residual_post"})
    lens = logit_lens(model, params, layer_values(output, "residual_post"))
    return [float(second_half_loss(logits, tokens)) for logits in lens]


if __name__ == "__main__":
    params, tokens = train(), make_batch(jax.random.key(10**6))
    print("loss after each layer:", [f"{loss:.3f}" for loss in read_layers(params, tokens)])
    for layer, losses in enumerate(ablate(params, tokens)):
        print(f"layer {layer} without head 0, 1, ...:", [f"{loss:.3f}" for loss in losses])
