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
    compute_capability: str = ""
    """Of a GPU, as JAX tells it: `9.0` of an H100, `gfx942` of one by AMD; empty: not known."""
    broken_kernels: tuple[tuple[str, str], ...] = ()
    """Attention kernels that cannot be compiled here, each with the reason: `auto` skips them."""

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """The dtype that products of matrices are fastest in without losing what is learnt."""
        if self.platform == "cpu":
            return "float32"
        capability = self.compute_capability
        known = self.platform == "gpu" and capability and not capability.startswith("gfx")
        return "float16" if known and float(capability) < 8 else "bfloat16"

    @property
    def flatten_tokens(self) -> bool:
        """Whether [B, T, D] is taken as [B T, D] before every product with a weight.

        XLA's CPU compiler computes the gradient of a 3-D product through transposed copies, at
        twice the cost of the 2-D one. Elsewhere it makes no difference.
        """
        return self.platform == "cpu"

    @property
    def tile_size(self) -> int:
        """Queries, and keys, that are scored at once where attention goes tile by tile.

        Measured on a CPU, forward and backward at 4,096 tokens: tiles of 128 take 0.93 s, of 512
        1.43. A GPU or a TPU wants larger products.
        """
        return 128 if self.platform == "cpu" else 512

    @property
    def blockwise_min_length(self) -> int:
        """From so many queries and keys on attention goes tile by tile, if no kernel serves.

        At this length both ways take as long on a CPU; scores kept grow with its square.
        """
        return 1024 if self.platform == "cpu" else 4096

    def should_unroll(self, num_layers: int) -> bool:
        """Whether a loop over `num_layers` is unrolled: faster steps for slower compiles."""
        return num_layers <= 16
