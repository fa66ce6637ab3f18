"""What `auto` means for an experiment on some hardware: saved with the run."""

from train.experiment import Experiment
from transformer.attend import choose
from transformer.attention import AttentionConfig
from transformer.hardware import Hardware
from transformer.stack import unrolls


def choices(experiment: Experiment, hardware: Hardware) -> dict[str, str]:
    """Setting -> what is used, and why."""
    model, length = experiment.model, experiment.length
    chosen = {}
    for place, block in enumerate(model.pattern):
        if isinstance(block.mixer, AttentionConfig):
            case = block.mixer.case(
                model.width,
                length,
                dtype=model.precision.compute,
                hardware=hardware,
                causal=model.causal,
                segments=experiment.segments,
            )
            choice = choose(block.mixer.form, case)
            name = f"model.pattern.{place}.mixer.form"
            chosen[name] = f"{choice.form} ({choice.why})"
    unrolled = unrolls(model.loop, model.remat, model.layers, hardware)
    chosen["model.loop"] = "unroll" if unrolled else "scan"
    chosen["flattened tokens"] = "yes" if hardware.flattens_tokens else "no"
    return chosen
