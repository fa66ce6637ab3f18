# %% title [markdown]
# # How a run survives
#
# Three things end long trainings: the machine goes away, a checkpoint is damaged, the loss explodes. This notebook does all three to a small run on purpose, and checks that the result is what it would have been. Nothing is downloaded; it takes about three minutes on a CPU.

# %% setup [markdown]
# Installation

# %% settings tags=["parameters"]
STEPS = 120
CHECKPOINT_EVERY = 20

# %% experiment-text [markdown]
# ## 1. The experiment
#
# A small language model of sums, written to a config file as for the command line. The second experiment of the file plants faults: its task replaces the targets of a few batches by random ones. A task of your own may change anything; this one inherits all but its batches.

# %% experiment
import pathlib
import tempfile

folder = pathlib.Path(tempfile.mkdtemp())
(folder / "sums.txt").write_text(
    "".join(f"{a} plus {b} is {a + b}.\n" for a in range(60) for b in range(60))
)
code = f'''
"""Sums, and the same with faulty batches."""

import dataclasses

import numpy as np

import train
from train.data.batches import TrainingBatches
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.experiment import CheckpointConfig, EvaluationConfig
from train.optim.schedules import ScheduleConfig
from train.detector import RecoveryConfig
from train.tasks.language_modeling import LanguageModeling, LanguageModelTask
from transformer import AttentionConfig, BlockConfig, RoPE, TransformerConfig

FAULTY = range(80, 86)  # numbers of the batches


@dataclasses.dataclass(frozen=True)
class FaultyModeling(LanguageModeling):
    """Language modeling with some faulty batches."""


@dataclasses.dataclass(frozen=True)
class FaultyBatches(TrainingBatches):
    """Batches, some of them with random targets."""

    sound: TrainingBatches

    def host_batch(self, cursor, host, num_hosts):
        rows = self.sound.host_batch(cursor, host, num_hosts)
        if cursor in FAULTY:
            random = np.random.default_rng(cursor)
            targets = random.integers(0, 10, rows["targets"].shape)
            rows = {{**rows, "targets": targets.astype(rows["targets"].dtype)}}
        return rows


@train.register_task(FaultyModeling)
class FaultyTask(LanguageModelTask):
    """Language modeling with some faulty batches."""

    def training_batches(self, corpus, options):
        return FaultyBatches(super().training_batches(corpus, options))


block = BlockConfig(mixer=AttentionConfig(num_heads=4, position=RoPE()))
clean = train.Experiment(
    name="sums",
    model=TransformerConfig(d_model=32, num_layers=2, layer_pattern=(block,)),
    data=TextDataConfig(
        {str(folder / "sums.txt")!r}, sequence_length=32, tokenizer=TokenizerConfig("character")
    ),
    schedule=ScheduleConfig("constant", learning_rate=3e-3, warmup_steps=10),
    steps={STEPS},
    batch_size=8,
    log_every=1,
    evaluation=EvaluationConfig(every=0),
    checkpoint=CheckpointConfig(every={CHECKPOINT_EVERY}),
    recovery=RecoveryConfig(window=50, warmup=30, rollback_steps=20, skip_batches=10),
)
EXPERIMENTS = {{
    "clean": clean,
    "faulty": dataclasses.replace(clean, name="faulty", task=FaultyModeling()),
}}
'''
_ = (folder / "sums.py").write_text(code)

# %% unbroken-text [markdown]
# ## 2. Kill it
#
# First a run that nothing disturbs. Then the same command again, killed with `SIGKILL` in the middle: no handler runs, nothing is saved at the end. The same command resumes from the newest verified checkpoint.

# %% unbroken
import json
import os
import signal
import subprocess
import sys
import time

# Jupyter asks programs for colors and progress bars; here their output is printed as text.
PLAIN = {key: value for key, value in os.environ.items() if "FORCE" not in key}


def command(name, experiment="clean", **flags):
    """Return the command line of a run."""
    line = [sys.executable, "-m", "train", "fit", f"{folder / 'sums.py'}:{experiment}"]
    line += ["--workdir", str(folder / name)]
    return line + [part for key, value in flags.items() for part in (f"--{key}", str(value))]


def fit(name, experiment="clean", **flags):
    """Run to the end; print what it says."""
    line = command(name, experiment, **flags)
    done = subprocess.run(line, capture_output=True, text=True, env=PLAIN)
    said = done.stdout + done.stderr
    print("\n".join(line for line in said.splitlines() if line.strip())[-1200:])
    assert done.returncode == 0


def losses(name):
    """Return the loss of every step."""
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["split"] == "train"}


fit("unbroken")

# %% kill
half = CHECKPOINT_EVERY * (STEPS // CHECKPOINT_EVERY // 2)
running = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
manifest = folder / "killed" / "checkpoints" / str(half) / "manifest/metadata"
while not manifest.exists():  # the manifest is written last: the checkpoint is complete
    assert running.poll() is None
    time.sleep(0.02)
running.send_signal(signal.SIGKILL)
running.wait()
print("killed after step", max(losses("killed")), "\n")

fit("killed")
same = losses("killed") == losses("unbroken")
print("\nlosses of all steps are equal, bit for bit:", same)
assert same

# %% damage-text [markdown]
# ## 3. Damage a checkpoint
#
# Every file of a checkpoint has a checksum in its manifest. Flip one bit in the largest file of the newest checkpoint, as a failing disk would, and train on: the run notices, says so, and takes the checkpoint before it.


# %% damage
def newest(name):
    """Return the folder of the newest checkpoint."""
    found = (folder / name / "checkpoints").glob("*/manifest")
    return max((path.parent for path in found), key=lambda path: int(path.name))


files = [path for path in newest("killed").rglob("*") if path.is_file()]
largest = max(files, key=lambda path: path.stat().st_size)
data = bytearray(largest.read_bytes())
data[len(data) // 2] ^= 1
largest.write_bytes(bytes(data))
print("flipped one bit of", largest.relative_to(folder), "\n")

longer = STEPS + CHECKPOINT_EVERY
fit("unbroken", steps=longer)
print()
fit("killed", steps=longer)
same = losses("killed") == losses("unbroken")
print("\nlosses of all steps are equal, bit for bit:", same)
assert same

# %% spike-text [markdown]
# ## 4. A loss spike
#
# Batches 80 to 85 have random targets. The detector compares each step's loss and gradient norm with the last steps. It skips the update of an anomalous step, and after three in a row rolls back to an earlier checkpoint and continues beyond the bad batches.

# %% spike
fit("faulty", "faulty", steps=STEPS)

# %% spike-plot
import matplotlib.pyplot as plt

events = [
    json.loads(line) for line in (folder / "faulty" / "logbook.jsonl").read_text().splitlines()
]
for event in events:
    if event["event"] in ("skipped", "rolled back", "recovered"):
        print(event["event"], {key: event[key] for key in event if key not in ("event", "time")})

plt.figure(figsize=(8, 3.5))
plt.plot(*zip(*losses("unbroken").items(), strict=True), label="without faults")
for path in sorted((folder / "faulty").glob("metrics.jsonl.beyond-*")):
    left = [json.loads(line) for line in path.read_text().splitlines()]
    left = [line for line in left if line["split"] == "train"]
    plt.plot(
        [line["step"] for line in left], [line["loss"] for line in left], "x", label="rolled back"
    )
plt.plot(*zip(*losses("faulty").items(), strict=True), label="with faulty batches")
plt.xlabel("step"), plt.ylabel("loss"), plt.legend()
plt.show()

names = [event["event"] for event in events]
assert "rolled back" in names
end, expected = losses("faulty")[STEPS], losses("unbroken")[STEPS]
print(f"loss of the last step: {end:.3f}, without faults {expected:.3f}")
assert end < 1.2 * expected

# %% next [markdown]
# ## Next steps
#
# - `docs/resume.md`: what a checkpoint contains, and what may change on resume.
# - `docs/recovery.md`: the detector, its settings, and what it costs.
# - `python -m train goodput W` shows how much time of a run was lost to restarts.
