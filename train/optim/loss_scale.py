"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2).

Gradients below 6e-8 are 0 in float16. Multiplying the loss by a large factor keeps them
representable; the step divides the gradients by it again, in float32.
"""

import jax
import jax.numpy as jnp
from flax import struct

from train.experiment import LossScaleConfig


class LossScale(struct.PyTreeNode):
    """Factor of the loss, and the number of steps since it changed."""

    scale: jax.Array  # float32
    good_steps: jax.Array  # int32, consecutive steps with finite gradients

    @staticmethod
    def create(config: LossScaleConfig) -> "LossScale":
        """Return the scale before the first step."""
        return LossScale(jnp.float32(config.init_scale), jnp.int32(0))

    def update(self, finite: jax.Array, config: LossScaleConfig) -> "LossScale":
        """Return the scale after a step.

        It halves, to at least 1, if a gradient was not finite. It doubles after `growth_interval`
        consecutive steps with finite gradients.
        """
        good = jnp.where(finite, self.good_steps + 1, 0)
        grow = good >= config.growth_interval
        grown = jnp.where(grow, jnp.minimum(self.scale * 2, config.max_scale), self.scale)
        scale = jnp.where(finite, grown, jnp.maximum(self.scale / 2, 1.0))
        return LossScale(scale, jnp.where(grow, 0, good))
