# %% title [markdown]
# # Translate with an encoder-decoder
#
# Train the transformer of 2017 to translate numbers from English to German words, and watch its cross-attention swap tens and units. The pairs are made in the notebook; nothing is downloaded. It takes about two minutes on a CPU.

# %% setup [markdown]
# Installation

# %% settings tags=["parameters"]
STEPS = 400
LARGEST = 9999  # numbers from 0 to this

# %% data-text [markdown]
# ## 1. The data
#
# German says units before tens: *forty-two* is *zwei und vierzig*, "two and forty". The pairs are a plain list of Python tuples. For files of your own, see `docs/tasks.md`.

# %% data
import random

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["-", "-", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
EINS = [
    "null",
    "eins",
    "zwei",
    "drei",
    "vier",
    "fünf",
    "sechs",
    "sieben",
    "acht",
    "neun",
    "zehn",
    "elf",
    "zwölf",
    "dreizehn",
    "vierzehn",
    "fünfzehn",
    "sechzehn",
    "siebzehn",
    "achtzehn",
    "neunzehn",
]
ZIGS = [
    "-",
    "-",
    "zwanzig",
    "dreißig",
    "vierzig",
    "fünfzig",
    "sechzig",
    "siebzig",
    "achtzig",
    "neunzig",
]


def english(n):
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f" {ONES[n % 10]}" if n % 10 else "")
    unit, name = (1000, "thousand") if n >= 1000 else (100, "hundred")
    return f"{english(n // unit)} {name}" + (f" {english(n % unit)}" if n % unit else "")


def german(n, last=True):
    if n < 20:
        return "ein" if n == 1 and not last else EINS[n]
    if n < 100:
        return (f"{german(n % 10, last=False)} und " if n % 10 else "") + ZIGS[n // 10]
    unit, name = (1000, "tausend") if n >= 1000 else (100, "hundert")
    return f"{german(n // unit, last=False)} {name}" + (f" {german(n % unit)}" if n % unit else "")


numbers = list(range(LARGEST + 1))
random.Random(0).shuffle(numbers)
held_out, learned = numbers[:500], numbers[500:]
data = {
    "train": [(english(n), german(n)) for n in learned],
    "validation": [(english(n), german(n)) for n in held_out],
}
for source, target in data["train"][:3]:
    print(f"{source:55} {target}")

# %% train-text [markdown]
# ## 2. Train
#
# The encoder reads the English words in both directions. The decoder writes German words one after another; in each layer it attends to its own words and, by *cross-attention*, to the encoder's.

# %% train
import tempfile

import train
from train.data.bitext import BitextDataConfig
from train.data.data_config import TokenizerConfig
from train.experiment import EvaluationConfig, SampleConfig
from train.optim.schedules import ScheduleConfig
from train.tasks.translation import Translation
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    Initialization,
    SinusoidalPositions,
    TransformerConfig,
)

attention = AttentionConfig(num_heads=4)
experiment = train.Experiment(
    name="numbers",
    task=Translation(num_beams=1),
    model=TransformerConfig(
        d_model=64,
        num_layers=2,
        layer_pattern=(BlockConfig(mixer=attention, cross_attention=attention),),
        position_embedding=SinusoidalPositions(),
        scale_embeddings=True,
        initialization=Initialization(std=0, embedding_std=64**-0.5),
        encoder=EncoderConfig(num_layers=2, layer_pattern=(BlockConfig(mixer=attention),)),
    ),
    data=BitextDataConfig(max_length=16, max_buckets=2, tokenizer=TokenizerConfig("word")),
    schedule=ScheduleConfig("cosine", learning_rate=3e-3, warmup_steps=40),
    steps=STEPS,
    batch_size=64,
    evaluation=EvaluationConfig(every=100),
    sample=SampleConfig(every=100, prompt=english(7342)),
)
run = train.fit(experiment, tempfile.mkdtemp() + "/numbers", data=data)
run.plot()

# %% translate-text [markdown]
# ## 3. Translate numbers it has never seen

# %% translate
some = held_out[:200]
answers = run.generate([english(n) for n in some])
correct = sum(answer == german(n) for n, answer in zip(some, answers, strict=True))
for n, answer in zip(some[:5], answers[:5], strict=True):
    print(f"{n:5} {answer}")
print(f"{correct} of {len(some)} are right, word by word")
assert correct > 0.9 * len(some)

# %% attention-text [markdown]
# ## 4. Where the decoder looks
#
# Cross-attention of every layer, the mean of its heads: each row is the German word that the model has just read, before it writes the next one; each column is an English word. After *hundert* it looks at *two*, and after *und* back at *forty*. The second cell shows every head, to click through.

# %% attention
import matplotlib.pyplot as plt
import numpy as np

from train.visualization.attention_view import view_attention

view = view_attention(run, english(7342), german(7342))
rows, columns = view.labels_of("cross")
maps = [(one.layer, np.asarray(one.weights[0]).mean(0)) for one in view.maps_of("cross")]
figure, axes = plt.subplots(1, len(maps), figsize=(11, 4.6), layout="constrained")
for axis, (layer, weights) in zip(axes, maps, strict=True):
    axis.imshow(weights, cmap="Blues", vmin=0)
    axis.set(title=f"cross-attention of layer {layer}")
    axis.set_xticks(range(len(columns)), columns, rotation=60, ha="right")
    axis.set_yticks(range(len(rows)), rows)
plt.show()
assert all(np.allclose(weights.sum(-1), 1, atol=1e-3) for _, weights in maps)

# %% viewer
view

# %% next [markdown]
# ## Next steps
#
# - `python -m train fit multi30k` trains on 29,000 captions in English and German.
# - `docs/tasks.md` describes the files, the metrics and beam search.
