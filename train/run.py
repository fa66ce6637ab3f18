"""The names of a run's classes or tags, by number.

A run that was trained: its model, weights and tokenizer, read from its folder.

A run read from its folder, with the weights that it is judged by.

Text that goes on from a prompt: a tokenizer before decoding, and one after it.

What a run's model answers to prompts, whatever it has learned.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from train.config.io import experiment_from_dict
from train.errors import UserError
from train.experiment import Experiment
from train.run_folder.folder import RunFolder, read_json
from train.tasks.vocabulary import Labels, read_labels

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer
    from transformer.hardware import Hardware
    from transformer.models.base import Model
from collections.abc import Sequence
from typing import TYPE_CHECKING

from train.checkpoint.log_filters import install_log_filters
from train.checkpoint.manager import CheckpointManager
from train.checkpoint.provenance import check_provenance
from train.data.tokenizer import Tokenizer
from train.engine import make_engine
from train.evaluation.eval_weights import load_eval_weights
from train.parallel.mesh import MeshConfig
from train.runtime.attention_kernels import mark_broken_kernels
from train.runtime.hardware import local_hardware
from train.tasks.base import TextCallback
from train.tasks.vocabulary import check_vocab_size
from transformer.generation.sampling import ANCESTRAL_SAMPLING, SamplingConfig

if TYPE_CHECKING:
    from train.data.tokenizer import Tokenizer

    pass  # DROPPED
from train.errors import UsageError
from train.experiment import check_seed
from train.tasks.base import SampleOptions
from train.tasks.registry import make_task

if TYPE_CHECKING:
    pass  # DROPPED


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What a run has come to."""

    experiment: Experiment
    """As resolved: with the size of the vocabulary."""
    folder: RunFolder
    model: Model
    params: Any
    tokenizer: Tokenizer
    step: int
    """Updates that the weights have had."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """The held-out metrics at the end of `fit`; empty for a run that was loaded."""
    labels: Labels = ()
    """The names of the classes or tags, by number."""


def read_experiment(folder: RunFolder) -> Experiment:
    """The experiment of a run's folder. Raises UserError if its file is damaged."""
    return experiment_from_dict(_saved(folder, "experiment"), str(folder.config_json))


def read_auto_choices(folder: RunFolder, hardware: Hardware) -> dict[str, str]:
    """What every `auto` has become in a run, if it ran on hardware of this kind; else nothing."""
    kind = _saved(folder, "hardware")
    if (kind.get("platform"), kind.get("kind")) != (hardware.platform, hardware.kind):
        return {}
    chosen = _saved(folder, "chosen")
    return {name: choice for name, choice in chosen.items() if isinstance(choice, str)}


def _saved(folder: RunFolder, part: str) -> dict[str, Any]:
    """A part of config.json. Raises UserError if it is damaged."""
    plain = read_json(folder.config_json)
    found = plain.get(part) if isinstance(plain, dict) else None
    if not isinstance(found, dict):
        raise UserError(f"{folder.config_json}: has no {part} in it; put the file back as it was")
    return found


def load(workdir: str, *, step: int | None = None, average_checkpoints: int | None = None) -> Run:
    """Reads a run, with the weights that it is judged by.

    Args:
      workdir: The run's folder.
      step: Which checkpoint. If not given: what the run's settings say, the newest unless they ask
        for the best one or for a mean.
      average: The mean of so many checkpoints, `step` or the newest and those before it.

    Raises:
      UserError: there is no run, no such checkpoint, or it does not fit the run's model.
    """
    install_log_filters()
    folder = RunFolder.open_existing(workdir)
    hardware = local_hardware()
    saved = read_experiment(folder)
    experiment = for_local_devices(saved)
    tokenizer, labels = Tokenizer.load(folder.tokenizer), read_labels(folder)
    check_vocab_size(experiment, tokenizer, str(folder.tokenizer))
    engine = make_engine(experiment, mark_broken_kernels(experiment, hardware))
    verify = experiment.checkpoint.verify

    def check(step: int, extra: dict[str, Any]) -> None:
        check_provenance(extra, step, folder, saved, tokenizer, labels)

    with CheckpointManager(folder.checkpoints, read_only=True, verify=verify) as checkpoints:
        params, steps = load_eval_weights(
            checkpoints,
            engine,
            experiment,
            step=step,
            average_checkpoints=average_checkpoints,
            check=check,
        )
    return Run(experiment, folder, engine.model, params, tokenizer, steps[-1], labels=labels)


def for_local_devices(experiment: Experiment) -> Experiment:
    """The experiment on whatever devices are here: a run is often looked at elsewhere."""
    model = experiment.model
    if model.remat == "offload":  # a CPU has no other memory, and nothing is differentiated here
        model = dataclasses.replace(model, remat="none")
    return dataclasses.replace(
        experiment,
        model=model,
        mesh=MeshConfig(),
        compile="jit",
        grad_accum_steps=1,
    )


def sample(
    run: Run,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 200,
    sampling: SamplingConfig = ANCESTRAL_SAMPLING,
    num_beams: int = 0,
    seed: int = 0,
    on_text: TextCallback | None = None,
) -> list[str]:
    """The continuation, translation, class or tags of each prompt, or its masks filled.

    Each task takes the options that concern it: `max_new_tokens`, `sampling` and `seed` are for
    text that goes on, `num_beams` (0: as the run's settings say) for translations. `on_text` is given
    the answer to a single prompt in pieces, as it is made; they join to the text returned.

    Raises UserError for a prompt or an option that the model cannot take.
    """
    check_seed(seed)
    if num_beams < 0:
        raise UsageError(f"beams {num_beams}: give 1 or more, or 0 for as many as the settings say")
    options = SampleOptions(max_new_tokens, sampling, num_beams, seed)
    return make_task(run.experiment).sample(run, prompts, options, on_text)
