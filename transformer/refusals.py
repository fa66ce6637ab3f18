"""What a mixer without attention cannot do, refused in one line while the program is traced."""

from typing import Any

from transformer.masks import Mask
from transformer.mixers import Outputs


def reject_memory(kind: str, memory: Any) -> None:
    """Raises ValueError if there is a memory: the mixer knows its own input alone."""
    if memory is not None:
        raise ValueError(
            f"mixer {kind}: reads its own input alone, no memory; use a mixer of attention, or one "
            "whose configuration says reads_memory"
        )


def reject_weights(kind: str, outputs: Outputs) -> None:
    """Raises ValueError if attention weights are requested."""
    if "weights" in outputs:
        raise ValueError(
            f"mixer {kind}: has no attention weights; leave `weights` out of `outputs`"
        )


def reject_mask_patterns(kind: str, mask: Mask) -> None:
    """Raises ValueError for a mask that is more than causal, segments and lengths."""
    pattern = mask.pattern
    asked = {
        "a window": pattern.window,
        "a prefix": pattern.prefix or mask.prefix_lengths is not None,
        "global positions": mask.global_positions is not None,
        "an array of what is allowed": mask.allowed is not None,
        "a mask given pair by pair": mask.allowed is not None,
        "an order of tokens other than their positions'": not pattern.ordered,
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise ValueError(f"mixer {kind}: cannot obey {what}; use a mixer of attention")
