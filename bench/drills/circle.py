"""Round trip: train here, export, fine-tune in `transformers` and here, import, evaluate.

    python -m bench circle RUN [RUN ...] --text FILE

For each run of a language model or a masked language model (such as `quickstart` and `bert_tiny`,
trained for some steps): export it, open it in `transformers`, and train both from these weights on
the same batches in the same order, with AdamW of the same settings and no dropout. The table has
the losses side by side and the largest difference. The model of `transformers` is then saved,
imported and evaluated here, beside the one trained here. Both train for one epoch of the text.

It needs torch and transformers (the extra `hf`) and no network.
"""

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers
import tyro

from bench.drills._reference_table import Options, compare_cases, versions
from train.assembly import make_engine, make_task, training_options
from train.evaluation.evaluator import evaluate_split
from train.experiment import EvaluationConfig
from train.interop.huggingface import import_model
from train.interop.huggingface_export import export_run
from train.optim.elementwise import AdamW
from train.optim.schedules import ScheduleConfig
from train.run import Run, load
from transformer import Hardware

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 3e-4, 0.1, 1.0
BATCH_SIZE, EVALUATION_BATCHES = 4, 8
LARGEST = 1e-3
"""Largest difference of losses that passes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CircleOptions(Options):
    """Command line of the drill."""

    runs: tyro.conf.Positional[tuple[str, ...]]
    """Folders of runs."""
    text: str
    """File to train on, for one epoch."""


def tuning_experiment(run: Run) -> Any:
    """Return the settings of both trainings: whole windows, AdamW, a constant rate."""
    data: Any = run.experiment.data
    return dataclasses.replace(
        run.experiment,
        data=dataclasses.replace(data, document_masking=False),
        optimizer=AdamW(
            beta1=0.9,
            beta2=0.999,
            epsilon=1e-8,
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=MAX_GRAD_NORM,
        ),
        schedule=ScheduleConfig("constant", learning_rate=LEARNING_RATE, warmup_steps=0),
        evaluation=EvaluationConfig(num_batches=EVALUATION_BATCHES),
        batch_size=BATCH_SIZE,
        seed=1,
    )


def train_here(run: Run, experiment: Any, batches: list[Any]) -> tuple[Any, list[float]]:
    """Return the parameters after the batches, and the losses."""
    engine = make_engine(experiment, Hardware())
    state = engine.init()
    placed = jax.tree.map(
        lambda leaf, value: jax.device_put(value, leaf.sharding), state.params, run.params
    )
    state = state.replace(params=jax.tree.map(jax.numpy.array, placed))
    losses = []
    for batch in batches:
        state, metrics = engine.step(state, engine.put_batch(batch))
        losses.append(float(metrics["loss"]))
    return state.params, losses


def train_there(model: Any, batches: list[Any]) -> list[float]:
    """Train a model of transformers in place; return the losses."""
    model.eval()  # no dropout, as here
    matrices = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Linear)
    } - {id(model.get_input_embeddings().weight)}
    parameters = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [p for p in parameters if id(p) in matrices], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if id(p) not in matrices], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for batch in batches:
        logits = model(input_ids=torch.tensor(batch["tokens"], dtype=torch.long)).logits
        weights = torch.tensor(batch["weights"]).reshape(-1)
        each = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]),
            torch.tensor(batch["targets"], dtype=torch.long).reshape(-1),
            reduction="none",
        )
        loss = (each * weights).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        losses.append(loss.item())
    return losses


def held_out_loss(experiment: Any, params: Any, corpus: Any) -> float:
    """Return the loss of the first batches of the validation split."""
    engine = make_engine(experiment, Hardware())
    metrics = evaluate_split(experiment, engine, params, corpus, "validation", whole=False)
    return metrics["loss"]


def tuning_batches(run: Run, experiment: Any, text: str) -> list[Any]:
    """Return the batches of both trainings: one epoch of the text."""
    data = dataclasses.replace(experiment.data, path=text, validation_path=text)
    experiment = dataclasses.replace(experiment, data=data)
    task: Any = make_task(experiment)
    corpus = task.prepare_corpus(run.tokenizer)
    source = task.training_batches(corpus, training_options(experiment))
    steps = source.windows_per_epoch // BATCH_SIZE
    return [source.host_batch(cursor, 0, 1) for cursor in range(steps)]


def run_circle(workdir: str, text: str) -> tuple[str, bool]:
    """Run the round trip of one run; return its part of the table, and if the losses agree."""
    run = load(workdir)
    experiment = tuning_experiment(run)
    batches = tuning_batches(run, experiment, text)
    corpus = make_task(experiment).prepare_corpus(run.tokenizer)
    with tempfile.TemporaryDirectory() as name:
        exported, tuned, back = (str(Path(name) / each) for each in ("exported", "tuned", "back"))
        model_type = export_run(workdir, exported)
        kind = "AutoModelForCausalLM" if run.model.config.causal else "AutoModelForMaskedLM"
        model = getattr(transformers, kind).from_pretrained(exported, attn_implementation="eager")
        theirs = train_there(model, batches)
        model.save_pretrained(tuned)
        transformers.AutoTokenizer.from_pretrained(exported).save_pretrained(tuned)
        import_model(tuned, back)
        imported = load(back)
    params, ours = train_here(run, experiment, batches)
    # Vocabulary padding rows, which an imported model does not have.
    same = dataclasses.replace(experiment, model=imported.experiment.model)
    evaluated = {
        " before": held_out_loss(experiment, run.params, corpus),
        ", trained here": held_out_loss(experiment, params, corpus),
        ", trained there and imported": held_out_loss(same, imported.params, corpus),
    }
    gaps = np.abs(np.subtract(ours, theirs))
    shown = sorted({0, 1, 2, 4, 9, 19, 49, 99, len(ours) - 1} & set(range(len(ours))))
    trained = f"{len(batches)} steps, one epoch of {Path(text).name}"
    lines = [
        f"{experiment.name}, exported as {model_type}, {trained}",
        *(f"  step {i + 1:4}  here {ours[i]:.6f}  there {theirs[i]:.6f}" for i in shown),
        f"  largest difference of losses {gaps.max():.1e}, at step {np.argmax(gaps) + 1}",
        *(f"  held-out loss{when} {loss:.5f}" for when, loss in evaluated.items()),
    ]
    return "\n".join(lines), gaps.max() <= LARGEST


def drill(options: CircleOptions) -> int:
    """Print the table; return 1 if losses differ."""
    return compare_cases(
        options,
        dict.fromkeys(options.runs),
        lambda workdir, _: run_circle(workdir, options.text),
        head=[
            f"{versions('transformers', 'torch', 'jax')}, CPU, float32",
            f"batches of {BATCH_SIZE}, AdamW {LEARNING_RATE}, decay {WEIGHT_DECAY} of matrices",
        ],
    )
