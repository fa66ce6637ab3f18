"""Hardware as a value: code that depends on it takes a `Hardware` and never asks JAX.

So a model can be planned, traced and tested for hardware that is not attached.
"""

import dataclasses
from typing import Literal

from transformer.validation import PositiveInt, Settings

Platform = Literal["cpu", "gpu", "tpu"]


@dataclasses.dataclass(frozen=True)
class Hardware(Settings):
    """Hardware that a model is compiled for; it resolves every `auto` setting."""

    platform: Platform = "cpu"
    """Name of the JAX backend: cpu, gpu or tpu."""
    kind: str = ""
    """Device name as in `jax.Device.device_kind`, such as `TPU v5p` or `NVIDIA H200`."""
    count: PositiveInt = 1
    """Number of devices."""
    compute_capability: str = ""
    """GPU architecture as JAX reports it: `9.0` for an H100, `gfx942` for an AMD MI300. Empty if
    unknown."""
    broken_kernels: tuple[tuple[str, str], ...] = ()
    """(attention backend, reason) of kernels that do not compile here: `auto` skips them."""
    is_attached: bool = True
    """False: programs are traced and never compiled, on a machine without this hardware. Attention
    kernels, which can be traced only on their own hardware, are replaced by `blockwise`."""

    @property
    def compute_dtype(self) -> Literal["float32", "bfloat16", "float16"]:
        """Fastest dtype of matrix products that trains without loss of quality."""
        if self.platform == "cpu":
            return "float32"
        capability = self.nvidia_capability
        # Tensor cores before Ampere (compute capability 8) have float16 but no bfloat16.
        return "float16" if capability is not None and capability < 8 else "bfloat16"

    @property
    def nvidia_capability(self) -> float | None:
        """Compute capability of an NVIDIA GPU; None for other hardware, and if it is unknown."""
        capability = self.compute_capability
        if self.platform != "gpu" or not capability or capability.startswith("gfx"):
            return None
        return float(capability)

    @property
    def tile_size(self) -> int:
        """Queries, and keys, of one tile of blockwise attention.

        Measured forward and backward, causal. On a CPU at 4,096 tokens: 0.93 s with tiles of 128,
        1.43 s with 512. On an H200 at 16,384 tokens: 81 ms with tiles of 512, 53 with 1,024. Not
        measured on a TPU.
        """
        return {"cpu": 128, "gpu": 1024, "tpu": 512}[self.platform]

    @property
    def blockwise_min_length(self) -> int:
        """Sequence length from which `auto` prefers blockwise attention, if no kernel is available.

        At this length both take equally long on a CPU, and on an H200 tiles take 0.7 of the time;
        the memory of full scores grows with the square of the length. Not measured on a TPU.
        """
        return 4096 if self.platform == "tpu" else 1024
