"""Output of a mixer from the outputs of its heads, which can be seen and edited.

For mixers that have heads and compute them in another way than by `attend`, which does the same:
sparse patterns, random features, hashing. They declare `values = HEAD_OUTPUTS`.
"""

from typing import Any

import jax

from transformer.attention.mixer import Mixer, MixerInputs, MixerOutput
from transformer.attention.projections import project_output


def combine_heads(
    mixer: Mixer,
    y: jax.Array,  # [B, T, N, H of values]
    inputs: MixerInputs,
    cache: Any = None,
    aux: dict[str, Any] | None = None,
) -> MixerOutput:
    """Show the heads to `inputs.taps`, project them, and return the output of the mixer.

    Args:
      mixer: It has the weights `output`, whose settings are those of `project_output`.
      y: Outputs of its heads.
      inputs: The mixer's inputs.
      cache: Cache to return.
      aux: Other extra outputs to return.
    """
    aux = dict(aux or {})
    if inputs.taps is not None:
        y = inputs.taps.visit("head_outputs", y, aux)
    return MixerOutput(project_output(mixer, y, mixer.config, mixer.context), cache, aux)
