# %% title [markdown]
# # Scaling laws
#
# How does the loss fall with parameters, data and compute, and how large a model does a budget deserve? The notebook trains nine tiny models, fits two kinds of laws, predicts runs that the fit has not seen, and then fits the published losses of a real family. Nothing is downloaded; it takes a few minutes on two cores.

# %% setup [markdown]
# Installation

# %% settings tags=["parameters"]
WIDTHS = "8,16,32"
TOKENS = "120k,480k,1900k"
BUDGET = "1e12"

# %% design-text [markdown]
# ## 1. The design
#
# Every width is trained on every number of tokens, three by three, each run with a learning rate that decays to its own end: the loss of a long run halfway is not that of a short run. Heads keep their width; depth stays. `--dry-run` lists the runs. $N$ counts parameters without the tables of tokens, $D$ tokens, and the compute is $C = 6 N D$ FLOPs.

# %% design
import json
import os
import pathlib
import subprocess
import sys
import tempfile

folder = pathlib.Path(tempfile.mkdtemp())
(folder / "tiny.py").write_text('''
"""A tiny language model of Python's own library, by bytes."""

import dataclasses

import train
from train.data.data_config import TokenizerConfig
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from transformer import AttentionConfig, RoPE

base = train.find_experiment("quickstart")
block = dataclasses.replace(
    base.model.layer_pattern[0],
    mixer=AttentionConfig(num_heads=2, bias=False, position=RoPE()),
)
EXPERIMENTS = {
    "tiny": dataclasses.replace(
        base,
        name="tiny",
        model=dataclasses.replace(base.model, d_model=16, num_layers=2, layer_pattern=(block,)),
        data=dataclasses.replace(
            base.data,
            sequence_length=64,
            validation_fraction=0.005,
            tokenizer=TokenizerConfig("byte"),
        ),
        optimizer=AdamW(),
        schedule=ScheduleConfig("cosine", learning_rate=8e-3, warmup_steps=20),
        batch_size=16,
        evaluation=dataclasses.replace(base.evaluation, every=0, compression_baselines=False),
        sample=dataclasses.replace(base.sample, every=0),
    )
}
''')


def scaling(*words):
    """Run the command `scaling` and return what it finds."""
    done = subprocess.run(
        [sys.executable, "-m", "train", "scaling", *words, "--json"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


design = ("tiny.py", "--widths", WIDTHS, "--tokens", TOKENS)
design = (str(folder / design[0]), *design[1:], "--min-steps", "40")
for run in scaling(*design, "--dry-run")["sweep"]:
    print({name: run[name] for name in ("parameters", "tokens", "d_model", "steps") if name in run})

# %% train-text [markdown]
# ## 2. Train and fit
#
# The runs are one resumable queue. Then two laws are fitted, one through the best runs (Kaplan et al. 2020) and one through all runs (Hoffmann et al. 2022), with 95% intervals from resampling the runs:
#
# $$L(x) = \left(\frac{x_c}{x}\right)^{\alpha}, \qquad L(N, D) = E + \frac{A}{N^{\alpha}} + \frac{B}{D^{\beta}}$$

# %% train
found = scaling(*design, "--budget", BUDGET, "--workdir", str(folder / "sweep"))
for name, law in found["kaplan"].items():
    print(f"best loss over {name}: exponent {law['exponent']:.3f}" if law else f"{name}: no law")
law = found["chinchilla"]
print({name: round(value, 3) for name, value in law.items() if isinstance(value, float)})
print("fitted without the largest runs, and predicting them:", found["held_out"])

# %% figure
import IPython.display as ipd

ipd.display(ipd.Image(str(folder / "sweep" / "scaling.png")))
losses = [run["loss"] for run in found["sweep"]]
assert min(losses) < losses[0], "larger or longer runs are better"

# %% optimum-text [markdown]
# ## 3. The compute-optimal model
#
# For a budget $C$ the law gives the $N$ and $D = C / 6N$ of lowest loss: too small a model has no room, too large a model sees too little. Dots are the runs; each curve is a budget, and the star its minimum. Nine runs of seconds know it within orders of magnitude only, as the intervals say.

# %% optimum
import matplotlib.pyplot as plt
import numpy as np


def predicted(parameters, tokens, law):
    """Return E + A / N^alpha + B / D^beta."""
    return law["E"] + law["A"] / parameters ** law["alpha"] + law["B"] / tokens ** law["beta"]


runs = found["sweep"]
sizes = np.geomspace(
    min(r["parameters"] for r in runs) / 3, 10 * max(r["parameters"] for r in runs)
)
figure, axis = plt.subplots(figsize=(6, 3.6), layout="constrained")
for budget in np.geomspace(float(BUDGET) / 1000, float(BUDGET), 4):
    curve = predicted(sizes, budget / (6 * sizes), law)
    axis.plot(sizes, curve, label=f"C = {budget:.0e}")
    axis.plot(sizes[curve.argmin()], curve.min(), "k*", ms=9)
axis.scatter([r["parameters"] for r in runs], [r["loss"] for r in runs], s=12, color="gray")
axis.set(
    xscale="log", xlabel="parameters N", ylabel="loss (nats a byte)", ylim=(None, max(losses) * 1.4)
)
axis.legend()
plt.show()
print("optimum of the budget:", json.dumps(found["optimum"], indent=1)[:700])

# %% published-text [markdown]
# ## 4. Published runs
#
# The same fit takes a CSV. Here the Cerebras-GPT family (Dey et al. 2023): seven models, each trained on about 20 tokens a parameter of the Pile, with the losses of their model card in nats a token. (Their N includes the embeddings.) Size and data grow together, so only the law over compute is determined; NumPy's straight line through the logarithms must agree.

# %% published
PUBLISHED = {  # parameters: (tokens, loss on the Pile's test split)
    111e6: (2.2e9, 2.566),
    256e6: (5.1e9, 2.299),
    590e6: (11.8e9, 2.184),
    1.3e9: (26.3e9, 1.996),
    2.7e9: (53.0e9, 1.834),
    6.7e9: (133.2e9, 1.704),
    13e9: (257.1e9, 1.575),
}
csv = folder / "published.csv"
rows = [f"{n:.0f},{d:.0f},{loss}" for n, (d, loss) in PUBLISHED.items()]
csv.write_text("\n".join(["parameters,tokens,loss", *rows]) + "\n")
family = scaling("--from-csv", str(csv), "--workdir", str(folder / "published"))

compute = np.array([6 * n * d for n, (d, _) in PUBLISHED.items()])
loss = np.array([loss for _, loss in PUBLISHED.values()])
slope, intercept = np.polyfit(np.log(compute), np.log(loss), 1)
exponent = family["kaplan"]["compute"]["exponent"]
print(f"L(C) falls with the power {exponent:.4f}; NumPy: {-slope:.4f}")
assert abs(exponent + slope) < 1e-3

slope6, intercept6 = np.polyfit(np.log(compute[:-1]), np.log(loss[:-1]), 1)
guess = np.exp(intercept6 + slope6 * np.log(compute[-1]))
print(f"13B predicted from the six smaller ones: {guess:.3f}; published: {loss[-1]}")
assert abs(guess - loss[-1]) < 0.05
ipd.display(ipd.Image(str(folder / "published" / "scaling.png")))

# %% next [markdown]
# ## Next steps
#
# - Runs of minutes are far from the constants of large models; the intervals and the held-out error say how far to trust a fit.
# - `docs/scaling.md` has all options: isoFLOP designs, learning rates by muP, several seeds.
# - `python -m train plan` turns the optimal N and D into hardware, hours and money.
