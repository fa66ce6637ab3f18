"""Changes of settings that make a step fit: mesh, rematerialization, microbatches, precision."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from train.engines.engine import Engine
from train.errors import UserError
from train.estimate.batch_shapes import resolve_sizes
from train.estimate.chips import Chip
from train.estimate.memory import Memory
from train.estimate.quantities import Quantities, mesh_sizes
from train.estimate.roofline import expect_step
from train.estimate.search import RankedCandidate, own_candidate, search_candidates
from train.estimate.tables import format_bytes
from train.estimate.target import Target, local_target
from train.experiment import Experiment
from train.runtime.host import host_memory_bytes
from transformer.precision import POLICIES, Precision

PRECISION_SETTING = "model.precision"
"""The one setting of a remedy that changes training results."""


class PrecisionOption(NamedTuple):
    """A precision policy with a candidate."""

    precision: Precision
    best: RankedCandidate

    def flags(self) -> str:
        """Return the flags of `fit` for this option."""
        return f"--{PRECISION_SETTING} {self.precision.name} {self.best.candidate.flags()}"

    def settings(self) -> dict[str, object]:
        """Return the settings that a remedy may change, by flag."""
        candidate = self.best.candidate
        return {
            **{f"mesh.{axis}": size for axis, size in mesh_sizes(candidate.mesh).items()},
            "grad-accum-steps": candidate.grad_accum_steps,
            "model.remat": candidate.remat,
            PRECISION_SETTING: self.precision.name,
        }

    def changes_from(self, old: "PrecisionOption") -> dict[str, object]:
        """Return the settings that differ from those of another option."""
        before = old.settings()
        return {name: value for name, value in self.settings().items() if value != before[name]}

    def as_dict(self, chip: Chip) -> dict[str, Any]:
        """Return plain numbers for `--json`."""
        time = self.best.time
        likely = expect_step(chip, time.step_seconds, time.mfu)
        return {
            "fits": self.best.fits,
            "memory_bytes_per_chip": self.best.memory.total,
            "step_seconds": likely.seconds,
            "step_seconds_bound": time.step_seconds,
            "mfu": likely.mfu,
            "mfu_bound": time.mfu,
            "flags": self.flags(),
        }


def narrower_precisions(own: Precision, chip: Chip) -> list[Precision]:
    """Return the named policies that suit a chip and have no dtype wider than `own`.

    float16 has less range than bfloat16 and needs loss scaling. It is included only if it is more
    than twice as fast, as on GPUs without bfloat16.
    """
    rate = chip.peak_flops_per_second
    fast_float16 = rate("float16") > 2 * rate("bfloat16")
    return [
        policy
        for policy in POLICIES.values()
        if policy != own
        and not _wider(policy, own)
        and (fast_float16 or not policy.needs_loss_scale)
    ]


def _wider(policy: Precision, own: Precision) -> bool:
    """Return True if some dtype of the policy has more bytes than in `own`."""
    return any(
        jnp.dtype(getattr(policy, field.name)).itemsize
        > jnp.dtype(getattr(own, field.name)).itemsize
        for field in dataclasses.fields(Precision)
        if field.name != "cache"  # training has no cache
    )


def replace_precision(experiment: Experiment, precision: Precision) -> Experiment:
    """Return the experiment with another precision policy."""
    model = dataclasses.replace(experiment.model, precision=precision)
    return dataclasses.replace(experiment, model=model)


Find = Callable[[Quantities, Target], list[RankedCandidate]]
"""How candidates are found: `search_candidates` or `own_candidate`."""


def options_in_precision(
    experiment: Experiment, precision: Precision, target: Target, find: Find
) -> list[PrecisionOption]:
    """Return every candidate in a precision, best first."""
    quantities = Quantities(replace_precision(experiment, precision), target.hardware)
    return [PrecisionOption(precision, each) for each in find(quantities, target)]


MAX_SUGGESTIONS = 3
"""Number of remedies, and of memory items, that a message names."""


def suggest_remedies(experiment: Experiment) -> list[str]:
    """Return the changes of settings that `plan` estimates to fit on this machine.

    Without an estimate, return generic remedies, the most effective first.
    """
    return plan_remedies(experiment, local_target()) or generic_remedies(experiment)


def plan_remedies(experiment: Experiment, target: Target) -> list[str]:
    """Return the largest memory items of the step and the cheapest settings that fit, as texts.

    Empty if the estimates do not apply to this model, or say that the step fits.
    """
    try:
        experiment = resolve_sizes(experiment)[0]
        own = experiment.model.precision
        now = options_in_precision(experiment, own, target, own_candidate)[0]
        if now.best.fits:
            return []
        fitting = [
            option
            for precision in (own, *narrower_precisions(own, target.chip))
            for option in options_in_precision(experiment, precision, target, search_candidates)
            if option.best.fits
        ]
    # This runs while an out-of-memory error is reported: a failing estimate must not replace it.
    except (UserError, ValueError):
        return []
    changes = [describe_change(now, each) for each in cheapest_changes(now, fitting)]
    smaller = (
        "no setting that keeps the model makes it fit; lower model.d_model or model.num_layers"
    )
    remedy = f"give {changes[0]}" if changes else smaller
    return [f"largest are {largest_parts(now.best.memory)}; {remedy}", *changes[1:]]


def cheapest_changes(now: PrecisionOption, fitting: list[PrecisionOption]) -> list[PrecisionOption]:
    """Return the fastest option of each set of changed settings, sets with fewer settings first.

    Precision counts as two settings, since it changes training results.
    """
    by_settings: dict[frozenset[str], PrecisionOption] = {}
    for each in fitting:  # each precision's candidates come fastest first
        by_settings.setdefault(frozenset(each.changes_from(now)), each)

    def cost(names: frozenset[str]) -> tuple[int, float]:
        return len(names) + (PRECISION_SETTING in names), by_settings[names].best.time.step_seconds

    return [by_settings[names] for names in sorted(by_settings, key=cost)[:MAX_SUGGESTIONS]]


def describe_change(now: PrecisionOption, new: PrecisionOption) -> str:
    """Return the flags of a change and its effect on step time."""
    flags = " ".join(f"--{name} {value}" for name, value in new.changes_from(now).items())
    cost = new.best.time.step_seconds / now.best.time.step_seconds - 1
    rounding = "" if new.precision == now.precision else ", lower precision"
    return f"{flags} ({cost:+.0%} time by estimate{rounding})"


def largest_parts(size: Memory) -> str:
    """Return the largest memory items as text."""
    parts = {
        "weights": size.weights,
        "the optimizer's state": size.optimizer,
        "gradients": size.gradients,
        "residuals of the forward pass": size.residuals,
        "the working set of a layer or the loss": size.working_set,
    }
    ordered = sorted(parts, key=lambda name: -parts[name])
    return ", ".join(f"{name} ({format_bytes(parts[name])})" for name in ordered[:MAX_SUGGESTIONS])


def generic_remedies(experiment: Experiment) -> list[str]:
    """Return the changes of settings that lower the memory of training."""
    microbatches, batch = experiment.grad_accum_steps, experiment.batch_size
    batch_tokens = experiment.batch_tokens
    remedies = []
    if batch_tokens or batch > microbatches:
        size = f"data.batch_tokens (now {batch_tokens})" if batch_tokens else ""
        size = size or f"batch_size (now {batch})"
        remedies.append(f"raise grad_accum_steps (now {microbatches}) or lower {size}")
    if experiment.model.remat != "full":
        remedies.append(f"set model.remat to full (now {experiment.model.remat})")
    length = experiment.sequence_length
    remedies.append(f"lower data.{experiment.data.length_field} (now {length})")
    remedies.append(
        f"lower model.d_model (now {experiment.model.d_model}) or "
        f"model.num_layers (now {experiment.model.num_layers})"
    )
    if jax.device_count() > 1 and experiment.mesh.fsdp == 1:
        remedies.insert(0, f"set mesh.fsdp to {jax.device_count()} (now 1)")
    return remedies


HOST_BYTES_PER_TOKEN = 16
"""Bytes of a token in a host batch: token, target, position and segment, int32 each."""


MIN_ACTIVATION_BYTES = 2
"""Bytes of an activation in bfloat16 or float16, the smallest types that layers compute in."""


def check_minimum_memory(engine: Engine, experiment: Experiment) -> None:
    """Raise UserError for an experiment that cannot fit, whatever XLA does.

    The sizes are lower bounds, not estimates. Without this check, a batch or a model that is far
    too large takes minutes to build. On a CPU the operating system would then kill the process
    without an error message.
    """
    device = jax.local_devices()[0]
    local_devices, host_bytes = jax.local_device_count(), host_memory_bytes()
    device_bytes = (device.memory_stats() or {}).get("bytes_limit", 0) * local_devices
    if device.platform == "cpu":
        device_bytes = host_bytes
    state = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(engine.abstract_state())
        if leaf.sharding.memory_kind != "pinned_host"
    )
    model = experiment.model
    rows = experiment.batch_size // jax.process_count()
    tokens = rows * experiment.data.shortest_row
    # Every rematerialization policy saves at least the input of each layer.
    values = tokens * model.d_model * model.num_layers
    layer_inputs = values * MIN_ACTIVATION_BYTES // experiment.grad_accum_steps
    remedies = generic_remedies(experiment)
    state_remedies = [each for each in remedies if each.startswith(("set mesh.", "lower model."))]
    activation_memory = host_bytes if model.remat == "offload" else device_bytes
    for consumer, size, memory, helpful in (
        ("the training state", state * local_devices, device_bytes, state_remedies),
        ("the inputs of the layers", layer_inputs, activation_memory, remedies),
        ("a batch's tokens", tokens * HOST_BYTES_PER_TOKEN, host_bytes, remedies),
    ):
        if memory and size > memory:
            raise UserError(
                f"memory: {consumer} would take {format_bytes(size)}, and the machine has "
                f"{format_bytes(memory)}; {', or '.join(helpful)}"
            )
