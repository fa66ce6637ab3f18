"""Hardware is a value: nothing in this package asks which backend it runs on."""

import dataclasses
from typing import Literal

Platform = Literal["cpu", "gpu", "tpu"]


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What a model is compiled for. It decides what every `auto` means."""

    platform: Platform = "cpu"
    kind: str = ""
    """The device's own name, such as `TPU v5p` or `NVIDIA H200`."""
    count: int = 1
    """Number of devices."""

    @property
    def flattens_tokens(self) -> bool:
        """Whether [B, T, D] is taken as [B T, D] before every product with a weight.

        XLA's CPU compiler computes the gradient of a 3-D product through transposed copies, at
        twice the cost of the 2-D one. Elsewhere it makes no difference.
        """
        return self.platform == "cpu"

    def unrolls(self, layers: int) -> bool:
        """Whether a loop over `layers` is unrolled: faster steps for slower compiles."""
        return layers <= 16
