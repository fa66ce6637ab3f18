"""Peak rates, memory and links of each accelerator, as its maker states them.

TPU figures are Google's (docs.cloud.google.com/tpu/docs/v4, /v5e, /v5p, /v6e, /tpu7x); its
bandwidth between chips, where it is for both directions of all links together, counts half. GPU
figures are from NVIDIA's data sheets (HGX B300, GB200 NVL72 and GB300 NVL72 for the newest), for
dense matmuls without sparsity.

float32 matmuls run at JAX's default precision (docs.jax.dev/en/latest/201/precision.html): rounded
to bfloat16 on a TPU, so at the bfloat16 rate, and to TF32 on these GPUs. The memory of a program is
the compiler's own limit where it states one. Host links: 16 lanes of PCIe 5.0 for GPUs (128 GB/s in
the data sheets, both directions together); for TPUs the figures of Austin et al. 2025 ("How to
Scale Your Model", part 2).
"""

import dataclasses

from transformer.hardware import Platform
from transformer.precision import DType

GIB = 2**30


ATTAINABLE_FRACTION = 0.8
"""Fraction of the peak that one large matmul reaches: 790 of 989 TFLOP/s on an H200 (measured)."""


TPU_ATTAINABLE_FRACTION = 0.9
"""Fraction of the peak that matmuls reach on a TPU. A lower value would put the roofline below a
published run: 66.86% MFU on v5e with full rematerialization is 89% of the peak when recomputation
counts."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator."""

    name: str
    """Name in targets and price tables."""
    device_kind: str
    """JAX's `device_kind`."""
    platform: Platform
    bf16_flops_per_second: float
    """Peak of bfloat16 matmuls that accumulate in float32."""
    memory_bytes: int
    """Bytes that a program can use."""
    memory_bandwidth: float
    """Bytes per second between memory and chip."""
    link_bandwidth: float
    """Bytes per second that a chip sends to its neighbours, over all links together."""
    chips_per_host: int
    """Chips of one host; for GPUs, those that NVLink connects directly."""
    network_bandwidth: float
    """Bytes per second that a chip sends over the network between hosts or slices."""
    devices_per_chip: int = 1
    """JAX devices of one chip. Peak rates, memory and its bandwidth are those of one device."""
    torus_dimensions: int = 0
    """Dimensions of the torus of links; 0: all chips of a host are directly connected."""
    largest_slice: tuple[int, ...] = ()
    """Shape of the largest slice."""
    host_bandwidth: float = 64e9
    """Bytes per second, in one direction, between a chip and its host's memory."""
    hop_latency: float = 1e-6
    """Seconds from one chip to the next."""
    compute_capability: str = ""
    """Compute capability of a GPU."""
    libtpu_chip_config: str = ""
    """libtpu's name of the configuration in which both cores of a chip are one device; empty:
    default."""

    attainable_fraction: float = ATTAINABLE_FRACTION
    """Fraction of the peak that matmuls reach at best."""
    fp32_flops_per_second: float | None = None
    """Peak of float32 matmuls; None: as bfloat16."""
    fp16_flops_per_second: float | None = None
    """Peak of float16 matmuls; None: as bfloat16."""

    def peak_flops_per_second(self, dtype: DType) -> float:
        """Return the peak of matmuls in a dtype."""
        own = {"float32": self.fp32_flops_per_second, "float16": self.fp16_flops_per_second}.get(
            dtype
        )
        return self.bf16_flops_per_second if own is None else own

    @property
    def link_bandwidth_per_dimension(self) -> float:
        """Return the bytes per second of a ring along one dimension, both directions together."""
        return self.link_bandwidth / max(self.torus_dimensions, 1)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            # libtpu fuses the two cores of a v4 chip into one device only if told so ("megacore").
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
            # A chip is two devices, whose direct link is six times as fast as the links along one
            # dimension of the torus. The memory is what libtpu 0.0.42 states for a device.
            name="tpu7x",
            device_kind="TPU7x",
            platform="tpu",
            bf16_flops_per_second=2307e12 / 2,
            attainable_fraction=TPU_ATTAINABLE_FRACTION,
            memory_bytes=int(94.75 * GIB),
            memory_bandwidth=7380e9 / 2,
            link_bandwidth=600e9,
            chips_per_host=4,
            network_bandwidth=12.5e9,
            host_bandwidth=16e9,  # an estimate: that of v6e for a chip
            devices_per_chip=2,
            torus_dimensions=3,
            largest_slice=(16, 24, 24),
        ),
        Chip(
            name="t4",
            device_kind="Tesla T4",
            platform="gpu",
            bf16_flops_per_second=8.1e12,  # no bfloat16 tensor cores: computed in float32
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
            name="a100-80gb",
            device_kind="NVIDIA A100-SXM4-80GB",
            platform="gpu",
            bf16_flops_per_second=312e12,
            memory_bytes=85_100_068_864,
            memory_bandwidth=2039e9,
            link_bandwidth=300e9,
            chips_per_host=8,
            network_bandwidth=25e9,
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
        Chip(
            name="b300",
            device_kind="NVIDIA B300",
            platform="gpu",
            bf16_flops_per_second=2250e12,
            memory_bytes=297_021_865_984,
            memory_bandwidth=7936e9,
            link_bandwidth=900e9,
            chips_per_host=8,
            network_bandwidth=100e9,
            host_bandwidth=128e9,  # PCIe 6.0
            compute_capability="10.3",
            hop_latency=5e-6,
            fp32_flops_per_second=1125e12,
        ),
        Chip(
            # NVLink connects the 72 GPUs of a rack. Host links of GB200 and GB300: a Grace CPU
            # sends 450 GB/s to its two GPUs.
            name="gb200",
            device_kind="NVIDIA GB200",
            platform="gpu",
            bf16_flops_per_second=2500e12,
            memory_bytes=197_897_748_480,
            memory_bandwidth=7928e9,
            link_bandwidth=900e9,
            chips_per_host=72,
            network_bandwidth=50e9,
            host_bandwidth=225e9,
            compute_capability="10.0",
            hop_latency=5e-6,
            fp32_flops_per_second=1250e12,
        ),
        Chip(
            name="gb300",
            device_kind="NVIDIA GB300",
            platform="gpu",
            bf16_flops_per_second=2500e12,
            memory_bytes=297_021_079_552,
            memory_bandwidth=7928e9,
            link_bandwidth=900e9,
            chips_per_host=72,
            network_bandwidth=100e9,
            host_bandwidth=225e9,
            compute_capability="10.3",
            hop_latency=5e-6,
            fp32_flops_per_second=1250e12,
        ),
    )
}
"""Chips by name. T4, L4 and the A100 with 40 GB are the GPUs of Colab and Kaggle.

Network per chip: 50 Gbit/s for v4 and v5p, 100 Gbit/s for v6e and tpu7x; 200 Gbit/s for eight v5e;
400 Gbit/s per GPU from the H100 on, and 800 Gbit/s for B300 and GB300; 200 Gbit/s per A100 with 80
GB, as in a DGX; 100 Gbit/s for four T4, eight L4 or eight A100, as Google rents them."""
