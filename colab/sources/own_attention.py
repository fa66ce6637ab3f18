# %% title [markdown]
# # Write your own attention
#
# Define an attention mechanism in one cell, run the library's contract tests on it, and train a language model with it. Nothing is downloaded; it takes about two minutes on a CPU.
#
# The example is *windowed attention with a learned temperature for each head*: a token sees the last few tokens, and each head learns how sharp its softmax is.

# %% setup [markdown]
# Installation

# %% mixer-text [markdown]
# ## 1. The mixer
#
# A *mixer* is the part of a layer that moves information between tokens. It is a frozen dataclass of settings and a Flax module, joined by a decorator:
#
# - `abilities` says what it supports. What it does not support is rejected with a one-line error, and its contract tests are skipped.
# - `__call__` receives `x` [B, T, D] and a `MixerInputs` with the mask, positions, cache and requested outputs, and returns a `MixerOutput`.
# - `init_cache` makes the state that decoding keeps.
#
# `project_qkv` and `project_output` declare the weights of the four projections; `attend` computes the softmax on the fastest kernel of the hardware. Plain Flax works as well: this mixer declares its temperatures with `self.param`.

# %% mixer
import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from transformer import Abilities, Mixer, MixerOutput, RoPE, register_mixer
from transformer.attention.attend import attend
from transformer.attention.cache import KVCache
from transformer.attention.projections import MultiHeadConfig, project_output, project_qkv
from transformer.attention.reference import ScoreSpec


@dataclasses.dataclass(frozen=True)
class TemperedConfig(MultiHeadConfig):
    """Settings of `Tempered`."""

    kind: ClassVar[str] = "tempered"

    window: int = 32
    """Number of tokens that a token sees, itself included."""
    position: RoPE = RoPE()
    """Rotation of queries and keys, which `project_qkv` applies."""


@register_mixer
class Tempered(Mixer):
    """Softmax attention within a window, with a learned temperature for each head."""

    config: TemperedConfig

    @staticmethod
    def abilities(config):
        return Abilities(cross=False)

    @nn.nowrap
    def init_cache(self, batch, length):
        heads = self.config.resolved_num_kv_heads
        head_dim = self.config.resolved_head_dim(self.context.d_model)
        return KVCache.empty(batch, length, heads, head_dim, self.context.precision.cache_dtype)

    @nn.compact
    def __call__(self, x, inputs):  # x: [B, T, D]
        config, context, cache = self.config, self.context, inputs.cache
        q, k, v = project_qkv(self, x, inputs.positions)
        # exp(0) = 1 at the start. Scaling the queries scales all scores of the head.
        sharpness = self.param("sharpness", nn.initializers.zeros, (q.shape[2],))
        q = q * jnp.exp(sharpness).astype(q.dtype)[None, None, :, None]

        pattern = dataclasses.replace(inputs.mask.pattern, window=config.window)
        mask = inputs.mask.replace(pattern=pattern)
        if cache is not None:  # decoding: the keys and values of all tokens so far
            cache = cache.append(k, v, inputs.positions)
            k, v, key_positions = cache.read(q.dtype)
            mask = mask.with_keys(key_positions, keys_include_queries=True)
        scores = ScoreSpec(1 / math.sqrt(q.shape[-1]))
        given = dict(hardware=context.hardware, outputs=inputs.outputs, taps=inputs.taps)
        y, aux = attend(q, k, v, mask, scores, **given)
        return MixerOutput(project_output(self, y), cache, aux)


# %% contract-text [markdown]
# ## 2. Contract tests
#
# `check_mixer` tests everything that the mixer claims: no token sees the future, cached decoding equals the full pass, packed documents do not see each other, weights sum to one, padding has no gradient, bfloat16 works, it trains in a model with stacked layers, and more. An `AssertionError` names what is wrong.

# %% contract
from transformer.testing import check_mixer

check_mixer("tempered")
print("all contract tests passed")

# %% bug-text [markdown]
# **A bug, to see it caught.** This subclass forgets the mask: its tokens see the future.

# %% bug
from transformer import Mask


@dataclasses.dataclass(frozen=True)
class LeakyConfig(TemperedConfig):
    kind: ClassVar[str] = "leaky"


@register_mixer
class Leaky(Tempered):
    config: LeakyConfig

    def __call__(self, x, inputs):
        return super().__call__(x, dataclasses.replace(inputs, mask=Mask()))


try:
    check_mixer("leaky")
except AssertionError as error:
    caught = str(error)
    print("caught:", caught)
assert caught.startswith("mixer leaky: causal")

# %% pattern-text [markdown]
# ## 3. What it sees
#
# Ask an untrained model for the attention weights: each row is a query, each column a key.

# %% pattern
import matplotlib.pyplot as plt

from transformer import BlockConfig, LanguageModel, TransformerConfig
from transformer.inspection import layer_values

block = BlockConfig(mixer=TemperedConfig(num_heads=4, window=8))
model = LanguageModel(TransformerConfig(100, d_model=64, num_layers=1, layer_pattern=(block,)))
params = model.init_params(jax.random.key(0))
tokens = jax.random.randint(jax.random.key(1), (1, 32), 0, 100)
weights = layer_values(model.apply({"params": params}, tokens, outputs={"weights"}), "weights")
plt.figure(figsize=(3.2, 3.2))
plt.imshow(weights[0, 0, 0] > 0, cmap="Blues")
plt.xlabel("key"), plt.ylabel("query"), plt.title("visible keys, window of 8")
plt.show()
assert int((weights[0, 0, 0, 20] > 0).sum()) == 8

# %% settings-text [markdown]
# ## 4. Train a language model with it
#
# The mixer is one more kind in the settings: everything of the trainer works with it, from checkpoints to `plan`.

# %% settings tags=["parameters"]
STEPS = 300

# %% train
import pathlib
import tempfile

import train
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import EvaluationConfig, SampleConfig
from train.optim.schedules import ScheduleConfig

text = pathlib.Path(tempfile.mkdtemp(), "arithmetic.txt")
text.write_text("".join(f"{a} plus {b} is {a + b}.\n" for a in range(60) for b in range(60)))

experiment = train.Experiment(
    name="tempered",
    model=TransformerConfig(
        d_model=64,
        num_layers=2,
        layer_pattern=(BlockConfig(mixer=TemperedConfig(num_heads=4)),),
    ),
    data=TextDataConfig(str(text), sequence_length=64, tokenizer=TokenizerConfig("character")),
    steps=STEPS,
    schedule=ScheduleConfig("cosine", learning_rate=1e-2, warmup_steps=20),
    batch_size=16,
    evaluation=EvaluationConfig(every=100),
    sample=SampleConfig(every=100, prompt="7 plus 5 is"),
)
run = train.fit(experiment, str(text.parent / "run"))

# %% result-text [markdown]
# ## 5. What the heads learned
#
# A factor above 1 makes a head sharper than the usual softmax, below 1 softer.

# %% result
import flax
import numpy as np

flat = flax.traverse_util.flatten_dict(run.params, sep="/")
[sharpness] = [leaf for path, leaf in flat.items() if path.endswith("sharpness")]
print("factor of the scores by layer and head:")
print(np.exp(np.asarray(sharpness)).round(2))
print(f"held-out loss {run.final_metrics['loss']:.2f} nats a character")
assert run.final_metrics["loss"] < 1

# %% next [markdown]
# ## Next steps
#
# - Move the cell to a file `tempered.py` and train any config with it: `python -m train fit quickstart --workdir runs/tempered --import tempered.py --model.layer-pattern.0.mixer.kind tempered`.
# - `docs/extending.md` explains where such a file may live and who imports it; `docs/attention.md` lists the variants that ship.
# - [`long_sequences.ipynb`](long_sequences.ipynb) compares them.
