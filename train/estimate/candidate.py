"""Which forms of attention a step takes on its target.

One way of training an experiment on a target: what a search goes through.

Every way of cutting a step for a target, ranked by the estimates.

`fit --mesh auto`: the mesh that a plan for the devices that are here would take.
"""

import dataclasses
from typing import Any, NamedTuple

from train.experiment import Experiment
from train.parallel.mesh import MESH_AXES, MeshConfig
from transformer.config import RematPolicy

SEARCHED_REMAT: tuple[RematPolicy, ...] = ("none", "dots", "full")
"""Those that a search tries, beside the experiment's own."""


class Candidate(NamedTuple):
    """What can be chosen without changing what is learnt."""

    mesh: MeshConfig
    remat: RematPolicy
    grad_accum_steps: int

    @classmethod
    def from_experiment(cls, experiment: Experiment, devices: int) -> "Candidate":
        """The experiment as it is; -1 in its mesh becomes a number."""
        sizes: Any = experiment.mesh.axis_sizes(devices)
        mesh = dataclasses.replace(experiment.mesh, **sizes)
        return cls(mesh, experiment.model.remat, experiment.grad_accum_steps)

    def apply_to(self, experiment: Experiment) -> Experiment:
        """The experiment, trained this way."""
        model = dataclasses.replace(experiment.model, remat=self.remat)
        return dataclasses.replace(
            experiment, model=model, mesh=self.mesh, grad_accum_steps=self.grad_accum_steps
        )

    def flags(self) -> str:
        """What to give `fit`."""
        sizes = mesh_sizes(self.mesh)
        given = [f"--mesh.{name} {size}" for name, size in sizes.items() if size > 1]
        if self.mesh.data == 1:  # by default it takes all devices
            given.insert(0, "--mesh.data 1")
        if self.mesh.optimizer_placement != "device":
            given.append(f"--mesh.optimizer-placement {self.mesh.optimizer_placement}")
        return " ".join(
            [*given, f"--grad-accum-steps {self.grad_accum_steps}", f"--model.remat {self.remat}"]
        )

    def mesh_text(self) -> str:
        """`fsdp 128 x tensor 8`."""
        sizes = mesh_sizes(self.mesh)
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(parts) or "one chip"


def mesh_sizes(mesh: MeshConfig) -> dict[str, int]:
    """The size of each axis."""
    return {axis: getattr(mesh, axis) for axis in MESH_AXES}
