"""Accelerators: peak rates, memory and links as their makers state them, and published runs.

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
from typing import Any, NamedTuple

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


V4 = Chip(
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
)
V5E = Chip(
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
)
V5P = dataclasses.replace(
    V4,
    name="v5p",
    device_kind="TPU v5",
    bf16_flops_per_second=459e12,
    memory_bytes=int(95.74 * GIB),
    memory_bandwidth=2765e9,
    link_bandwidth=600e9,
    largest_slice=(16, 16, 24),
    libtpu_chip_config="",
)
V6E = dataclasses.replace(
    V5E,
    name="v6e",
    device_kind="TPU v6 lite",
    bf16_flops_per_second=918e12,
    memory_bytes=int(31.24 * GIB),
    memory_bandwidth=1638e9,
    link_bandwidth=400e9,
    network_bandwidth=12.5e9,
    host_bandwidth=32e9,
)
TPU7X = dataclasses.replace(
    # A chip is two devices, whose direct link is six times as fast as the links along one
    # dimension of the torus. The memory is what libtpu 0.0.42 states for a device. The host's link
    # is an estimate: that of v6e for a chip.
    V5P,
    name="tpu7x",
    device_kind="TPU7x",
    bf16_flops_per_second=2307e12 / 2,
    memory_bytes=int(94.75 * GIB),
    memory_bandwidth=7380e9 / 2,
    network_bandwidth=12.5e9,
    devices_per_chip=2,
    largest_slice=(16, 24, 24),
)
T4 = Chip(
    name="t4",
    device_kind="Tesla T4",
    platform="gpu",
    bf16_flops_per_second=8.1e12,  # no bfloat16 tensor cores: computed in float32
    fp32_flops_per_second=8.1e12,
    fp16_flops_per_second=65e12,
    memory_bytes=15_828_320_256,
    memory_bandwidth=320e9,
    link_bandwidth=16e9,  # PCIe 3.0
    chips_per_host=4,
    network_bandwidth=3.1e9,
    host_bandwidth=16e9,
    hop_latency=10e-6,
    compute_capability="7.5",
)
L4 = Chip(
    name="l4",
    device_kind="NVIDIA L4",
    platform="gpu",
    bf16_flops_per_second=121e12,
    fp32_flops_per_second=60.5e12,
    memory_bytes=23_580_639_232,
    memory_bandwidth=300e9,
    link_bandwidth=32e9,  # PCIe 4.0
    chips_per_host=8,
    network_bandwidth=1.6e9,
    host_bandwidth=32e9,
    hop_latency=10e-6,
    compute_capability="8.9",
)
A100 = Chip(
    name="a100",
    device_kind="NVIDIA A100-SXM4-40GB",
    platform="gpu",
    bf16_flops_per_second=312e12,
    fp32_flops_per_second=156e12,
    memory_bytes=42_298_834_944,
    memory_bandwidth=1555e9,
    link_bandwidth=300e9,
    chips_per_host=8,
    network_bandwidth=1.6e9,
    host_bandwidth=32e9,
    hop_latency=5e-6,
    compute_capability="8.0",
)
A100_80GB = dataclasses.replace(
    A100,
    name="a100-80gb",
    device_kind="NVIDIA A100-SXM4-80GB",
    memory_bytes=85_100_068_864,
    memory_bandwidth=2039e9,
    network_bandwidth=25e9,
)
H100 = Chip(
    name="h100",
    device_kind="NVIDIA H100 80GB HBM3",
    platform="gpu",
    bf16_flops_per_second=989.4e12,
    fp32_flops_per_second=494.7e12,
    memory_bytes=84_942_979_072,
    memory_bandwidth=3352e9,
    link_bandwidth=450e9,
    chips_per_host=8,
    network_bandwidth=50e9,
    hop_latency=5e-6,
    compute_capability="9.0",
)
H200 = dataclasses.replace(
    H100,
    name="h200",
    device_kind="NVIDIA H200",
    memory_bytes=150_000_000_000,
    memory_bandwidth=4800e9,
)
B200 = dataclasses.replace(
    H100,
    name="b200",
    device_kind="NVIDIA B200",
    bf16_flops_per_second=2250e12,
    fp32_flops_per_second=1125e12,
    memory_bytes=191_514_411_008,
    memory_bandwidth=7672e9,
    link_bandwidth=900e9,
    compute_capability="10.0",
)
B300 = dataclasses.replace(
    B200,
    name="b300",
    device_kind="NVIDIA B300",
    memory_bytes=297_021_865_984,
    memory_bandwidth=7936e9,
    network_bandwidth=100e9,
    host_bandwidth=128e9,  # PCIe 6.0
    compute_capability="10.3",
)
GB200 = dataclasses.replace(
    # NVLink connects the 72 GPUs of a rack. Host links of GB200 and GB300: a Grace CPU sends
    # 450 GB/s to its two GPUs.
    B200,
    name="gb200",
    device_kind="NVIDIA GB200",
    bf16_flops_per_second=2500e12,
    fp32_flops_per_second=1250e12,
    memory_bytes=197_897_748_480,
    memory_bandwidth=7928e9,
    chips_per_host=72,
    host_bandwidth=225e9,
)
GB300 = dataclasses.replace(
    GB200,
    name="gb300",
    device_kind="NVIDIA GB300",
    memory_bytes=297_021_079_552,
    network_bandwidth=100e9,
    compute_capability="10.3",
)
CHIPS = {
    chip.name: chip
    for chip in (
        *(V4, V5E, V5P, V6E, TPU7X),
        *(T4, L4, A100, A100_80GB, H100, H200, B200, B300, GB200, GB300),
    )
}
"""Chips by name. T4, L4 and the A100 with 40 GB are the GPUs of Colab and Kaggle.

Network per chip: 50 Gbit/s for v4 and v5p, 100 Gbit/s for v6e and tpu7x; 200 Gbit/s for eight v5e;
400 Gbit/s per GPU from the H100 on, and 800 Gbit/s for B300 and GB300; 200 Gbit/s per A100 with 80
GB, as in a DGX; 100 Gbit/s for four T4, eight L4 or eight A100, as Google rents them."""


class PublishedRun(NamedTuple):
    """A published training run with its MFU and source.

    Published figures count all T x T scores of causal attention; this package counts the visible
    ones (`StepTime.model_flops`). `mfu_causal_scores` converts.
    """

    mfu: float
    """MFU as published, with all T x T scores counted."""
    run: str
    """Model, hardware, and who published it."""
    url: str
    mfu_bound: float
    """Roofline MFU for `plan_arguments`, with visible scores counted."""
    full_scores_flops_ratio: float
    """FLOPs with all T x T scores over FLOPs with visible scores."""
    plan_arguments: str
    """Arguments of `plan` for the same run: config, target, settings."""

    @property
    def mfu_causal_scores(self) -> float:
        """Return the published MFU with visible scores counted."""
        return self.mfu / self.full_scores_flops_ratio

    @property
    def efficiency(self) -> float:
        """Return the fraction of the roofline that the run reached."""
        return self.mfu_causal_scores / self.mfu_bound

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for `--json`."""
        return {"mfu": self.mfu, "run": self.run, "url": self.url}


_MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs"

_MPT_7B = PublishedRun(
    mfu=0.6423,
    run="MPT-7B on 8 A100 with 80 GB (MosaicML, llm-foundry, MPT Training Benchmarks, 2023)",
    url="https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking",
    mfu_bound=0.8,
    full_scores_flops_ratio=1.0388,
    plan_arguments="gpt3:6.7b a100-80gb:8 --model.vocab-size 50432 --batch-size 96 "
    "--grad-accum-steps 2 --model.remat none --mesh.data 1 --mesh.fsdp 8",
)

PUBLISHED = {
    "v4": PublishedRun(
        mfu=0.567,
        run="22B on 64 v4 (Google, MaxText, High Performance Model Configs on TPU v4, 2023)",
        url=f"{_MAXTEXT}/tpu/v4",
        mfu_bound=0.6765,
        full_scores_flops_ratio=1.0268,
        plan_arguments="gpt3:175b v4:4x4x4 --model.vocab-size 32000 --model.d-model 6144 "
        "--model.num-layers 48 --model.layer-pattern.0.mixer.num-heads 24 "
        "--model.layer-pattern.0.mixer.head-dim 256 "
        "--batch-size 832 --grad-accum-steps 1 --model.remat full --mesh.data 1 --mesh.fsdp 64",
    ),
    "v5e": PublishedRun(
        mfu=0.6686,
        run="32B on 256 v5e "
        "(Google, MaxText, High Performance Model Training Configs on TPU v5e, 2023)",
        url=f"{_MAXTEXT}/tpu/v5e",
        mfu_bound=0.6766,
        full_scores_flops_ratio=1.019,
        plan_arguments="llama:2-70b v5e:16x16 --model.num-layers 32 --data.sequence-length 2048 "
        "--batch-size 1024 --grad-accum-steps 1 --model.remat full --mesh.data 1 --mesh.fsdp 256",
    ),
    "v5p": PublishedRun(
        mfu=0.7147,
        run="32B on 64 v5p (Google, MaxText, High Performance Model Configs on TPU v5p, 2023)",
        url=f"{_MAXTEXT}/tpu/v5p",
        mfu_bound=0.7509,
        full_scores_flops_ratio=1.019,
        plan_arguments="llama:2-70b v5p:4x4x4 --model.num-layers 32 --data.sequence-length 2048 "
        "--batch-size 384 --grad-accum-steps 1 --model.remat dots --mesh.data 1 --mesh.fsdp 16 "
        "--mesh.tensor 4",
    ),
    "v6e": PublishedRun(
        mfu=0.5033,
        run="Llama 3.1 70B on 256 v6e (Google, MaxText, Optimized models tiering, 2025)",
        url="https://maxtext.readthedocs.io/en/latest/reference/models/tiering.html",
        mfu_bound=0.5166,
        full_scores_flops_ratio=1.0717,
        plan_arguments="llama:3.1-70b v6e:16x16 --batch-size 1280 --grad-accum-steps 1 "
        "--model.remat offload --mesh.data 1 --mesh.fsdp 256",
    ),
    "a100": _MPT_7B._replace(
        plan_arguments=_MPT_7B.plan_arguments.replace("a100-80gb", "a100"),
    ),
    "a100-80gb": _MPT_7B,
    "h100": PublishedRun(
        mfu=0.497,  # 492 of 989.4 TFLOP/s
        run="Llama 2 7B on 8 H100 "
        "(Google, MaxText, High Performance Model Configs on A3 GPU, 2024)",
        url=f"{_MAXTEXT}/gpu/a3/llama_2_7b",
        mfu_bound=0.7804,
        full_scores_flops_ratio=1.0751,
        plan_arguments="llama:2-7b h100:8 --batch-size 32 --grad-accum-steps 1 --model.remat dots "
        "--mesh.data 1 --mesh.fsdp 8",
    ),
}
"""Best published run by chip. Settings follow the run as far as they are published; `dots` stands
for MaxText's `minimal` policy, which saves the outputs of weight matmuls."""


FALLBACK_CHIPS = {"gpu": "h100", "tpu": "v6e"}
"""Chip whose run is used for others of its platform without a published one. Of the GPUs that have
one, the H100 reached the smallest fraction of its roofline; of the TPUs, v6e the smallest MFU."""


CPU_EFFICIENCY = 0.73
"""Efficiency of a CPU: the median of seven timed steps over their estimates (docs/plan.md,
`bench/drills/plan_time.py`)."""
