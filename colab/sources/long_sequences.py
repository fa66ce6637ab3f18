# %% title [markdown]
# # Long sequences: the attention family side by side
#
# Full attention compares every token with every other: its time grows with the square of the length. This notebook shows what each efficient variant leaves out, measures how time and memory grow, and trains some of them on a task that needs a distant token. Nothing is downloaded; it takes a few minutes on a CPU.

# %% setup [markdown]
# Installation

# %% settings tags=["parameters"]
LENGTHS = (256, 512, 1024)  # of the timing
COPY_LENGTH = 32  # tokens of the task
COPY_STEPS = 600

# %% family-text [markdown]
# ## 1. The family
#
# | kind | a query sees | paper |
# | --- | --- | --- |
# | `full` | every key that the mask shows | Vaswani et al. 2017 |
# | `sliding_window` | the last keys | Beltagy et al. 2020 |
# | `longformer` | a window, and global tokens | Beltagy et al. 2020 |
# | `bigbird` | a window, global and random blocks | Zaheer et al. 2020 |
# | `sparse` | a local part, and tokens at a stride | Child et al. 2019 |
# | `routing` | the keys of its k-means cluster | Roy et al. 2021 |
# | `reformer` | the keys with the same hash | Kitaev et al. 2020 |
# | `top_k` | the k keys with the highest scores | Gupta et al. 2021 |
# | `performer` | all, through random features of the softmax | Choromanski et al. 2021 |
# | `linear` | all, through the feature map elu + 1 | Katharopoulos et al. 2020 |
#
# All are settings of the same model: replace one config by another.

# %% family
from transformer import (
    AttentionConfig,
    BigBirdConfig,
    LinearAttentionConfig,
    LongformerConfig,
    PerformerConfig,
    ReformerConfig,
    RoPE,
    RoutingAttentionConfig,
    SlidingWindowConfig,
    SparseTransformerConfig,
    TopKConfig,
)

HEADS = dict(num_heads=4, position=RoPE())
FAMILY = {
    "full": AttentionConfig(**HEADS),
    "sliding_window": SlidingWindowConfig(**HEADS, window=32),
    "longformer": LongformerConfig(**HEADS, one_sided_window=16),
    "bigbird": BigBirdConfig(**HEADS, block_size=8, num_random_blocks=2),
    "sparse": SparseTransformerConfig(**HEADS, stride=10),
    "routing": RoutingAttentionConfig(**HEADS, num_clusters=6, window=16),
    "reformer": ReformerConfig(**HEADS, num_buckets=8, window=16),
    "top_k": TopKConfig(**HEADS, keys_per_query=8),
    "performer": PerformerConfig(**HEADS),
    "linear": LinearAttentionConfig(**HEADS),
}

# %% pattern-text [markdown]
# ## 2. Which keys change a query's result
#
# One way to see a pattern without reading code: change one token and look which outputs change. Rows are queries, columns the token that was changed. In the causal models below the upper triangle stays white. A title has the share of earlier tokens that change a result. Routing, Reformer and top-k choose keys by content, each head its own, so a token can also change a result by changing what is chosen. Performer and linear attention mix all earlier tokens.

# %% pattern
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from transformer import BlockConfig, LanguageModel, TransformerConfig


def make_model(mixer, vocab_size=32, num_layers=1):
    block = BlockConfig(mixer=mixer)
    config = TransformerConfig(vocab_size, 64, num_layers, layer_pattern=(block,))
    return LanguageModel(config)


def dependencies(mixer, length=96):
    """Return which outputs [T] change with which input tokens [T], as booleans."""
    model = make_model(mixer)
    params = model.init_params(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (length,), 0, 31)
    changed = jnp.where(jnp.eye(length, dtype=bool), tokens + 1, tokens)
    apply = jax.jit(lambda rows: model.apply({"params": params}, rows).hidden)
    original = apply(jnp.broadcast_to(tokens, changed.shape))  # as large, for the same rounding
    difference = jnp.abs(apply(changed) - original).max(axis=-1)  # [changed token, T]
    return np.asarray(difference.T > 1e-5)


figure, axes = plt.subplots(2, 5, figsize=(13, 5.6), layout="constrained")
for axis, (name, mixer) in zip(axes.flat, FAMILY.items(), strict=True):
    seen = dependencies(mixer)
    assert not np.triu(seen, 1).any(), f"{name} sees the future"
    axis.imshow(seen, cmap="Blues", vmin=0, vmax=1.4)
    axis.set(title=f"{name}: {seen.sum() / np.tril(seen | True).sum():.0%}", xticks=[], yticks=[])
plt.show()

# %% time-text [markdown]
# ## 3. How time and memory grow
#
# Time of a forward pass, and the memory that the compiled program needs beside its arguments and results. Full attention uses the `reference` backend here, which follows the formula, and `auto`, which computes long rows in tiles. Times on a shared machine vary: compare the slopes.

# %% time
import time

TIMED = {
    "full, as in the formula": AttentionConfig(**HEADS, backend="reference"),
    "full, auto": FAMILY["full"],
    **{name: FAMILY[name] for name in ("sliding_window", "bigbird", "performer", "linear")},
}


def measure(mixer, length):
    """Return seconds of a forward pass and MiB of temporary memory."""
    model = make_model(mixer)
    params = model.init_params(jax.random.key(0))
    tokens = jnp.zeros((1, length), jnp.int32)
    forward = jax.jit(lambda p, t: model.apply({"params": p}, t).hidden.sum())
    compiled = forward.lower(params, tokens).compile()
    jax.block_until_ready(compiled(params, tokens))
    durations = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(compiled(params, tokens))
        durations.append(time.perf_counter() - start)
    return min(durations), compiled.memory_analysis().temp_size_in_bytes / 2**20


figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), layout="constrained")
growth = {}
for name, mixer in TIMED.items():
    seconds, memory = np.array([measure(mixer, length) for length in LENGTHS]).T
    left.loglog(LENGTHS, seconds, "o-", label=name)
    right.loglog(LENGTHS, memory, "o-", label=name)
    growth[name] = np.log(memory[-1] / memory[0]) / np.log(LENGTHS[-1] / LENGTHS[0])
left.set(xlabel="tokens", ylabel="seconds", title="time of a forward pass")
right.set(xlabel="tokens", ylabel="MiB", title="temporary memory")
for axis in (left, right):
    axis.set_xticks(LENGTHS, LENGTHS)
    axis.minorticks_off()
right.legend()
plt.show()
for name, exponent in growth.items():
    print(f"{name:24} memory grows like T^{exponent:.1f}")
assert growth["full, as in the formula"] > 1.5 > growth["linear"]

# %% copy-text [markdown]
# ## 4. A task that needs a distant token
#
# The model reads random tokens, then the same tokens again, and is asked to predict the second half. It must look up what followed the same token half a sequence earlier. A window that is shorter than the distance cannot see it: here two layers with a window of 8 reach 14 tokens back, one too few. Linear attention sees all of it, through a state of fixed size.

# %% copy
import optax

HALF = COPY_LENGTH // 2
CONTENDERS = {
    "full": FAMILY["full"],
    "window of 8": SlidingWindowConfig(**HEADS, window=8),
    "window of 32": SlidingWindowConfig(**HEADS, window=32),
    "linear": FAMILY["linear"],
}


def make_batch(rng, batch_size=64):
    """Return random tokens, repeated once: [B, COPY_LENGTH]."""
    half = jax.random.randint(rng, (batch_size, HALF), 0, 24)
    return jnp.concatenate([half, half], axis=1)


def train_to_copy(mixer):
    """Return the accuracy of the second half on new examples."""
    block = BlockConfig(mixer=mixer, feed_forward=None)
    model = LanguageModel(TransformerConfig(24, 64, 2, layer_pattern=(block,)))
    optimizer = optax.adam(3e-3)

    @jax.jit
    def update(params, state, rng):
        tokens = make_batch(rng)

        def loss_fn(params):
            logits = model.apply({"params": params}, tokens).logits[:, HALF:-1]
            targets = tokens[:, HALF + 1 :]
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        updates, state = optimizer.update(jax.grad(loss_fn)(params), state)
        return optax.apply_updates(params, updates), state

    params = model.init_params(jax.random.key(0))
    state = optimizer.init(params)
    for step in range(COPY_STEPS):
        params, state = update(params, state, jax.random.key(step))
    tokens = make_batch(jax.random.key(10**6), 256)
    answers = jax.jit(model.apply)({"params": params}, tokens).logits[:, HALF:-1].argmax(-1)
    return float((answers == tokens[:, HALF + 1 :]).mean())


accuracy = {name: train_to_copy(mixer) for name, mixer in CONTENDERS.items()}
for name, correct in accuracy.items():
    print(f"{name:14} {correct:.0%} correct (guessing: {1 / 24:.0%})")
assert accuracy["full"] > 0.9
assert accuracy["window of 8"] < 0.3

# %% next [markdown]
# ## Next steps
#
# - `docs/attention.md` has the whole table: causal, cached, documents, cost, file; and times up to 65,536 tokens.
# - `python -m train fit listops:performer` trains any of them on a task of the Long Range Arena.
# - [`own_attention.ipynb`](own_attention.ipynb): add a variant of your own.
