"""Options of a plan, and the candidates it compares: meshes, rematerialization, microbatches."""

import dataclasses
from typing import Any, NamedTuple

from train.experiment import Experiment
from train.parallel.mesh import MESH_AXES, MeshConfig
from transformer.models.stack import RematPolicy

SEARCHED_REMAT: tuple[RematPolicy, ...] = ("none", "dots", "full")
"""Rematerialization policies that a search tries, in addition to the experiment's own."""


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Options of a plan. Also flags of the verb `plan`, whose help shows the texts below."""

    search: bool = True
    """Search over meshes, rematerialization and microbatches; False: keep the experiment's
    settings."""
    compile_best: int = 3
    """Compile up to this many of the best candidates, until one fits; 0: estimates only."""
    precisions: bool = True
    """Estimate the best candidate in each narrower precision too; precision changes training
    results."""
    measure: bool = True
    """With --target here, execute a few steps if they fit and are short."""
    tokens: float = 0.0
    """Training tokens for total time and price; 0: those of the experiment's steps."""
    prices: str = ""
    """TOML file with prices per chip hour; empty: the shipped list prices."""
    show: int = 8
    """Rows of the ranking to show."""


class Candidate(NamedTuple):
    """Settings that can change without changing what the model learns."""

    mesh: MeshConfig
    remat: RematPolicy
    grad_accum_steps: int

    @classmethod
    def from_experiment(cls, experiment: Experiment, devices: int) -> "Candidate":
        """Return the experiment's own settings, with -1 in its mesh resolved."""
        sizes: Any = experiment.mesh.axis_sizes(devices)
        mesh = dataclasses.replace(experiment.mesh, **sizes)
        return cls(mesh, experiment.model.remat, experiment.grad_accum_steps)

    def apply_to(self, experiment: Experiment) -> Experiment:
        """Return the experiment with these settings."""
        model = dataclasses.replace(experiment.model, remat=self.remat)
        return dataclasses.replace(
            experiment, model=model, mesh=self.mesh, grad_accum_steps=self.grad_accum_steps
        )

    def flags(self) -> str:
        """Return the flags of `fit` for these settings."""
        sizes = mesh_sizes(self.mesh)
        parts = [f"--mesh.{name} {size}" for name, size in sizes.items() if size > 1]
        if self.mesh.data == 1:  # by default it takes all devices
            parts.insert(0, "--mesh.data 1")
        if self.mesh.optimizer_placement != "device":
            parts.append(f"--mesh.optimizer-placement {self.mesh.optimizer_placement}")
        return " ".join(
            [*parts, f"--grad-accum-steps {self.grad_accum_steps}", f"--model.remat {self.remat}"]
        )

    def mesh_text(self) -> str:
        """Return the mesh for people, for example `fsdp 128 x tensor 8`."""
        sizes = mesh_sizes(self.mesh)
        parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        return " x ".join(parts) or "one chip"


def mesh_sizes(mesh: MeshConfig) -> dict[str, int]:
    """Return the size of each mesh axis."""
    return {axis: getattr(mesh, axis) for axis in MESH_AXES}
