"""The settings of recovery."""

import dataclasses

from transformer.validation import check_at_least


@dataclasses.dataclass(frozen=True)
class RecoveryConfig:
    """What is done about loss spikes and updates that are not finite.

    First the update is skipped. If that does not help, the run goes back to a checkpoint from
    before the trouble and on with other data (PaLM, section 5.1); if that does not help either,
    it does so with a lower learning rate (OPT, section 2.5); and then it stops.
    """

    window: int = 100
    """Steps that a step is compared with. 0: there is no watch, and no update is skipped but those
    that are not finite."""
    warmup: int = 50
    """Of these, how many there have to be before the watch begins."""
    threshold: float = 8.0
    """A loss or a gradient norm is out of line from so many robust standard deviations above the
    median of the window, in logarithms. Out of line too: what is not finite."""
    loss_rise_tolerance: float = 0.1
    """The median loss of the window is out of line from this share on above the lowest that it has
    been, and from one robust standard deviation on. It finds a loss that rises too slowly, or by
    too little, to be a spike; then the run goes back at once. 0: it is not looked for."""
    patience: int = 3
    """Steps in a row that are out of line from which on skipping their updates does not help."""
    rollback_steps: int = 100
    """Steps before the trouble at which the checkpoint to go back to should be, if one is kept."""
    skip_batches: int = 200
    """Batches beyond the trouble that are left out, as are all since that checkpoint."""
    max_rollbacks: int = 3
    """How often the run goes back for one trouble before it stops."""
    lr_factor: float = 0.5
    """What the learning rate is multiplied by, for good, each time but the first of these."""

    def __post_init__(self) -> None:
        for name in ("window", "warmup", "rollback_steps", "skip_batches", "max_rollbacks"):
            check_at_least(f"recovery.{name}", getattr(self, name), 0)
        if self.window == 1:
            raise ValueError("recovery.window 1: is no window; give more, or 0")
        check_at_least("recovery.patience", self.patience, 1)
        if not self.threshold > 0:
            raise ValueError(f"recovery.threshold {self.threshold}: give more than 0")
        check_at_least("recovery.loss_rise_tolerance", self.loss_rise_tolerance, 0)
        if not 0 < self.lr_factor <= 1:
            raise ValueError(f"recovery.lr_factor {self.lr_factor}: give a factor in (0, 1]")
        if self.window and not 1 <= self.warmup <= self.window:
            raise ValueError(
                f"recovery.warmup {self.warmup}: give from 1 to recovery.window {self.window}"
            )
