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
    from train.run import load
    from train.sample import sample
    from transformer.sampling import SamplingConfig

    with settings_errors():
        sampling = SamplingConfig(given.temperature, given.top_k, given.top_p)
    run = load(workdir, step=given.step)
    streamed = not json_wanted and len(given.prompt) == 1
    if streamed:
        print(given.prompt[0], end="", flush=True)
    texts = sample(
        run,
        list(given.prompt),
        max_new_tokens=given.max_new_tokens,
        sampling=sampling,
        seed=given.seed,
        stream=_show if streamed else None,
    )
    if json_wanted:
        print(json.dumps({"text": texts}))
    elif streamed:
        print()
    else:
        print("\n---\n".join(p + text for p, text in zip(given.prompt, texts, strict=True)))
    return 0


def _show(piece: str) -> None:
    print(piece, end="", flush=True)
