# %% title [markdown]
# # The transformer from the inside
#
# Every part of a transformer: its formula, its shapes, a picture, and the library's version of it. Each section writes the part in a few lines of `jax.numpy` and checks that the library computes the same. The last three sections train a small model, look at its layers, switch off its heads and decode with a cache.
#
# Nothing is downloaded. It takes about two minutes on a CPU. Letters: B examples, T query tokens, S key tokens, D model width, N heads, K key-value heads, H head width, V vocabulary.

# %% setup [markdown]
# Installation

# %% attention-text [markdown]
# ## 1. Attention is a weighted mean
#
# Each token asks a *query* $q$, offers a *key* $k$ and holds a *value* $v$. The output is the mean of the values, weighted by how well their keys match the query (Vaswani et al. 2017, equation 1):
#
# $$\mathrm{Attention}(Q, K, V) = \mathrm{softmax}\left(\frac{Q K^\top}{\sqrt{H}}\right) V$$

# %% attention
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from transformer import Hardware, Mask, MaskPattern
from transformer.attention.attend import attend
from transformer.attention.reference import ScoreSpec

B, T, N, H = 1, 8, 2, 16
q, k, v = jax.random.normal(jax.random.key(0), (3, B, T, N, H))


def softmax_attention(q, k, v, visible):
    """Return the output [B, T, N, H] and the weights [B, N, T, S]."""
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / H**0.5
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", weights, v), weights


everything = jnp.ones((T, T), bool)
ours, weights = softmax_attention(q, k, v, everything)
spec = ScoreSpec(scale=H**-0.5)
theirs = attend(q, k, v, Mask(), spec, hardware=Hardware(), outputs=frozenset({"weights"}))

np.testing.assert_allclose(ours, theirs.y, atol=1e-5)
np.testing.assert_allclose(weights, theirs.aux["weights"], atol=1e-5)
print("queries, keys, values", q.shape, "weights", weights.shape, "output", ours.shape)
print("each row of weights sums to", float(weights[0, 0, 0].sum()))

# %% scale-text [markdown]
# **Why divide by $\sqrt{H}$?** The dot product of two random vectors of H entries has variance H. Without the division the softmax of wide heads puts almost all weight on one key, and its gradient vanishes.

# %% scale
for width in (16, 256, 4096):
    a, b = jax.random.normal(jax.random.key(1), (2, 64, width))
    scores = a @ b.T
    unscaled, scaled = (
        float(jax.nn.softmax(each, axis=-1).max(axis=-1).mean())
        for each in (scores, scores / width**0.5)
    )
    print(f"H = {width:4}: mean largest weight {unscaled:.2f} unscaled, {scaled:.2f} scaled")
assert unscaled > 0.9
assert scaled < 0.3

# %% masks-text [markdown]
# ## 2. Masks are data
#
# A mask says which keys a query sees. A decoder sees only the past (causal). A window limits the distance. Packed documents do not see each other. A mask is a small description; kernels read it without building the $T \times S$ table that is drawn here.

# %% masks
from transformer.attention.masks import dense_mask

length = 16
segments = jnp.array([[1] * 9 + [2] * 7])
positions = jnp.array([[*range(9), *range(7)]])
masks = {
    "bidirectional (encoder)": Mask(),
    "causal (decoder)": Mask(MaskPattern(causal=True)),
    "causal, window of 4": Mask(MaskPattern(causal=True, window=4)),
    "causal, two documents": Mask(MaskPattern(causal=True), positions=positions, segments=segments),
    "prefix of 5, then causal": Mask(
        MaskPattern(causal=True, prefix=True), prefix_lengths=jnp.array([5])
    ),
}
figure, axes = plt.subplots(1, len(masks), figsize=(14, 3), layout="constrained")
for axis, (name, mask) in zip(axes, masks.items(), strict=True):
    axis.imshow(dense_mask(mask, length, length)[0], cmap="Blues", vmin=0, vmax=1.4)
    axis.set(title=name, xlabel="key", ylabel="query", xticks=[], yticks=[])
plt.show()

lower_triangle = np.tril(np.ones((length, length), bool))
assert (dense_mask(masks["causal (decoder)"], length, length)[0] == lower_triangle).all()

# %% heads-text [markdown]
# ## 3. Several heads, and heads that share keys
#
# N heads attend in parallel, each in its own H-wide projection of the tokens; a last projection mixes their outputs. The sizes of the four matrices do not depend on $N$ if $N H = D$. With *grouped* queries (Ainslie et al. 2023), $K < N$ heads of keys and values serve $N / K$ query heads each, and the cache of a decoder shrinks by $N / K$.

# %% heads
from transformer import AttentionConfig, BlockConfig, LanguageModel, RoPE, TransformerConfig


def make_model(num_layers=1, vocab_size=50, d_model=64, feed_forward=None, **attention):
    mixer = AttentionConfig(position=RoPE(), **attention)
    block = BlockConfig(mixer=mixer, feed_forward=feed_forward)
    config = TransformerConfig(vocab_size, d_model, num_layers, layer_pattern=(block,))
    return LanguageModel(config)


for kv_heads in (8, 2, 1):
    model = make_model(num_heads=8, num_kv_heads=kv_heads)
    params = model.init_params(jax.random.key(0))
    cache = jax.tree.leaves(jax.eval_shape(lambda m=model: m.init_cache(1, 1024)))
    numbers = sum(leaf.size for leaf in cache if jnp.issubdtype(leaf.dtype, jnp.floating))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{kv_heads} key-value heads: {count:,} parameters, {numbers:,} numbers for 1,024 tokens")
assert numbers == 2 * 1024 * 8  # keys and values, one head of width 8

# %% positions-text [markdown]
# ## 4. Positions
#
# Attention alone does not know the order of its keys. Four ways to tell it:
#
# - **Sinusoids** $\sin(t / 10000^{2i/D})$ and $\cos(t / 10000^{2i/D})$ are added to the embeddings (Vaswani et al. 2017).
# - **RoPE** rotates queries and keys by an angle proportional to their position (Su et al. 2021), so a score depends only on the distance: $(R_t q)^\top (R_s k) = q^\top R_{s-t} k$.
# - **ALiBi** subtracts $m_n \, |t - s|$ from the scores, with a slope $m_n$ for each head (Press et al. 2022).
# - **Learned** vectors, one for each position.

# %% positions
from transformer.attention.position_bias import alibi_bias
from transformer.attention.rope import apply_rope
from transformer.layers.position_embedding import sinusoidal_embedding

steps = jnp.arange(64)[None]
vector = jax.random.normal(jax.random.key(2), (1, 1, 1, 32))
rotated = apply_rope(jnp.broadcast_to(vector, (1, 64, 1, 32)), steps, RoPE())[0, :, 0]
similarity = rotated @ rotated.T  # of one vector with itself at 64 positions

figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
axes[0].imshow(sinusoidal_embedding(steps, 64)[0], cmap="RdBu", aspect="auto")
axes[0].set(title="sinusoids", xlabel="entry of the vector", ylabel="position")
axes[1].imshow(similarity, cmap="viridis")
axes[1].set(title="RoPE: score by position of query and key", xlabel="key", ylabel="query")
bias = alibi_bias(8, steps, steps)[0]
for head in range(8):
    axes[2].plot(bias[head, 63], label=f"head {head}")
axes[2].set(title="ALiBi: bias of the last query", xlabel="position of the key")
axes[2].legend(fontsize=7)
plt.show()

# The score of RoPE depends on the distance alone: every diagonal is constant.
spread = [float(np.ptp(np.diagonal(similarity, offset))) for offset in range(10)]
assert max(spread) < 1e-3, spread

# %% block-text [markdown]
# ## 5. Norm, feed-forward, residual stream
#
# A layer adds two things to the stream of vectors that runs through the model, each computed from a normalized copy of it (*pre-norm*):
#
# $$x \leftarrow x + \mathrm{Attention}(\mathrm{norm}(x)), \qquad x \leftarrow x + \mathrm{FeedForward}(\mathrm{norm}(x))$$
#
# LayerNorm subtracts the mean and divides by the standard deviation; RMSNorm only divides by the root mean square. SwiGLU multiplies two linear maps, one of them through $\mathrm{silu}(z) = z \, \sigma(z)$:
#
# $$\mathrm{LayerNorm}(x) = g \odot \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + b, \qquad \mathrm{SwiGLU}(x) = \left(\mathrm{silu}(x W_{\mathrm{gate}}) \odot x W_{\mathrm{up}}\right) W_{\mathrm{down}}$$

# %% block
from transformer import FeedForwardConfig
from transformer.inspection import layer_values

swiglu = FeedForwardConfig(activation="silu", gated=True, bias=False)
model = make_model(num_heads=4, feed_forward=swiglu)
params = model.init_params(jax.random.key(3))
tokens = jax.random.randint(jax.random.key(4), (2, 10), 0, 50)
names = ["residual_pre", "residual_mid", "residual_post", "mixer_output", "feed_forward_output"]
output = model.apply({"params": params}, tokens, outputs=set(names))
pre, mid, post, attended, fed = (layer_values(output, name)[0] for name in names)
np.testing.assert_allclose(mid, pre + attended, atol=1e-6)
np.testing.assert_allclose(post, mid + fed, atol=1e-6)


def layer_norm(x):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


normalized = layer_norm(100 * mid)[0, 0]
print(f"a token after LayerNorm: mean {normalized.mean():.4f}, variance {normalized.var():.4f}")
print("the stream of vectors", post.shape, "is the embedding plus what both sublayers added")

# %% model-text [markdown]
# ## 6. The whole model
#
# Tokens → embedding → layers → norm → one score per vocabulary entry (*logits*). The output matrix is the embedding itself if they are tied. Parameters are plain nested dictionaries; the first axis of a layer's arrays counts the layers.

# %% model
import flax

model = make_model(num_layers=3, num_heads=4, feed_forward=FeedForwardConfig())
params = model.init_params(jax.random.key(0))
for path, leaf in flax.traverse_util.flatten_dict(params, sep="/").items():
    print(f"{path:60} {leaf.shape}")
logits = model.apply({"params": params}, tokens).logits
print("\ntokens", tokens.shape, "-> logits", logits.shape)
assert logits.shape == (2, 10, 50)

# Causality: changing a later token changes no earlier prediction.
changed = model.apply({"params": params}, tokens.at[:, 7].add(1)).logits
same = np.isclose(logits, changed, atol=1e-6).all(axis=(0, 2))
print("unchanged predictions:", same)
assert same[:7].all()
assert not same[7:].any()

# %% train-text [markdown]
# ## 7. Train it to copy
#
# The model reads random tokens twice and learns to predict the second half. No token can be guessed from the ones just before it: the model has to look up what followed the same token earlier. Heads that do this are called induction heads (Olsson et al. 2022).

# %% train tags=["parameters"]
TRAINING_STEPS = 600
VOCABULARY, LENGTH, LAYERS, HEADS = 24, 32, 2, 4

# %% training
import optax

model = make_model(LAYERS, VOCABULARY, num_heads=HEADS)
optimizer = optax.adam(3e-3)


def make_batch(rng, batch_size=64):
    half = jax.random.randint(rng, (batch_size, LENGTH // 2), 0, VOCABULARY)
    return jnp.concatenate([half, half], axis=1)


def second_half_loss(logits, tokens):
    predicted, targets = logits[:, LENGTH // 2 : -1], tokens[:, LENGTH // 2 + 1 :]
    return optax.softmax_cross_entropy_with_integer_labels(predicted, targets).mean()


@jax.jit
def update(params, state, rng):
    tokens = make_batch(rng)

    def loss_fn(params):
        return second_half_loss(model.apply({"params": params}, tokens).logits, tokens)

    loss, gradients = jax.value_and_grad(loss_fn)(params)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss


params = model.init_params(jax.random.key(0))
state, losses = optimizer.init(params), []
for step in range(TRAINING_STEPS):
    params, state, loss = update(params, state, jax.random.key(step))
    losses.append(float(loss))

plt.figure(figsize=(6, 3))
plt.plot(losses)
plt.axhline(np.log(VOCABULARY), color="grey", linestyle="--", label="guessing")
plt.xlabel("step"), plt.ylabel("loss of the second half (nats)"), plt.legend()
plt.show()
print(f"loss {losses[0]:.2f} -> {losses[-1]:.3f}")
assert losses[-1] < losses[0] / 2

# %% look-inside-text [markdown]
# ## 8. What it learned: attention, heads, layers
#
# Left: attention of each head on one example. An induction head has a diagonal line `LENGTH / 2 - 1` tokens back. Middle: the loss without each head (*ablation*). Right: the loss if the model stopped after each layer (*logit lens*).

# %% look-inside
from transformer.inspection import logit_lens, zero_heads

tokens = make_batch(jax.random.key(10**6))
output = model.apply({"params": params}, tokens, outputs={"weights", "residual_post", "logits"})
weights = layer_values(output, "weights")  # [L, B, N, T, S]
full = float(second_half_loss(output.logits, tokens))


@jax.jit
def loss_without(layer, head):
    edits = {"head_outputs": zero_heads(layer, head)}
    return second_half_loss(model.apply({"params": params}, tokens, edits=edits).logits, tokens)


ablated = [[float(loss_without(i, n)) for n in range(HEADS)] for i in range(LAYERS)]
ablated = np.array(ablated)
stream = layer_values(output, "residual_post")  # [L, B, T, D]
lens = [float(second_half_loss(each, tokens)) for each in logit_lens(model, params, stream)]

figure = plt.figure(figsize=(14, 4.2), layout="constrained")
left, middle, right = figure.subfigures(1, 3, width_ratios=[2, 1, 1])
for (layer, head), axis in np.ndenumerate(left.subplots(LAYERS, HEADS)):
    axis.imshow(weights[layer, 0, head], cmap="Blues")
    axis.set(title=f"layer {layer}, head {head}", xticks=[], yticks=[])
axis = middle.subplots()
picture = axis.imshow(ablated, cmap="Reds")
axis.set(title=f"loss without a head\n({full:.3f} with all)", xlabel="head", ylabel="layer")
axis.set(xticks=range(HEADS), yticks=range(LAYERS))
for (layer, head), loss in np.ndenumerate(ablated):
    color = "white" if loss > ablated.max() / 2 else "black"
    axis.text(head, layer, f"{loss:.3f}", ha="center", va="center", color=color)
axis = right.subplots()
axis.bar(range(LAYERS), lens)
axis.set(title="loss after each layer", xlabel="layer", xticks=range(LAYERS))
plt.show()

assert ablated.max() > full  # at least one head is needed
np.testing.assert_allclose(lens[-1], full, atol=1e-4)

# %% decode-text [markdown]
# ## 9. Decoding with a cache
#
# A decoder generates one token at a time. Keys and values of earlier tokens do not change, so they are kept in a cache and each step computes one token. The result is the same as computing everything again.

# %% decode
from transformer import generate
from transformer.generation.sampling import SamplingConfig

half = LENGTH // 2
prompt = tokens[0, : half + 1].tolist()  # the first half, and one token of the second
greedy = SamplingConfig(temperature=0)
continuation = generate(model, params, [prompt], max_new_tokens=half - 1, sampling=greedy).tokens[0]
print("first half:  ", prompt[:half])
print("continuation:", prompt[half:] + continuation)
assert continuation == prompt[1:half]

# One pass over the whole text predicts the same tokens as the steps with the cache.
logits = model.apply({"params": params}, jnp.array([prompt + continuation])).logits[0]
assert logits.argmax(-1)[half:-1].tolist() == continuation

# %% next [markdown]
# ## Next steps
#
# - [`train_and_sample.ipynb`](train_and_sample.ipynb): a language model of real text.
# - [`long_sequences.ipynb`](long_sequences.ipynb): what replaces full attention when texts are long.
# - [`own_attention.ipynb`](own_attention.ipynb): write your own attention and check it.
# - `docs/architecture.md` lists the files of the forward pass in reading order; `docs/inspection.md` describes requests and edits.
