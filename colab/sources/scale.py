# %% title [markdown]
# # From one device to many
#
# Ask what a model needs before you rent hardware, arrange devices in a mesh, see who holds which piece of a weight, and train on all devices of this machine with the losses of one device. On a CPU the notebook makes eight virtual devices; on Kaggle's TPU it uses the eight real ones. Nothing is downloaded; it takes a few minutes on two cores.

# %% devices
# Before JAX starts: split a CPU into eight devices. Ignored where there is an accelerator.
import os

if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

# %% setup [markdown]
# Installation

# %% settings tags=["parameters"]
STEPS = 20
WIDTH = 64

# %% plan-text [markdown]
# ## 1. What will it need?
#
# `plan` tries the meshes of a target and estimates memory and time of the training step. No accelerator is needed. `--compile-best 0` gives estimates alone; with `pip install 'jax[tpu]'` the real step is compiled for the TPU.

# %% plan
import json
import subprocess
import sys


def run_command(*words):
    """Run a command of the trainer and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "train", *words],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


description = run_command("describe", "gpt2:small")
print(description.partition("Training memory")[0])  # it goes on with memory and decoding

# %% targets
targets = ["v5e:1x1", "v5e:2x2", "v5e:2x4", "h100:8"]
plans = {}
for target in targets:
    words = ("plan", "gpt2:medium", "--target", target)
    options = ("--compile-best", "0", "--no-precisions", "--json")
    plans[target] = json.loads(run_command(*words, *options))
    plan = plans[target]
    mesh = {name: size for name, size in plan["mesh"].items() if size != 1}
    print(
        f"{target:8} {'fits' if plan['fits'] else 'too small':9} mesh {mesh or 'one device'}, "
        f"{plan['memory_bytes_per_chip'] / 2**30:.1f} GiB a chip, "
        f"{plan['tokens_per_second']:,.0f} tokens/s expected"
    )

# %% fixed-text [markdown]
# The search fills each chip with the batch that is fastest, so the best plans take similar memory. What sharing buys shows when the step stays the same: the weights, gradients and optimizer state of one fixed batch, shared among more chips by `fsdp`.

# %% fixed
shared = {}
for target, chips in {"v5e:1x1": 1, "v5e:2x2": 4, "v5e:2x4": 8}.items():
    words = (
        "plan",
        "gpt2:medium",
        "--target",
        target,
        "--mesh.data",
        "1",
        "--mesh.fsdp",
        str(chips),
    )
    step = ("--batch-size", "8", "--grad-accum-steps", "1", "--model.remat", "full")
    plan = json.loads(run_command(*words, *step, *options))
    shared[f"fsdp {chips}"] = plan["memory_bytes_per_chip"] / 2**30

# %% plan-figure
import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.bar_label(left.bar(list(shared), list(shared.values())), fmt="%.1f")
left.margins(y=0.12)
left.set(ylabel="GiB a chip", title="GPT-2 medium, one fixed step")
right.bar(targets, [plans[name]["tokens_per_second"] for name in targets], color="tab:orange")
right.set(ylabel="tokens a second", title="expected speed of the best plan")
plt.show()
assert plans["v5e:2x4"]["tokens_per_second"] > plans["v5e:1x1"]["tokens_per_second"]
assert shared["fsdp 8"] < shared["fsdp 1"] / 2

# %% mesh-text [markdown]
# ## 2. A mesh, and who holds what
#
# A mesh arranges the devices along named axes. `data` copies the weights and splits the batch. `fsdp` splits weights and batch. `tensor` splits heads and hidden units. `context` splits the tokens of a sequence. Each weight names its axes, so one table decides where every array lives.

# %% mesh
import dataclasses
import pathlib
import tempfile

import jax
import numpy as np

import train
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig
from train.optim.schedules import ScheduleConfig
from train.parallel.mesh import MeshConfig
from transformer import AttentionConfig, BlockConfig, FeedForwardConfig, RoPE, TransformerConfig

folder = pathlib.Path(tempfile.mkdtemp())
(folder / "sums.txt").write_text(
    "".join(f"{a} plus {b} is {a + b}.\n" for a in range(40) for b in range(40))
)
block = BlockConfig(
    mixer=AttentionConfig(num_heads=8, position=RoPE()),
    feed_forward=FeedForwardConfig(d_ff=4 * WIDTH),
)
experiment = train.Experiment(
    name="sums",
    model=TransformerConfig(d_model=WIDTH, num_layers=2, layer_pattern=(block,)),
    data=TextDataConfig(
        str(folder / "sums.txt"), sequence_length=64, tokenizer=TokenizerConfig("character")
    ),
    schedule=ScheduleConfig("constant", learning_rate=1e-3, warmup_steps=5),
    steps=STEPS,
    batch_size=16,
    log_every=1,
    evaluation=EvaluationConfig(every=0),
    checkpoint=CheckpointConfig(every=0),
)
count = jax.device_count()
half = count // 2 if count % 2 == 0 else count
meshes = {
    "data": MeshConfig(data=-1),
    "fsdp": MeshConfig(data=1, fsdp=-1),
    "fsdp x tensor": MeshConfig(data=1, fsdp=half, tensor=count // half),
    "fsdp x context": MeshConfig(data=1, fsdp=half, context=count // half),
}
print(f"{count} devices")

# %% train-text [markdown]
# ## 3. Train on every mesh
#
# The same experiment, the same seed and batches; only the mesh differs. Compiling takes most of the time.

# %% train
runs = {}
for name, mesh in meshes.items():
    sharded = dataclasses.replace(experiment, mesh=mesh)
    runs[name] = train.fit(sharded, str(folder / name.replace(" ", "_")), quiet=True)
    last = runs[name].metrics("train")[-1]
    print(f"{name:15} loss {last['loss']:.5f} after {last['step']} steps")

# %% pieces-text [markdown]
# Who holds which piece of one weight, the first matrix of the feed-forward? Each color is a device. With `data` alone every device has all of it. Where several devices hold the same piece, the color is that of the last.

# %% pieces
from train.parallel.mesh import make_mesh
from train.parallel.sharding import parameter_shardings

figure, axes = plt.subplots(1, len(meshes), figsize=(12, 2.6), layout="constrained")
bytes_per_device = {}
for axis, name in zip(axes, meshes, strict=True):
    run = runs[name]
    shardings = parameter_shardings(make_mesh(meshes[name]), run.model.logical_axes(), run.params)
    held = jax.tree.map(
        lambda leaf, sharding: int(np.prod(sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize,
        run.params,
        shardings,
    )
    bytes_per_device[name] = sum(jax.tree.leaves(held))
    weight = run.params["layers"]["place_0"]["feed_forward"]["up"]  # [L, D, F]
    sharding = shardings["layers"]["place_0"]["feed_forward"]["up"]
    owner = np.zeros(weight.shape[1:])
    for device, index in sharding.devices_indices_map(weight.shape).items():
        owner[index[1:]] = device.id
    axis.imshow(owner, cmap="tab10", vmin=0, vmax=9, aspect="auto", interpolation="nearest")
    axis.set(title=name, xlabel="F", ylabel="D")
plt.show()
for name, held in bytes_per_device.items():
    print(f"{name:15} {held / 1024:7.0f} KiB of weights on each device")
if count > 1:
    assert bytes_per_device["fsdp"] < bytes_per_device["data"] * 1.5 / count

# %% same-text [markdown]
# ## 4. The same numbers as one device
#
# The reference: the same experiment in a process that has one CPU device. Sums are added in another order, so the last digits differ; nothing else may.

# %% reference
from train.config.io import experiment_to_dict

(folder / "experiment.json").write_text(json.dumps(experiment_to_dict(experiment)))
script = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
sys.path[:0] = json.loads(sys.argv[2])
import train
from train.config.io import experiment_from_dict
saved = json.loads((folder / "experiment.json").read_text())
train.fit(experiment_from_dict(saved, "experiment.json"), str(folder / "one"), quiet=True)
"""
environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
words = [sys.executable, "-c", script, str(folder), json.dumps([path for path in sys.path if path])]
done = subprocess.run(words, env=environment, capture_output=True, text=True)
assert done.returncode == 0, done.stderr
lines = (folder / "one" / "metrics.jsonl").read_text().splitlines()
reference = np.array([json.loads(line)["loss"] for line in lines if '"train"' in line])

# %% same
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
left.plot(range(1, STEPS + 1), reference, "k", lw=3, alpha=0.3, label="one device")
largest = 0.0
for name, run in runs.items():
    losses = np.array([line["loss"] for line in run.metrics("train")])
    left.plot(range(1, STEPS + 1), losses, "--", lw=1, label=name)
    right.semilogy(range(1, STEPS + 1), np.abs(losses - reference) + 1e-9)
    largest = max(largest, float(np.abs(losses - reference).max()))
left.set(xlabel="step", ylabel="loss (nats a token)"), left.legend()
right.set(xlabel="step", ylabel="difference from one device")
plt.show()
print(f"largest difference: {largest:.1e} nats")
if jax.default_backend() == "cpu":
    assert largest < 1e-3

# %% next [markdown]
# ## Next steps
#
# - From a terminal, `python -m train fit CONFIG --mesh.fsdp 8`, or `--mesh auto` for the mesh that `plan` finds.
# - `docs/sharding.md` explains each axis and what it sends; `docs/cloud.md` launches pods and clusters.
# - [`scaling_laws.ipynb`](scaling_laws.ipynb) finds how large a model a budget deserves.
