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


ATTAINABLE_FRACTION = 0.8
"""Share of the peak that one large product attains: 790 of 989 TFLOP/s on an H200 (measured)."""


TPU_ATTAINABLE_FRACTION = 0.9
"""The same on a TPU. With less, the roofline would be below what is published: 66.86% MFU on v5e
with full rematerialization is 89% of the peak with what is computed again."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator."""

    name: str
    """As targets and prices call it."""
    device_kind: str
    """As JAX calls it."""
    platform: Platform
    bf16_flops_per_second: float
    """Operations a second, products of bfloat16 with sums in float32."""
    memory_bytes: int
    """Bytes that a program can have."""
    memory_bandwidth: float
    """Bytes a second between memory and chip."""
    link_bandwidth: float
    """Bytes a second that a chip sends to its neighbours, over all links together."""
    chips_per_host: int
    """Chips of one host."""
    network_bandwidth: float
    """Bytes a second that a chip sends beyond its links, through the network."""
    torus_dimensions: int = 0
    """Of the torus that links make; 0: all chips of a host reach each other alike."""
    largest_slice: tuple[int, ...] = ()
    """The largest slice."""
    host_bandwidth: float = 64e9
    """Bytes a second, in one direction, between a chip and the memory of its host."""
    hop_latency: float = 1e-6
    """Seconds from one chip to the next."""
    compute_capability: str = ""
    """Compute capability of a GPU."""
    libtpu_chip_config: str = ""
    """How libtpu calls it that both cores of a chip are one device, if it does not take it so."""

    attainable_fraction: float = ATTAINABLE_FRACTION
    """Fraction of the peak that products reach at best."""
    fp32_flops_per_second: float | None = None
    """Operations a second of products of float32; None: as many as of bfloat16."""
    fp16_flops_per_second: float | None = None
    """The same of float16."""

    def peak_flops_per_second(self, dtype: DType) -> float:
        """Operations a second of products of a dtype."""
        own = {"float32": self.fp32_flops_per_second, "float16": self.fp16_flops_per_second}.get(
            dtype
        )
        return self.bf16_flops_per_second if own is None else own

    @property
    def link_bandwidth_per_dimension(self) -> float:
        """Bytes a second of a ring along one dimension, both ways round together."""
        return self.link_bandwidth / max(self.torus_dimensions, 1)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            device_kind="TPU v4",
            platform="tpu",
            bf16_flops_per_second=275e12,
            attainable_fraction=TPU_ATTAINABLE_FRACTION,
            memory_bytes=int(30.75 * GIB),
            memory_bandwidth=1228e9,
            link_bandwidth=300e9,
            chips_per_host=4,
            network_bandwidth=6.25e9,
            host_bandwidth=16e9,
            torus_dimensions=3,
            largest_slice=(16, 16, 16),
            libtpu_chip_config="megacore",
        ),
        Chip(
            name="v5e",
            device_kind="TPU v5 lite",
            platform="tpu",
            bf16_flops_per_second=197e12,
            attainable_fraction=TPU_ATTAINABLE_FRACTION,
            memory_bytes=int(15.75 * GIB),
            memory_bandwidth=819e9,
            link_bandwidth=200e9,
            chips_per_host=8,
            network_bandwidth=3.1e9,
            host_bandwidth=16e9,
            torus_dimensions=2,
            largest_slice=(16, 16),
        ),
        Chip(
            name="v5p",
            device_kind="TPU v5",
            platform="tpu",
            bf16_flops_per_second=459e12,
            attainable_fraction=TPU_ATTAINABLE_FRACTION,
            memory_bytes=int(95.74 * GIB),
            memory_bandwidth=2765e9,
            link_bandwidth=600e9,
            chips_per_host=4,
            network_bandwidth=6.25e9,
            host_bandwidth=16e9,
            torus_dimensions=3,
            largest_slice=(16, 16, 24),
        ),
        Chip(
            name="v6e",
            device_kind="TPU v6 lite",
            platform="tpu",
            bf16_flops_per_second=918e12,
            attainable_fraction=TPU_ATTAINABLE_FRACTION,
            memory_bytes=int(31.24 * GIB),
            memory_bandwidth=1638e9,
            link_bandwidth=400e9,
            chips_per_host=8,
            network_bandwidth=12.5e9,
            host_bandwidth=32e9,
            torus_dimensions=2,
            largest_slice=(16, 16),
        ),
        Chip(
            name="t4",
            device_kind="Tesla T4",
            platform="gpu",
            bf16_flops_per_second=8.1e12,  # its tensor cores have no bfloat16: it is computed in float32
            memory_bytes=15_828_320_256,
            memory_bandwidth=320e9,
            link_bandwidth=16e9,  # PCIe 3.0
            chips_per_host=4,
            network_bandwidth=3.1e9,
            host_bandwidth=16e9,
            hop_latency=10e-6,
            compute_capability="7.5",
            fp32_flops_per_second=8.1e12,
            fp16_flops_per_second=65e12,
        ),
        Chip(
            name="l4",
            device_kind="NVIDIA L4",
            platform="gpu",
            bf16_flops_per_second=121e12,
            memory_bytes=23_580_639_232,
            memory_bandwidth=300e9,
            link_bandwidth=32e9,  # PCIe 4.0
            chips_per_host=8,
            network_bandwidth=1.6e9,
            host_bandwidth=32e9,
            hop_latency=10e-6,
            compute_capability="8.9",
            fp32_flops_per_second=60.5e12,
        ),
        Chip(
            name="a100",
            device_kind="NVIDIA A100-SXM4-40GB",
            platform="gpu",
            bf16_flops_per_second=312e12,
            memory_bytes=42_298_834_944,
            memory_bandwidth=1555e9,
            link_bandwidth=300e9,
            chips_per_host=8,
            network_bandwidth=1.6e9,
            host_bandwidth=32e9,
            hop_latency=5e-6,
            compute_capability="8.0",
            fp32_flops_per_second=156e12,
        ),
        Chip(
            name="h100",
            device_kind="NVIDIA H100 80GB HBM3",
            platform="gpu",
            bf16_flops_per_second=989.4e12,
            memory_bytes=84_942_979_072,
            memory_bandwidth=3352e9,
            link_bandwidth=450e9,
            chips_per_host=8,
            network_bandwidth=50e9,
            compute_capability="9.0",
            hop_latency=5e-6,
            fp32_flops_per_second=494.7e12,
        ),
        Chip(
            name="h200",
            device_kind="NVIDIA H200",
            platform="gpu",
            bf16_flops_per_second=989.4e12,
            memory_bytes=150_000_000_000,
            memory_bandwidth=4800e9,
            link_bandwidth=450e9,
            chips_per_host=8,
            network_bandwidth=50e9,
            compute_capability="9.0",
            hop_latency=5e-6,
            fp32_flops_per_second=494.7e12,
        ),
        Chip(
            name="b200",
            device_kind="NVIDIA B200",
            platform="gpu",
            bf16_flops_per_second=2250e12,
            memory_bytes=191_514_411_008,
            memory_bandwidth=7672e9,
            link_bandwidth=900e9,
            chips_per_host=8,
            network_bandwidth=50e9,
            compute_capability="10.0",
            hop_latency=5e-6,
            fp32_flops_per_second=1125e12,
        ),
    )
}
"""By name. The network is 50 Gbit/s a chip for v4 and v5p, 200 Gbit/s for eight v5e, 400 Gbit/s a
GPU; 100 Gbit/s for four T4, eight L4 or eight A100, as Google rents them. T4, L4 and the A100 with
40 GB are the GPUs of Colab and Kaggle."""
