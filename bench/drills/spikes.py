"""Faults planted in small runs: are they detected within two steps, and what do they cost?

    python -m bench spikes [--steps 300] [--only decoder]

Each kind of run is trained once unchanged and once with each fault: gradients a thousand times too
large, batches with random targets, a nonfinite batch, a flipped bit in a weight. The
text is random sentences, so that there is a loss that no model gets below. The anomaly detector has
its
default settings; distances are shorter, as the runs are.
"""

import contextlib
import dataclasses
import io
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

import train
from bench.drills.faults import Fault, planted
from train.data.bitext import BitextDataConfig
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.detector import RecoveryConfig
from train.experiment import CheckpointConfig, EvaluationConfig, Experiment
from train.optim.adamw_8bit import AdamW8bit
from train.optim.schedules import ScheduleConfig
from train.tasks.translation import Translation
from train.telemetry.event_log import read_records
from transformer import (
    AttentionConfig,
    BlockConfig,
    EncoderConfig,
    FeedForwardConfig,
    TransformerConfig,
)
from transformer.precision import Precision

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "red", "fish", "swim", "by")

_BLOCK = BlockConfig(mixer=AttentionConfig(num_heads=2), feed_forward=FeedForwardConfig(d_ff=64))


class Outcome(NamedTuple):
    """Outcome of a run."""

    loss: float
    noticed: int | None
    """First anomalous step."""
    done: str


def write_text(path: Path, lines: int) -> str:
    """Write random sentences of nine words."""
    drawn = random.Random(0)
    sentences = (" ".join(drawn.choice(WORDS) for _ in range(9)) for _ in range(lines))
    path.write_text("".join(f"{sentence}.\n" for sentence in sentences))
    return str(path)


def write_pairs(stem: Path, pairs: int, seed: int) -> str:
    """Write words and their translations; each word has two, chosen at random."""
    drawn = random.Random(seed)
    sources = [[drawn.choice(WORDS) for _ in range(drawn.randint(2, 5))] for _ in range(pairs)]
    targets = [[word + drawn.choice(("en", "er")) for word in source] for source in sources]
    for ending, sentences in (("en", sources), ("de", targets)):
        lines = "".join(f"{' '.join(sentence)}\n" for sentence in sentences)
        stem.with_suffix(f".{ending}").write_text(lines)
    return str(stem)


def decoder(folder: Path, steps: int) -> Experiment:
    """Return a small character language model."""
    return Experiment(
        name="spikes",
        model=TransformerConfig(
            d_model=32, num_layers=2, layer_pattern=(_BLOCK,), pad_vocab_to_multiple=32
        ),
        data=TextDataConfig(
            path=write_text(folder / "text.txt", 4000),
            sequence_length=32,
            tokenizer=TokenizerConfig("character"),
            cache_dir=str(folder / "cache"),
        ),
        schedule=ScheduleConfig("cosine", learning_rate=1e-2, warmup_steps=10),
        steps=steps,
        batch_size=16,
        evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every=steps // 15),
        recovery=RecoveryConfig(rollback_steps=steps // 15, skip_batches=steps // 15),
    )


def encoder_decoder(folder: Path, steps: int) -> Experiment:
    """Return a small word translator."""
    base = decoder(folder, steps)
    block = dataclasses.replace(_BLOCK, cross_attention=AttentionConfig(num_heads=2))
    encoder = EncoderConfig(num_layers=1, layer_pattern=(_BLOCK,))
    return dataclasses.replace(
        base,
        task=Translation(num_beams=1, extra_length=3),
        model=dataclasses.replace(
            base.model, d_model=64, num_layers=1, layer_pattern=(block,), encoder=encoder
        ),
        data=BitextDataConfig(
            path=write_pairs(folder / "train", 4000, 0),
            test_path=write_pairs(folder / "test", 200, 1),
            max_length=16,
            batch_tokens=640,
            tokenizer=TokenizerConfig("word"),
        ),
        batch_size=0,
        schedule=ScheduleConfig("cosine", learning_rate=5e-3, warmup_steps=30),
    )


def experiments(folder: Path, steps: int) -> dict[str, Experiment]:
    """Return each kind of run by name."""
    base = decoder(folder, steps)
    half = dataclasses.replace(base.model, precision=Precision.parse("float16"))
    return {
        "decoder": base,
        "encoder-decoder": encoder_decoder(folder, steps),
        "float16, loss scale": dataclasses.replace(base, model=half),
        "8-bit optimizer": dataclasses.replace(base, optimizer=AdamW8bit()),
        "accumulation": dataclasses.replace(base, grad_accum_steps=4),
    }


def faults(first: int) -> dict[str, Fault]:
    """Return each fault by name, starting at batch `first`."""
    return {
        "gradients x 1,000": Fault(first, count=5, factor=1000.0),
        "poisoned batches": Fault(first, count=5, words=16),
        "batch not finite": Fault(first, weight=float("nan")),
        "flipped bit": Fault(first, bit=30),
    }


def outcome(experiment: Experiment, workdir: Path, fault: Fault) -> Outcome:
    """Train with a planted fault; return the outcome."""
    with planted(fault), contextlib.redirect_stderr(io.StringIO()):
        run = train.fit(experiment, str(workdir), quiet=True)
    events = read_records(workdir / "logbook.jsonl")
    skipped = [line["step"] for line in events if line["event"] == "skipped"]
    bad = [step for step in skipped if step > fault.first]
    done = f"{len(skipped)} skipped" if skipped else "nothing"
    for line in events:
        if line["event"] == "rolled back":
            done += f"; from {line['step']} back to {line['checkpoint']}"
    return Outcome(run.final_metrics["loss"], min(bad, default=None), done)


def drill(steps: int = 300, only: str = "") -> int:
    """Print a table; return 1 if a fault is detected late, or costs 1% of the loss.

    Args:
      steps: Steps of each run.
      only: Train only the runs whose names contain this.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    table = Table("run", "fault", "noticed after", "what was done", "loss", "clean", "more", "")
    failed = False
    with tempfile.TemporaryDirectory() as name:
        folder, first = Path(name), steps // 2
        for kind, experiment in experiments(folder, steps).items():
            if only not in kind:
                continue
            clean = outcome(experiment, folder / kind, Fault(steps * 1000))
            for what, fault in faults(first).items():
                result = outcome(experiment, folder / f"{kind}, {what}", fault)
                late = result.noticed is None or result.noticed - first > 2
                more = result.loss / clean.loss - 1
                bad = late or not more <= 0.01
                failed |= bad
                after = "never" if result.noticed is None else f"{result.noticed - first} step"
                losses = f"{result.loss:.4f}", f"{clean.loss:.4f}", f"{more:+.2%}"
                table.add_row(kind, what, after, result.done, *losses, "FAILED" if bad else "")
                print(kind, what, *losses, result.done, file=sys.stderr, flush=True)
            failed |= clean.done != "nothing"
            table.add_row(kind, "none", "", clean.done, "", f"{clean.loss:.4f}", "", "")
    Console(width=140).print(table)
    return int(failed)
