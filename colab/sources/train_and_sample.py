# %% title [markdown]
# # Train a language model and sample from it
#
# Train a small LLaMA-style model on text that ships with every Python: the help topics and the source of the standard library, about 10 MB. It takes a few minutes, even on a CPU.
#
# Run the cells from top to bottom.

# %% setup [markdown]
# Installation

# %% settings-text [markdown]
# ## 1. Settings
#
# Lower `BATCH_SIZE`, `LENGTH` or `D_MODEL` if memory runs out. A run keeps its settings: to try others, change `NAME`.

# %% settings tags=["parameters"]
NAME = "quickstart"  # name of the run and of its folder
KEEP_ON_DRIVE = True  # on Colab: keep the folder on your Google Drive (it asks you first)

TEXT = "python:library"  # or your own file or folder
STEPS = 1200
BATCH_SIZE = 8  # examples per step; a multiple of the number of devices
LENGTH = 128  # tokens per example
D_MODEL = 192  # width of the model, a multiple of 12
LAYERS = 4
PRECISION = "auto"  # by device: float32 on a CPU, float16 on a T4, bfloat16 on other GPUs and TPUs
EVERY = 300  # steps between evaluations, samples and checkpoints
CHEATING_STEPS = 200  # steps of the model without a causal mask, in section 7

# %% folder-text [markdown]
# ## 2. A folder that outlives the connection
#
# The run writes everything to one folder: settings, checkpoints, metrics and samples. On Colab it is on your Google Drive, on Kaggle in the notebook's output (kept between sessions with *Settings > Persistence > Files*), elsewhere in `runs` beside this notebook.

# %% folder
import os

if "COLAB_RELEASE_TAG" in os.environ and KEEP_ON_DRIVE:
    from google.colab import drive

    drive.mount("/content/drive")
    runs = pathlib.Path("/content/drive/MyDrive/runs")
elif "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
    runs = pathlib.Path("/kaggle/working/runs")
else:
    runs = pathlib.Path("runs")

workdir = str(runs / NAME)
print(workdir)

# %% train-text [markdown]
# ## 3. Train
#
# `quickstart` is an experiment from the project's `configs` folder. Experiments are frozen dataclasses; `replace` derives a new one.
#
# If the connection breaks, run the cells again: `fit` resumes from the newest checkpoint, with the same data in the same order. The stop button also saves a checkpoint and ends the cell with a `PreemptedError`.

# %% train
from dataclasses import replace

import train
from transformer import Precision

quickstart = train.find_experiment("quickstart")
experiment = replace(
    quickstart,
    name=NAME,
    steps=STEPS,
    batch_size=BATCH_SIZE,
    model=replace(
        quickstart.model, d_model=D_MODEL, num_layers=LAYERS, precision=Precision.parse(PRECISION)
    ),
    data=replace(quickstart.data, path=TEXT, sequence_length=LENGTH),
    evaluation=replace(quickstart.evaluation, every=EVERY),
    sample=replace(quickstart.sample, every=EVERY),
    checkpoint=replace(quickstart.checkpoint, every=EVERY),
)
run = train.fit(experiment, workdir)

# %% curve-text [markdown]
# ## 4. The loss curve
#
# Left: the loss of each training batch. Right: bits per byte on held-out text, compared with two compressors on the same text. A good language model is a good compressor.

# %% curve
import matplotlib.pyplot as plt

from train.data.corpus import prepare_text
from train.telemetry.metrics_log import read_metrics

lines = read_metrics(run.folder.metrics)
training = [line for line in lines if line["split"] == "train"]
held_out = [line for line in lines if line["split"] == "validation"]
corpus = prepare_text(run.experiment.data, tokenizer=run.tokenizer)
compressors = corpus.compressed_bits_per_byte("validation")

figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
left.plot([line["step"] for line in training], [line["loss"] for line in training])
left.set(xlabel="step", ylabel="training loss (nats a token)")
bits = [line["bits_per_byte"] for line in held_out]
right.plot([line["step"] for line in held_out], bits, "o-", label=f"this model: {bits[-1]:.2f}")
for style, (name, needed) in zip(("--", ":"), compressors.items(), strict=True):
    right.axhline(needed, color="grey", linestyle=style, label=f"{name}: {needed:.2f}")
right.set(xlabel="step", ylabel="held-out bits a byte")
right.legend()
plt.show()

# %% sample-text [markdown]
# ## 5. Generate text
#
# `load` reads the run from its folder, so you can continue here another day without training. A low temperature prefers likely tokens; a high one gives more variety and more mistakes.

# %% sample
run = train.load(workdir)
prompts = ["def read(", "class Queue:\n", "The import statement"]
for temperature in (0.5, 1.0):
    texts = run.generate(prompts, max_new_tokens=60, temperature=temperature)
    for prompt, text in zip(prompts, texts, strict=True):
        print(f"--- temperature {temperature}\n{prompt}{text}\n")

# %% attention-text [markdown]
# ## 6. Attention weights of one head
#
# Rows are query tokens, columns are key tokens, and the color is the attention weight. `aux` has the weights of all layers: layer, example, head, query, key.

# %% attention
import jax
import jax.numpy as jnp

LAYER, HEAD = 1, 0

tokens = run.tokenizer.encode("for name in names:\n    print(name)\n")
apply = jax.jit(run.model.apply, static_argnames="outputs")
outputs = frozenset({"logits", "weights"})
output = apply({"params": run.params}, jnp.array([tokens]), outputs=outputs)
weights = output.aux[0]["weights"][LAYER, 0, HEAD]

words = [repr(run.tokenizer.decode([token])) for token in tokens]
figure, axes = plt.subplots(figsize=(5, 5), layout="constrained")
axes.imshow(weights, cmap="Blues", vmin=0)
axes.set_xticks(range(len(words)), words, rotation=90)
axes.set_yticks(range(len(words)), words)
axes.set_title(f"layer {LAYER}, head {HEAD}")
plt.show()

next_token = int(output.logits[0, -1].argmax())
print(f"The model expects {run.tokenizer.decode([next_token])!r} next.")

# %% mask-text [markdown]
# ## 7. Why the causal mask matters
#
# Without the mask every token sees the next one, so the model learns to copy instead of to predict. After 200 steps its held-out loss looks better than any compressor. When it generates, there is no next token to copy, and it has learned nothing.

# %% mask
cheating = replace(
    experiment,
    name=f"{NAME}_cheating",
    steps=CHEATING_STEPS,
    model=replace(experiment.model, causal=False),
)
cheat = train.fit(cheating, f"{workdir}_cheating")

lines = read_metrics(cheat.folder.metrics)
without_mask = [line["bits_per_byte"] for line in lines if line["split"] == "validation"]
print(f"Held-out bits a byte: {without_mask[-1]:.2f} without the mask, {bits[-1]:.2f} with it.")
text = cheat.generate("def read(", max_new_tokens=60, temperature=0.5)
print(f"Its sample: {text!r}")

# %% next [markdown]
# ## Next steps
#
# - Train on your own text: set `TEXT` to a file or folder, and choose a new `NAME`.
# - Make the model larger: raise `D_MODEL`, `LAYERS`, `LENGTH` and `STEPS`.
# - `from train.config.experiment_files import list_experiments; list_experiments()` lists the other experiments, for example GPT-2.
# - Everything works from a terminal too: `python -m train --help`.
# - `README.md` links the guides: how the library is organized, and how to add your own layer.
