"""What `auto` means for an experiment on some hardware: saved with the run."""

from train.experiment import Experiment
from transformer.attend import Case, choose
from transformer.attention import AttentionConfig
from transformer.hardware import Hardware
from transformer.masks import Pattern
from transformer.stack import unrolls


def choices(experiment: Experiment, hardware: Hardware) -> dict[str, str]:
    """Setting -> what is used, and why."""
    model, length = experiment.model, experiment.data.sequence_length
    chosen = {}
    for place, block in enumerate(model.pattern):
        if isinstance(block.mixer, AttentionConfig):
            width = block.mixer.query_width(model.width)
            meeting = block.mixer.meeting_width(model.width)
            case = Case(
                hardware=hardware,
                pattern=Pattern(causal=True),
                dtype=model.precision.compute,
                queries=length,
                keys=length,
                query_width=meeting,
                value_width=block.mixer.value_width or width,
                segments=experiment.data.segments,
                products=block.mixer.products,
                dropout=block.mixer.dropout > 0,
            )
            choice = choose(block.mixer.form, case)
            name = f"model.pattern.{place}.mixer.form"
            chosen[name] = f"{choice.form} ({choice.why})"
    unrolled = unrolls(model.loop, model.remat, model.layers, hardware)
    chosen["model.loop"] = "unroll" if unrolled else "scan"
    chosen["flattened tokens"] = "yes" if hardware.flattens_tokens else "no"
    return chosen
