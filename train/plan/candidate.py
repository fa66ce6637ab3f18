"""One way of training an experiment on a target: what a search goes through."""

import dataclasses
from typing import Any, NamedTuple

from train.experiment import Experiment
from train.sharding import MeshConfig
from train.sharding.mesh import AXES
from transformer.config import Remat

POLICIES: tuple[Remat, ...] = ("none", "dots", "full")
"""Those that a search tries, beside the experiment's own."""


class Candidate(NamedTuple):
    """What can be chosen without changing what is learnt."""

    mesh: MeshConfig
    remat: Remat
    accumulate: int

    @classmethod
    def of(cls, experiment: Experiment, devices: int) -> "Candidate":
        """The experiment as it is; -1 in its mesh becomes a number."""
        sizes: Any = experiment.mesh.sizes(devices)
        mesh = dataclasses.replace(experiment.mesh, **sizes)
        return cls(mesh, experiment.model.remat, experiment.accumulate)

    def applied(self, experiment: Experiment) -> Experiment:
        """The experiment, trained this way."""
        model = dataclasses.replace(experiment.model, remat=self.remat)
        return dataclasses.replace(
            experiment, model=model, mesh=self.mesh, accumulate=self.accumulate
        )

    def flags(self) -> str:
        """What to give `fit`."""
        sizes = sizes_of(self.mesh)
        given = [f"--mesh.{name} {size}" for name, size in sizes.items() if size > 1]
        if self.mesh.data == 1:  # by default it takes all devices
            given.insert(0, "--mesh.data 1")
        if self.mesh.optimizer != "device":
            given.append(f"--mesh.optimizer {self.mesh.optimizer}")
        return " ".join([*given, f"--accumulate {self.accumulate}", f"--model.remat {self.remat}"])

    def shown(self) -> str:
        """`fsdp 128 x tensor 8`."""
        sizes = sizes_of(self.mesh)
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(parts) or "one chip"


def sizes_of(mesh: MeshConfig) -> dict[str, int]:
    """The size of each axis."""
    return {axis: getattr(mesh, axis) for axis in AXES}
