"""What a run's model answers to prompts, whatever it has learned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from train.errors import UsageError
from train.experiment import check_seed
from train.tasks.registry import make_task
from train.tasks.task import SampleOptions, TextCallback
from transformer.sampling import ANCESTRAL_SAMPLING, SamplingConfig

if TYPE_CHECKING:
    from train.run import Run


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
