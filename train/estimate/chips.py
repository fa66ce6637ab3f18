"""Accelerators: peak rates, memory and links as their makers state them, and published runs."""

import csv
import dataclasses
import importlib.resources
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from transformer.hardware import Platform
from transformer.precision import DType

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


def read_chips() -> Iterator[Chip]:
    """Yield the chips of the table `chips.csv`, which has units and sources."""
    table = importlib.resources.files("train.estimate") / "chips.csv"
    lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
    for cells in csv.DictReader(lines):
        row = {name.strip(): cell.strip() for name, cell in cells.items()}
        platform = cast(Platform, row["platform"])
        slice_shape = tuple(map(int, row["slice"].split("x"))) if row["slice"] else ()
        yield Chip(
            name=row["name"],
            device_kind=row["device_kind"],
            platform=platform,
            bf16_flops_per_second=float(f"{row['bf16']}e12"),
            fp32_flops_per_second=float(f"{row['fp32']}e12"),
            fp16_flops_per_second=float(f"{row['fp16']}e12"),
            attainable_fraction=TPU_ATTAINABLE_FRACTION
            if platform == "tpu"
            else ATTAINABLE_FRACTION,
            memory_bytes=int(row["memory_bytes"]),
            memory_bandwidth=float(f"{row['bandwidth']}e9"),
            link_bandwidth=float(f"{row['link']}e9"),
            network_bandwidth=float(f"{row['network']}e9"),
            host_bandwidth=float(f"{row['host']}e9"),
            hop_latency=float(f"{row['hop']}e-6"),
            chips_per_host=int(row["chips_per_host"]),
            devices_per_chip=int(row["devices"]),
            torus_dimensions=len(slice_shape),
            largest_slice=slice_shape,
            compute_capability=row["capability"],
            libtpu_chip_config=row["libtpu_config"],
        )


CHIPS = {chip.name: chip for chip in read_chips()}
"""Chips by name."""


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
"""Efficiency of a CPU: the median of seven timed steps over their estimates
(docs/results/speed_notes.md, `bench/drills/plan_time.py`)."""
