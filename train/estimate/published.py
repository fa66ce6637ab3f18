"""What an hour of a chip costs.

Best published training efficiency of each chip, and the step time that it leads one to expect.

The roofline (`train/estimate/roofline.py`) is a bound: no kernel launch, no norm, no straggler costs
anything in it. What a real trainer reaches of it is known only where somebody measured one. So each
chip has the run with the best published MFU of a dense model in bfloat16, and the same roofline is
applied to that run. Their ratio is the chip's `efficiency`; a plan expects

    expected MFU = min(efficiency * bound of this plan, published MFU).

The ratio and not the published MFU alone, because a model that is bound by memory or by messages
would reach the MFU of a large dense model on no trainer. The minimum, because a plan should not
promise more than anybody has reached.

Published figures count all T x T scores of causal attention; this package counts those that are
seen (`StepTime.model_flops`). `PublishedRun.mfu_causal_scores` is the figure by our count.
"""

import dataclasses
import importlib.resources
import tomllib
from typing import Any, NamedTuple

from train.data.files import as_user_error, expand_path
from train.errors import UserError
from train.estimate.chips import Chip
from train.run_folder.regular_files import MAX_SETTINGS_BYTES, read_bytes

MAX_DOLLARS_PER_HOUR = 1e9
"""Dollars of an hour, beyond which a number is no price."""


def chip_price(chip: Chip, path: str = "") -> float:
    """US dollars for one chip and hour, from a table of the user's own or the one shipped.

    Raises UserError if the file cannot be read or has no number for the chip.
    """
    found = load_prices(path).get(chip.name)
    if (
        isinstance(found, bool)
        or not isinstance(found, int | float)
        or not 0 <= found < MAX_DOLLARS_PER_HOUR
    ):
        raise UserError(
            f"prices {_source(path)}: has no price for {chip.name}; add {chip.name} = 1.20, say"
        )
    return float(found)


def load_prices(path: str = "") -> dict[str, Any]:
    """Return the table of a file, or the one shipped (UserError: it cannot be read)."""
    source = _source(path)
    with as_user_error(source):
        data = _data(path)
    try:
        table: dict[str, Any] = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"prices {source}: is not TOML ({error}); write lines like v5e = 1.20"
        ) from error
    return table


def _source(path: str) -> str:
    return path or "the table of prices"


def _data(path: str) -> bytes:
    if path:
        return read_bytes(expand_path(path), MAX_SETTINGS_BYTES)
    return (importlib.resources.files("train.estimate") / "prices.toml").read_bytes()


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A training run with its MFU and where that is written."""

    mfu: float
    """As published: all T x T scores counted."""
    model: str
    hardware: str
    organisation: str
    title: str
    year: int
    url: str
    plan_arguments: str
    """The same run as arguments of `plan`: config, target, settings."""
    mfu_bound: float
    """MFU of the roofline for `case`, in our count of the scores."""
    full_scores_flops_ratio: float
    """FLOPs with all T x T scores over FLOPs in our count."""

    @property
    def mfu_causal_scores(self) -> float:
        """The published MFU in our count of the scores."""
        return self.mfu / self.full_scores_flops_ratio

    @property
    def efficiency(self) -> float:
        """Fraction of the roofline that the run reached."""
        return self.mfu_causal_scores / self.mfu_bound

    def citation(self) -> str:
        """One line for people."""
        return (
            f"{self.mfu:.1%} for {self.model} on {self.hardware} "
            f"({self.organisation}, {self.title}, {self.year})"
        )


_MAXTEXT_TABLES = "https://github.com/AI-Hypercomputer/maxtext/tree/main/src/maxtext/configs"


PUBLISHED = {
    "v4": PublishedRun(
        mfu=0.567,
        model="22B",
        hardware="64 v4",
        organisation="Google",
        title="MaxText, High Performance Model Configs on TPU v4",
        year=2023,
        url=f"{_MAXTEXT_TABLES}/tpu/v4",
        plan_arguments="gpt3:175b v4:4x4x4 --model.vocab-size 32000 --model.d-model 6144 --model.num-layers 48 "
        "--model.layer-pattern.0.mixer.num-heads 24 --model.layer-pattern.0.mixer.head-dim 256 "
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
        plan_arguments="llama:3.1-70b v6e:16x16 --batch-size 1280 --grad-accum-steps 1 --model.remat offload "
        "--mesh.data 1 --mesh.fsdp 256",
        mfu_bound=0.5166,
        full_scores_flops_ratio=1.0717,
    ),
    "a100": PublishedRun(
        mfu=0.6423,
        model="MPT-7B",
        hardware="8 A100 with 80 GB",
        organisation="MosaicML",
        title="llm-foundry, MPT Training Benchmarks",
        year=2023,
        url="https://github.com/mosaicml/llm-foundry/tree/main/scripts/train/benchmarking",
        plan_arguments="gpt3:6.7b a100:8 --model.vocab-size 50432 --batch-size 96 --grad-accum-steps 2 "
        "--model.remat none --mesh.data 1 --mesh.fsdp 8",
        mfu_bound=0.8,
        full_scores_flops_ratio=1.0388,
    ),
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
"""By chip. Settings of a case are those of the published run as far as they are known; `residuals_dots`
stands for MaxText's `minimal`, which keeps the outputs of products with weights."""


FALLBACK_CHIP = "h100"
"""The chip whose run stands in for GPUs without a figure (T4, L4, H200, B200): of the GPUs that
have one, it reached the least of its roofline."""


CPU_EFFICIENCY = 0.73
"""Efficiency of a processor: the median of seven steps timed beside their estimates (docs/plan.md,
`bench/drills/plan_time.py`)."""


class ExpectedStep(NamedTuple):
    """A step as it is expected, beside the bound."""

    seconds: float
    mfu: float
    reason: str
    """What the expectation rests on."""
    published: PublishedRun | None = None
    """The best published run on this kind of chip."""
    fallback: PublishedRun | None = None
    """The run on another kind of chip that is taken where none is published on this kind."""


def expect_step(
    chip: Chip, bound_seconds: float, bound_mfu: float, measured_seconds: float | None = None
) -> ExpectedStep:
    """Return the expected time and MFU of a step whose roofline gives `bound_*`.

    A step that was timed on the chip itself (`measured_seconds`, seconds) is its own best forecast.
    """
    own = PUBLISHED.get(chip.name)
    if measured_seconds is not None:
        why = "timed here"
        return ExpectedStep(
            measured_seconds, bound_mfu * bound_seconds / measured_seconds, why, own
        )
    if chip.platform == "cpu":
        why = f"{CPU_EFFICIENCY:.0%} of the bound, the median of steps timed on a processor"
        return ExpectedStep(bound_seconds / CPU_EFFICIENCY, bound_mfu * CPU_EFFICIENCY, why)
    run = own or PUBLISHED[FALLBACK_CHIP]
    mfu = min(run.efficiency * bound_mfu, run.mfu_causal_scores)
    seconds = bound_seconds * bound_mfu / mfu if mfu else bound_seconds
    if own is None:
        why = f"as on {FALLBACK_CHIP.upper()}: no MFU of a dense bfloat16 model known for {chip.device_kind}"
        return ExpectedStep(seconds, mfu, why, fallback=run)
    capped = mfu < run.efficiency * bound_mfu
    why = "no more than" if capped else "as far from the bound as"
    return ExpectedStep(seconds, mfu, f"{why} the best published run on this chip", own)


def published_as_dict(run: PublishedRun | None) -> dict[str, Any] | None:
    """Return plain values, for `--json`."""
    if run is None:
        return None
    names = ("mfu", "model", "hardware", "organisation", "title", "year", "url")
    return {name: getattr(run, name) for name in names}
