# %% title [markdown]
# # Fine-tune a Hugging Face model with LoRA
#
# Take a model in the format of Hugging Face, adapt it to other text by training a few thousand numbers beside its frozen weights, and write the result back as a folder that `transformers` opens. Without a network the notebook makes a tiny Llama folder first; with one, `SOURCE` may be a name on the hub. It takes a few minutes on two cores.

# %% setup [markdown]
# Installation

# %% settings-text [markdown]
# ## 1. Settings
#
# `SOURCE` is a folder with `config.json`, safetensors and a tokenizer, or a name on the hub such as `HuggingFaceTB/SmolLM2-135M` (choose a GPU or TPU for it). Empty: a tiny folder that this notebook makes.

# %% settings tags=["parameters"]
SOURCE = ""  # @param {type:"string"}
BASE_STEPS = 250  # of the tiny model
STEPS = 200  # of the fine-tuning
RANK = 8

# %% base-text [markdown]
# ## 2. A model folder
#
# The tiny model is a Llama of two layers that has learned sentences in the active voice. Its run is exported in the format of Hugging Face, and from here on treated like any download.

# %% base
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile

import train
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    NormConfig,
    RoPE,
    TransformerConfig,
)

folder = pathlib.Path(tempfile.mkdtemp())
PEOPLE = ["the cook", "the lady", "the nurse", "the poet", "the pilot", "the baker"]
DEEDS = [("sees", "seen"), ("hears", "heard"), ("calls", "called"), ("helps", "helped")]
pairs = [(a, b, deed) for a in PEOPLE for b in PEOPLE if a != b for deed in DEEDS]
active = [f"{a} {deed[0]} {b}.\n" for a, b, deed in pairs] * 8
passive = [f"{b} is {deed[1]} by {a}.\n" for a, b, deed in pairs] * 8


def run_command(*words):
    """Run a command of the trainer and return what it prints."""
    done = subprocess.run([sys.executable, "-m", "train", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shared(data):
    """Return the settings that the base and the fine-tuning have in common."""
    return dict(
        data=data,
        batch_size=16,
        optimizer=AdamW(),
        evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
    )


source = SOURCE
if not source:
    block = BlockConfig(
        mixer=AttentionConfig(num_heads=4, num_kv_heads=2, bias=False, position=RoPE()),
        feed_forward=FeedForwardConfig(d_ff=192, activation="silu", gated=True, bias=False),
        norm=NormConfig("rms"),
    )
    llama = TransformerConfig(
        d_model=64, num_layers=2, layer_pattern=(block,), final_norm=NormConfig("rms")
    )
    data = TextDataConfig(sequence_length=64, tokenizer=TokenizerConfig("byte"))
    base_experiment = train.Experiment(
        name="base",
        model=llama,
        steps=BASE_STEPS,
        schedule=ScheduleConfig(learning_rate=3e-3, warmup_steps=20),
        **shared(data),
    )
    train.fit(base_experiment, str(folder / "tiny"), data=active, quiet=True)
    print(run_command("export", str(folder / "tiny"), "--output", str(folder / "tiny_hf")))
    source = str(folder / "tiny_hf")
    print(*sorted(path.name for path in pathlib.Path(source).iterdir()), sep="\n")
    print(json.loads(pathlib.Path(source, "config.json").read_text())["architectures"])

# %% import-text [markdown]
# ## 3. Import
#
# `import` makes a run of the folder: a checkpoint of step 0 with its weights and tokenizer. Every command works on it.

# %% import
print(run_command("import", source, "--workdir", str(folder / "imported")))
imported = train.load(str(folder / "imported"))
print(imported.generate("the cook ", max_new_tokens=30))

# %% before
new_texts = passive
before = imported.evaluate(data=new_texts)["loss"]
old_before = imported.evaluate(data=active)["loss"]
print(f"loss on the new text, before: {before:.3f} nats a token; on the old: {old_before:.3f}")

# %% lora-text [markdown]
# ## 4. LoRA
#
# Beside each chosen matrix $W$ two thin ones are trained, $A$ of $r$ columns and $B$ of $r$ rows (Hu et al. 2022, equation 3; $r$ is `RANK`):
#
# $$y = x \left(W + \frac{\alpha}{r} A B\right)$$
#
# $W$ is frozen. $B$ starts at zero, so the first step computes what the imported model computes. Gradients, optimizer state and checkpoints are those of $A$ and $B$ alone.

# %% lora
from train.engines.lora import LoRAConfig

imported_data = imported.experiment.data
experiment = dataclasses.replace(
    imported.experiment,
    name="lora",
    steps=STEPS,
    schedule=ScheduleConfig(learning_rate=1e-2, warmup_steps=10),
    lora=LoRAConfig(rank=RANK, alpha=16.0, targets=("attention", "feed_forward")),
    **shared(dataclasses.replace(imported_data, sequence_length=64)),
)
tuned = train.fit(
    experiment,
    str(folder / "lora"),
    data=new_texts,
    init_from=str(folder / "imported"),
    quiet=True,
)

# %% sizes
import jax


def size(path):
    """Return the bytes of all files below a folder."""
    return sum(file.stat().st_size for file in pathlib.Path(path).rglob("*") if file.is_file())


weights = sum(leaf.size for leaf in jax.tree.leaves(imported.params))
checkpoint = size(folder / "lora" / "checkpoints" / str(STEPS))
print(f"the model has {weights:,} parameters, {4 * weights / 1024:.0f} KiB")
print(f"a checkpoint of the fine-tuning has {checkpoint / 1024:.0f} KiB, optimizer state included")
assert checkpoint < 16 * weights, "less than weights and optimizer state of the whole model"

# %% result-text [markdown]
# ## 5. What it has learned, and what it has forgotten

# %% result
import matplotlib.pyplot as plt

after = tuned.evaluate(data=new_texts)["loss"]
old_after = tuned.evaluate(data=active)["loss"]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
lines = tuned.metrics("train")
left.plot([line["step"] for line in lines], [line["loss"] for line in lines])
left.set(xlabel="step", ylabel="training loss (nats a token)", title="LoRA")
positions = [0, 1, 3, 4]
colors = ["tab:gray", "tab:blue"] * 2
bars = right.bar(positions, [before, after, old_before, old_after], color=colors)
right.bar_label(bars, fmt="%.2f")
right.set_xticks([0.5, 3.5], ["new text", "old text"])
right.margins(y=0.12)
right.set(ylabel="loss (nats a token)", title="before (gray) and after (blue)")
plt.show()
for prompt in ("the cook is ", "the poet is "):
    print(repr(prompt), "->", repr(tuned.generate(prompt, max_new_tokens=25)))
assert after < before - 0.3

# %% back-text [markdown]
# ## 6. Send it back
#
# `merge` multiplies A and B out and writes an ordinary run; `export` writes a folder that `transformers` opens. The logits of that folder are compared with those of the tuned model here, and with `transformers` itself where it is installed.

# %% back
print(run_command("merge", str(folder / "lora"), "--workdir", str(folder / "merged")))
print(run_command("export", str(folder / "merged"), "--output", str(folder / "exported")))
print(*sorted(path.name for path in (folder / "exported").iterdir()), sep="\n")

# %% check
import importlib.util

import numpy as np

from transformer.interop.pretrained import read_model

tokens = np.array([tuned.tokenizer.encode("the cook is seen by the lady")])
ours = np.asarray(tuned.model.apply({"params": tuned.params}, tokens).logits)
pretrained, params = read_model(str(folder / "exported"))
again = np.asarray(pretrained.make_model().apply({"params": params}, tokens).logits)
print(f"largest difference of the exported folder: {np.abs(ours - again).max():.1e}")
assert np.abs(ours - again).max() < 1e-3 * max(1, np.abs(ours).max())

if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(str(folder / "exported"), dtype=torch.float32)
    with torch.no_grad():
        found = theirs(torch.tensor(tokens)).logits.numpy()
    print(f"largest difference from transformers: {np.abs(ours - found).max():.1e}")
    assert np.abs(ours - found).max() < 1e-3 * max(1, np.abs(ours).max())
else:
    print("transformers or torch is not installed here, so it was not asked")

# %% next [markdown]
# ## Next steps
#
# - Your own text: `data=` takes a list of strings, or set `data.path` to files.
# - `docs/fine_tuning.md` has all settings, and full fine-tuning; `docs/huggingface.md` lists the families.
# - From a terminal: `python -m train fit CONFIG --init-from W --lora.rank 8`.
