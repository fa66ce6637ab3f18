"""`python -m train sample W --prompt TEXT ...`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable

from train.cli.parsing import as_usage_errors, parse, pop_json_flag, pop_positional
from train.errors import UsageError


@dataclasses.dataclass(frozen=True)
class SampleArguments:
    """Let a run's model go on from a text, translate it, tell its class or tags, or fill [MASK]."""

    prompt: tuple[str, ...] = ("",)
    """What it answers to; several texts are taken at once."""
    max_new_tokens: int = 200
    """Of text that goes on, as are temperature, top-k, top-p and seed."""
    temperature: float = 0.8
    """Below 1 the likely gets likelier; 0 always takes the likeliest."""
    top_k: int = 0
    """Draw among so many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability."""
    beams: int = 0
    """Of a translation that is written word by word: hypotheses kept at each step; 0: as the run's
    settings say."""
    seed: int = 0
    step: int | None = None
    """Which checkpoint; if not given, what the run is judged by."""


GENERATION_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "beams", "seed")
"""The settings that say how an answer is made: each task heeds some of them."""


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "sample")
    given = parse(SampleArguments, arguments, verb="sample W")
    from train.run import load, read_experiment, sample
    from train.run_folder.folder import RunFolder
    from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom
    from train.tasks.registry import make_task
    from transformer.generation.sampling import SamplingConfig

    task = make_task(read_experiment(RunFolder.open_existing(workdir)))
    check_supported_options(arguments, task.supported_options)
    with as_usage_errors():
        sampling = SamplingConfig(given.temperature, given.top_k, given.top_p)
    with explain_oom(
        lambda: ["give fewer prompts or a smaller --max-new-tokens", LARGER_DEVICES_REMEDY]
    ):
        run = load(workdir, step=given.step)
        shown = given.prompt if task.continues_prompt else [""] * len(given.prompt)
        stream = _Stream(shown[0]) if not json_wanted and len(shown) == 1 else None
        texts = sample(
            run,
            list(given.prompt),
            max_new_tokens=given.max_new_tokens,
            sampling=sampling,
            num_beams=given.beams,
            seed=given.seed,
            on_text=stream,
        )
    if json_wanted:
        print(json.dumps({"text": texts}))
    elif stream is not None:
        stream("\n")
    else:
        between = "\n---\n" if task.continues_prompt else "\n"
        print(between.join(p + text for p, text in zip(shown, texts, strict=True)))
    return 0


def check_supported_options(arguments: Iterable[str], supported: Collection[str]) -> None:
    """Raises UsageError for settings that would change nothing of what a run's model answers."""
    given = {each.partition("=")[0].replace("_", "-") for each in arguments}
    ignored = [
        flag
        for name in GENERATION_OPTIONS
        if name not in supported and (flag := _flag(name)) in given
    ]
    if ignored:
        others = f" (it heeds {', '.join(map(_flag, supported))})" if supported else ""
        raise UsageError(
            f"sample {', '.join(ignored)}: changes nothing of what this run's model answers; "
            f"leave it out{others}"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Stream:
    """Shows a text as it is made; the prompt with its first piece, for an error may come before."""

    def __init__(self, prompt: str):
        self._prompt = prompt

    def __call__(self, piece: str) -> None:
        print(self._prompt + piece, end="", flush=True)
        self._prompt = ""
