"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2)."""

import jax
import jax.numpy as jnp
from flax import struct

from train.experiment import LossScaleConfig


class LossScale(struct.PyTreeNode):
    """What the loss is multiplied by, and for how many steps that has gone well."""

    scale: jax.Array  # float32
    good_steps: jax.Array  # int32

    @staticmethod
    def init(config: LossScaleConfig) -> "LossScale":
        return LossScale(jnp.float32(config.init_scale), jnp.int32(0))

    def update(self, finite: jax.Array, config: LossScaleConfig) -> "LossScale":
        """Half the scale after an overflow; twice after `growth_interval` steps without one."""
        good = jnp.where(finite, self.good_steps + 1, 0)
        grow = good >= config.growth_interval
        grown = jnp.where(grow, jnp.minimum(self.scale * 2, config.max_scale), self.scale)
        scale = jnp.where(finite, grown, jnp.maximum(self.scale / 2, 1.0))
        return LossScale(scale, jnp.where(grow, 0, good))
