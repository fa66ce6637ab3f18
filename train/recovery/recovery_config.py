"""Settings of anomaly detection and rollback."""

import dataclasses
from typing import Annotated

from train.errors import UsageError
from train.settings import Settings
from transformer.validation import Bounds, Mark, NonNegativeFloat, NonNegativeInt, PositiveInt


@dataclasses.dataclass(frozen=True)
class RecoveryConfig(Settings, part="recovery"):
    """Response to loss spikes and non-finite updates.

    1. The update of an anomalous step is skipped.
    2. If anomalies persist, the run rolls back to an earlier checkpoint and continues with other
       batches (PaLM, section 5.1).
    3. If the anomaly returns, the next rollback also lowers the learning rate (OPT, section 2.5).
    4. After `max_rollbacks` rollbacks for the same anomaly, the run stops with an error.
    """

    window: NonNegativeInt = 100
    """Number of recent steps that a step is compared with. 0 turns detection off: only non-finite
    updates are skipped."""
    warmup: Annotated[NonNegativeInt, Mark.RESUMABLE] = 50
    """Steps that the window must hold before detection starts."""
    threshold: Annotated[float, Bounds(above=0), Mark.RESUMABLE] = 8.0
    """Anomaly threshold in MAD-scaled standard deviations of the logarithm: for the loss and the
    gradient norm above the median of the window, for the parameter norm above the last one, in
    deviations of its steps. Non-finite values are always anomalies."""
    loss_rise_tolerance: Annotated[NonNegativeFloat, Mark.RESUMABLE] = 0.1
    """Largest relative rise of the window's median loss above its lowest value so far. A larger
    rise, of at least one standard deviation, causes a rollback at once. It finds a divergence that
    is too slow to be a spike. 0 turns it off."""
    patience: Annotated[PositiveInt, Mark.RESUMABLE] = 3
    """Consecutive anomalies that cause a rollback."""
    rollback_steps: Annotated[int, Bounds(0, 10**9), Mark.RESUMABLE] = 100
    """Steps between the first anomaly and the checkpoint to roll back to, if one is kept."""
    skip_batches: Annotated[int, Bounds(0, 10**8), Mark.RESUMABLE] = 200
    """Batches to skip after the anomaly. The batches since the checkpoint are skipped too."""
    max_rollbacks: Annotated[NonNegativeInt, Mark.RESUMABLE] = 3
    """Rollbacks for one anomaly before the run stops with an error."""
    lr_factor: Annotated[float, Bounds(above=0, maximum=1), Mark.RESUMABLE] = 0.5
    """Factor on the learning rate for the rest of the run, applied from the second rollback for
    one anomaly on, in (0, 1]."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # One value has no deviation to measure the next one by.
        if self.window == 1:
            raise UsageError(
                "recovery.window 1: is too short to find an anomaly; give 2 or more, or 0 for no "
                "detection"
            )
        # More than the window can hold would never be reached, and detection never start.
        if self.window and not 1 <= self.warmup <= self.window:
            raise UsageError(
                f"recovery.warmup {self.warmup}: give from 1 to recovery.window {self.window}"
            )
