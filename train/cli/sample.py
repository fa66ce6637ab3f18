"""`python -m train sample W --prompt TEXT ...`."""

from __future__ import annotations

import dataclasses
import json

from train.cli.parsing import parse, positional, settings_errors, wants_json


@dataclasses.dataclass(frozen=True)
class SampleArguments:
    """Let a run's model write."""

    prompt: tuple[str, ...] = ("",)
    """What it goes on from; several texts are continued at once."""
    max_new_tokens: int = 200
    temperature: float = 0.8
    """Below 1 the likely gets likelier; 0 always takes the likeliest."""
    top_k: int = 0
    """Draw among so many of the likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability."""
    seed: int = 0
    step: int | None = None
    """Which checkpoint; the newest if not given."""


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    json_wanted = wants_json(arguments)
    workdir = positional(arguments, "W", "sample")
    given = parse(SampleArguments, arguments, verb="sample W")
    from train.memory import ELSEWHERE, explain_exhaustion
    from train.run import load
    from train.sample import sample
    from transformer.sampling import SamplingConfig

    with settings_errors():
        sampling = SamplingConfig(given.temperature, given.top_k, given.top_p)
    stream = _Stream(given.prompt[0]) if not json_wanted and len(given.prompt) == 1 else None
    with explain_exhaustion(["give fewer prompts or a smaller --max-new-tokens", ELSEWHERE]):
        run = load(workdir, step=given.step)
        texts = sample(
            run,
            list(given.prompt),
            max_new_tokens=given.max_new_tokens,
            sampling=sampling,
            seed=given.seed,
            stream=stream,
        )
    if json_wanted:
        print(json.dumps({"text": texts}))
    elif stream is not None:
        stream("\n")
    else:
        print("\n---\n".join(p + text for p, text in zip(given.prompt, texts, strict=True)))
    return 0


class _Stream:
    """Shows a text as it is made; the prompt with its first piece, for an error may come before."""

    def __init__(self, prompt: str):
        self._prompt = prompt

    def __call__(self, piece: str) -> None:
        print(self._prompt + piece, end="", flush=True)
        self._prompt = ""
