"""Price of a chip hour, and step time expected from the best published training efficiency.

The roofline (`train/estimate/roofline.py`) is a bound: kernel launches, norms and stragglers cost
nothing in it. Only measurements tell how close a real trainer comes. So each chip has the run with
the best published MFU of a dense bfloat16 model, and the same roofline is applied to that run. The
ratio of the two is the chip's `efficiency`; a plan expects

    expected MFU = min(efficiency * bound of this plan, published MFU).

The ratio, because a step that is bound by memory or communication never reaches the MFU of a large
dense model. The minimum, because a plan should not promise more than a published run.

Published figures count all T x T scores of causal attention; this package counts the visible ones
(`StepTime.model_flops`). `PublishedRun.mfu_causal_scores` converts.
"""

import dataclasses
import importlib.resources
import tomllib
from typing import Any, NamedTuple

from train.errors import UserError, as_damaged, as_user_error
from train.estimate.chips import CHIPS, Chip
from train.files import expand_path

MAX_DOLLARS_PER_HOUR = 1e9
"""Upper limit of a valid price."""


def chip_price(chip: Chip, path: str = "") -> float:
    """Return US dollars per chip hour, from the user's table or the shipped one.

    Raises UserError if the file cannot be read or has no price for the chip.
    """
    price = load_prices(path).get(chip.name)
    if (
        isinstance(price, bool)
        or not isinstance(price, int | float)
        or not 0 <= price < MAX_DOLLARS_PER_HOUR
    ):
        raise UserError(
            f"prices {_source(path)}: has no price for {chip.name}; add a line like "
            f"{chip.name} = 1.20"
        )
    return float(price)


def load_prices(path: str = "") -> dict[str, Any]:
    """Return a price table, the shipped one without a path.

    Raises UserError if the file cannot be read or is not TOML.
    """
    source = _source(path)
    with as_user_error(source):
        data = _data(path)
    with as_damaged(f"prices {source}", "TOML", "write lines like v5e = 1.20"):
        return tomllib.loads(data.decode())


def _source(path: str) -> str:
    return path or "the table of prices"


def _data(path: str) -> bytes:
    if path:
        return expand_path(path).read_bytes()
    return (importlib.resources.files("train.estimate") / "prices.toml").read_bytes()


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A published training run with its MFU and source."""

    mfu: float
    """MFU as published, with all T x T scores counted."""
    model: str
    hardware: str
    organisation: str
    title: str
    year: int
    url: str
    plan_arguments: str
    """Arguments of `plan` for the same run: config, target, settings."""
    mfu_bound: float
    """Roofline MFU for `plan_arguments`, with visible scores counted."""
    full_scores_flops_ratio: float
    """FLOPs with all T x T scores over FLOPs with visible scores."""

    @property
    def mfu_causal_scores(self) -> float:
        """Return the published MFU with visible scores counted."""
        return self.mfu / self.full_scores_flops_ratio

    @property
    def efficiency(self) -> float:
        """Return the fraction of the roofline that the run reached."""
        return self.mfu_causal_scores / self.mfu_bound

    def citation(self) -> str:
        """Return one line for people."""
        return (
            f"{self.mfu:.1%} for {self.model} on {self.hardware} "
            f"({self.organisation}, {self.title}, {self.year})"
        )


_MAXTEXT_TABLES = "https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs"


_MPT_7B = PublishedRun(
    mfu=0.6423,
    model="MPT-7B",
    hardware="8 A100 with 80 GB",
    organisation="MosaicML",
    title="llm-foundry, MPT Training Benchmarks",
    year=2023,
    url="https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking",
    plan_arguments="gpt3:6.7b a100-80gb:8 --model.vocab-size 50432 --batch-size 96 "
    "--grad-accum-steps 2 --model.remat none --mesh.data 1 --mesh.fsdp 8",
    mfu_bound=0.8,
    full_scores_flops_ratio=1.0388,
)


PUBLISHED = {
    "v4": PublishedRun(
        mfu=0.567,
        model="22B",
        hardware="64 v4",
        organisation="Google",
        title="MaxText, High Performance Model Configs on TPU v4",
        year=2023,
        url=f"{_MAXTEXT_TABLES}/tpu/v4",
        plan_arguments="gpt3:175b v4:4x4x4 --model.vocab-size 32000 --model.d-model 6144 "
        "--model.num-layers 48 --model.layer-pattern.0.mixer.num-heads 24 "
        "--model.layer-pattern.0.mixer.head-dim 256 "
        "--batch-size 832 --grad-accum-steps 1 --model.remat full --mesh.data 1 --mesh.fsdp 64",
        mfu_bound=0.6765,
        full_scores_flops_ratio=1.0268,
    ),
    "v5e": PublishedRun(
        mfu=0.6686,
        model="32B",
        hardware="256 v5e",
        organisation="Google",
        title="MaxText, High Performance Model Training Configs on TPU v5e",
        year=2023,
        url=f"{_MAXTEXT_TABLES}/tpu/v5e",
        plan_arguments="llama:2-70b v5e:16x16 --model.num-layers 32 --data.sequence-length 2048 "
        "--batch-size 1024 --grad-accum-steps 1 --model.remat full --mesh.data 1 --mesh.fsdp 256",
        mfu_bound=0.6766,
        full_scores_flops_ratio=1.019,
    ),
    "v5p": PublishedRun(
        mfu=0.7147,
        model="32B",
        hardware="64 v5p",
        organisation="Google",
        title="MaxText, High Performance Model Configs on TPU v5p",
        year=2023,
        url=f"{_MAXTEXT_TABLES}/tpu/v5p",
        plan_arguments="llama:2-70b v5p:4x4x4 --model.num-layers 32 --data.sequence-length 2048 "
        "--batch-size 384 --grad-accum-steps 1 --model.remat dots --mesh.data 1 --mesh.fsdp 16 "
        "--mesh.tensor 4",
        mfu_bound=0.7509,
        full_scores_flops_ratio=1.019,
    ),
    "v6e": PublishedRun(
        mfu=0.5033,
        model="Llama 3.1 70B",
        hardware="256 v6e",
        organisation="Google",
        title="MaxText, Optimized models tiering",
        year=2025,
        url="https://maxtext.readthedocs.io/en/latest/reference/models/tiering.html",
        plan_arguments="llama:3.1-70b v6e:16x16 --batch-size 1280 --grad-accum-steps 1 "
        "--model.remat offload --mesh.data 1 --mesh.fsdp 256",
        mfu_bound=0.5166,
        full_scores_flops_ratio=1.0717,
    ),
    "a100": dataclasses.replace(
        _MPT_7B, plan_arguments=_MPT_7B.plan_arguments.replace("a100-80gb", "a100")
    ),
    "a100-80gb": _MPT_7B,
    "h100": PublishedRun(
        mfu=0.497,  # 492 of 989.4 TFLOP/s
        model="Llama 2 7B",
        hardware="8 H100",
        organisation="Google",
        title="MaxText, High Performance Model Configs on A3 GPU",
        year=2024,
        url=f"{_MAXTEXT_TABLES}/gpu/a3/llama_2_7b",
        plan_arguments="llama:2-7b h100:8 --batch-size 32 --grad-accum-steps 1 --model.remat dots "
        "--mesh.data 1 --mesh.fsdp 8",
        mfu_bound=0.7804,
        full_scores_flops_ratio=1.0751,
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


class ExpectedStep(NamedTuple):
    """Expected time and MFU of a step."""

    seconds: float
    mfu: float
    reason: str
    """Basis of the expectation."""
    published: PublishedRun | None = None
    """Best published run on this chip."""
    fallback: PublishedRun | None = None
    """Run on another chip that is used if none is published for this one."""


def expect_step(
    chip: Chip, bound_seconds: float, bound_mfu: float, measured_seconds: float | None = None
) -> ExpectedStep:
    """Return the expected time and MFU of a step with the roofline `bound_seconds`, `bound_mfu`.

    A measurement on the chip itself (`measured_seconds`) replaces the forecast.
    """
    own = PUBLISHED.get(chip.name)
    if measured_seconds is not None:
        reason = "measured on this machine"
        return ExpectedStep(
            measured_seconds, bound_mfu * bound_seconds / measured_seconds, reason, own
        )
    if chip.platform == "cpu":
        reason = f"{CPU_EFFICIENCY:.0%} of the bound, the median of steps measured on CPUs"
        return ExpectedStep(bound_seconds / CPU_EFFICIENCY, bound_mfu * CPU_EFFICIENCY, reason)
    fallback = FALLBACK_CHIPS[chip.platform]
    run = own or PUBLISHED[fallback]
    # The ratio to the roofline carries over to other models; the published MFU is the upper limit.
    mfu = min(run.efficiency * bound_mfu, run.mfu_causal_scores)
    seconds = bound_seconds * bound_mfu / mfu if mfu else bound_seconds
    if own is None:
        reason = (
            f"as on {CHIPS[fallback].device_kind}: no MFU of a dense bfloat16 model published for "
            f"{chip.device_kind}"
        )
        return ExpectedStep(seconds, mfu, reason, fallback=run)
    capped = mfu < run.efficiency * bound_mfu
    limit = "no more than" if capped else "as far from the bound as"
    return ExpectedStep(seconds, mfu, f"{limit} the best published run on this chip", own)


def published_as_dict(run: PublishedRun | None) -> dict[str, Any] | None:
    """Return plain values for `--json`."""
    if run is None:
        return None
    names = ("mfu", "model", "hardware", "organisation", "title", "year", "url")
    return {name: getattr(run, name) for name in names}
