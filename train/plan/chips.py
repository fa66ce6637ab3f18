"""What is known of each accelerator: its speed, memory and links, as its maker states them.

Figures of TPUs are those of Google's pages (docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e),
where bandwidth between chips is given for both directions of all links together; those of GPUs are
from NVIDIA's data sheets, dense products without sparsity. Products of float32 are those that JAX
makes unless told otherwise (docs.jax.dev/en/latest/201/precision.html): rounded to bfloat16 on a
TPU, so as fast as those, and to TF32 on these GPUs. The memory that a program may take is what the
compiler itself allows where it says so. To its host a GPU has PCIe 5.0 with 16 lanes (128 GB/s in
the data sheets, both directions together), a TPU what Austin et al. 2025 give ("How to Scale Your
Model", part 2).
"""

import dataclasses

from transformer.hardware import Platform
from transformer.precision import DType

GIB = 2**30

ATTAINED = 0.8
"""Share of the peak that one large product attains: 790 of 989 TFLOP/s on an H200 (measured)."""

ATTAINED_TPU = 0.9
"""The same on a TPU. With less, the roofline would be below what is published: 66.86% MFU on v5e
with full rematerialization is 89% of the peak with what is computed again."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator."""

    name: str
    """As targets and prices call it."""
    kind: str
    """As JAX calls it."""
    platform: Platform
    flops: float
    """Operations a second, products of bfloat16 with sums in float32."""
    memory: int
    """Bytes that a program can have."""
    bandwidth: float
    """Bytes a second between memory and chip."""
    links: float
    """Bytes a second that a chip sends to its neighbours, over all links together."""
    per_host: int
    """Chips of one host."""
    network: float
    """Bytes a second that a chip sends beyond its links, through the network."""
    dimensions: int = 0
    """Of the torus that links make; 0: all chips of a host reach each other alike."""
    largest: tuple[int, ...] = ()
    """The largest slice."""
    host: float = 64e9
    """Bytes a second, in one direction, between a chip and the memory of its host."""
    latency: float = 1e-6
    """Seconds from one chip to the next."""
    capability: str = ""
    """Compute capability of a GPU."""
    cores: str = ""
    """How libtpu calls it that both cores of a chip are one device, if it does not take it so."""

    attained: float = ATTAINED
    """Fraction of the peak that products reach at best."""
    flops32: float | None = None
    """Operations a second of products of float32; None: as many as of bfloat16."""
    flops16: float | None = None
    """The same of float16."""

    def peak(self, dtype: DType) -> float:
        """Operations a second of products of a dtype."""
        own = {"float32": self.flops32, "float16": self.flops16}.get(dtype)
        return self.flops if own is None else own

    @property
    def link(self) -> float:
        """Bytes a second of a ring along one dimension, both ways round together."""
        return self.links / max(self.dimensions, 1)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            kind="TPU v4",
            platform="tpu",
            flops=275e12,
            attained=ATTAINED_TPU,
            memory=int(30.75 * GIB),
            bandwidth=1228e9,
            links=300e9,
            per_host=4,
            network=6.25e9,
            host=16e9,
            dimensions=3,
            largest=(16, 16, 16),
            cores="megacore",
        ),
        Chip(
            name="v5e",
            kind="TPU v5 lite",
            platform="tpu",
            flops=197e12,
            attained=ATTAINED_TPU,
            memory=int(15.75 * GIB),
            bandwidth=819e9,
            links=200e9,
            per_host=8,
            network=3.1e9,
            host=16e9,
            dimensions=2,
            largest=(16, 16),
        ),
        Chip(
            name="v5p",
            kind="TPU v5",
            platform="tpu",
            flops=459e12,
            attained=ATTAINED_TPU,
            memory=int(95.74 * GIB),
            bandwidth=2765e9,
            links=600e9,
            per_host=4,
            network=6.25e9,
            host=16e9,
            dimensions=3,
            largest=(16, 16, 24),
        ),
        Chip(
            name="v6e",
            kind="TPU v6 lite",
            platform="tpu",
            flops=918e12,
            attained=ATTAINED_TPU,
            memory=int(31.24 * GIB),
            bandwidth=1638e9,
            links=400e9,
            per_host=8,
            network=12.5e9,
            host=32e9,
            dimensions=2,
            largest=(16, 16),
        ),
        Chip(
            name="t4",
            kind="Tesla T4",
            platform="gpu",
            flops=8.1e12,  # its tensor cores have no bfloat16: it is computed in float32
            memory=15_828_320_256,
            bandwidth=320e9,
            links=16e9,  # PCIe 3.0
            per_host=4,
            network=3.1e9,
            host=16e9,
            latency=10e-6,
            capability="7.5",
            flops32=8.1e12,
            flops16=65e12,
        ),
        Chip(
            name="l4",
            kind="NVIDIA L4",
            platform="gpu",
            flops=121e12,
            memory=23_580_639_232,
            bandwidth=300e9,
            links=32e9,  # PCIe 4.0
            per_host=8,
            network=1.6e9,
            host=32e9,
            latency=10e-6,
            capability="8.9",
            flops32=60.5e12,
        ),
        Chip(
            name="a100",
            kind="NVIDIA A100-SXM4-40GB",
            platform="gpu",
            flops=312e12,
            memory=42_298_834_944,
            bandwidth=1555e9,
            links=300e9,
            per_host=8,
            network=1.6e9,
            host=32e9,
            latency=5e-6,
            capability="8.0",
            flops32=156e12,
        ),
        Chip(
            name="h100",
            kind="NVIDIA H100 80GB HBM3",
            platform="gpu",
            flops=989.4e12,
            memory=84_942_979_072,
            bandwidth=3352e9,
            links=450e9,
            per_host=8,
            network=50e9,
            capability="9.0",
            latency=5e-6,
            flops32=494.7e12,
        ),
        Chip(
            name="h200",
            kind="NVIDIA H200",
            platform="gpu",
            flops=989.4e12,
            memory=150_000_000_000,
            bandwidth=4800e9,
            links=450e9,
            per_host=8,
            network=50e9,
            capability="9.0",
            latency=5e-6,
            flops32=494.7e12,
        ),
        Chip(
            name="b200",
            kind="NVIDIA B200",
            platform="gpu",
            flops=2250e12,
            memory=191_514_411_008,
            bandwidth=7672e9,
            links=900e9,
            per_host=8,
            network=50e9,
            capability="10.0",
            latency=5e-6,
            flops32=1125e12,
        ),
    )
}
"""By name. The network is 50 Gbit/s a chip for v4 and v5p, 200 Gbit/s for eight v5e, 400 Gbit/s a
GPU; 100 Gbit/s for four T4, eight L4 or eight A100, as Google rents them. T4, L4 and the A100 with
40 GB are the GPUs of Colab and Kaggle."""
