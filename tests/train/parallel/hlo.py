"""Collectives of compiled programs by mesh axis, from their text (`Compiled.as_text()`).

Enough of the text of XLA's CPU compiler is parsed for the tests of meshes.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:body|calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

COLLECTIVE_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    type: str
    """Type of the result, with layout."""
    opcode: str
    rest: str
    """The line after the opening parenthesis: operands and attributes."""

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")", 1)[0])

    def attribute(self, name: str) -> str:
        """Return the value of `name=`, up to the next attribute; empty if absent."""
        match = re.search(rf"\b{name}=(.*?)(?=, [a-z_]+=|$)", self.rest)
        return match[1] if match else ""


class Program(NamedTuple):
    """Computations by name, each with its instructions by name, and the name of the entry."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Program":
        computations: dict[str, dict[str, Instruction]] = {}
        entry = current = ""
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = header[1]
                computations[current] = {}
                entry = current if line.startswith("ENTRY") else entry
            elif current and (match := _INSTRUCTION.match(line)):
                computations[current][match[1]] = Instruction(*match.groups())
        assert entry, "the text has no ENTRY computation"
        return cls(computations, entry)

    def execution_counts(self) -> dict[str, int]:
        """Return how many times each computation executes; each branch of a conditional counts."""
        counts = dict.fromkeys(self.computations, 0)
        stack = [(self.entry, 1)]
        while stack:
            name, times = stack.pop()
            counts[name] += times
            for instruction in self.computations[name].values():
                trips = _TRIP_COUNT.search(instruction.rest)
                each = times * int(trips[1]) if trips else times
                stack += [(called, each) for called in self._called(instruction)]
        return counts

    def _called(self, instruction: Instruction) -> Iterator[str]:
        names = _CALLED.findall(instruction.rest)
        for branches in _BRANCHES.findall(instruction.rest):
            names += re.findall(r"[\w.\-]+", branches)
        yield from (name for name in names if name in self.computations)


def array_shapes(type_: str) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays of a type, such as `(f32[2,3]{1,0}, pred[])`."""
    return [
        tuple(int(size) for size in sizes.split(",") if size)
        for _, _, sizes in _ARRAY.findall(type_)
    ]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction."""

    kind: str
    axes: tuple[str, ...]
    """Mesh axes along which data travel."""
    bytes: int
    """Bytes of the inputs of a device; of an all-gather, of its output."""
    count: int
    """Executions in one run of the program."""
    shapes: list[tuple[int, ...]]
    """Shapes of the inputs of a device."""


def find_collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Return the collectives that send data between devices of `mesh`."""
    program = Program.parse(text)
    runs = program.execution_counts()
    found: list[Collective] = []
    for name, computation in program.computations.items():
        for instruction in computation.values():
            kind = instruction.opcode.removesuffix("-start")
            if not runs[name] or kind not in COLLECTIVE_KINDS:
                continue
            types = ", ".join(computation[operand].type for operand in instruction.operands)
            groups = replica_groups(instruction, mesh.size)
            size = sum(
                math.prod(shape) * (1 if dtype == "pred" else int(bits) // 8)
                for (dtype, bits, _), shape in zip(
                    _ARRAY.findall(types), array_shapes(types), strict=True
                )
            )
            size *= len(groups[0]) if kind == "all-gather" else 1
            axes = _axes(groups, mesh)
            if axes:  # else it stays on one device
                found.append(Collective(kind, axes, size, runs[name], array_shapes(types)))
    return found


def replica_groups(instruction: Instruction, devices: int) -> list[list[int]]:
    """Return the groups of devices that exchange data, as positions in the mesh."""
    # Three notations: named axes of a mesh (jax 0.11), an iota list, explicit lists.
    if match := _MESH_GROUPS.search(instruction.rest):
        return _groups_of_mesh(match[1], match[2], match[3])
    text = instruction.attribute("source_target_pairs") or instruction.attribute("replica_groups")
    if match := re.match(r"\[([\d,]+)\]<=(\[.*)", text):
        groups: list[list[int]] = _iota(match[2]).reshape(_numbers(match[1])).tolist()
        return groups
    listed = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    return listed or [list(range(devices))]


_MESH_GROUPS = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{(.*?)\}")


def _groups_of_mesh(sizes: str, ids: str | None, along: str) -> list[list[int]]:
    """Return the groups of `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(1)2}`.

    `'b':(1)2` names the first 2 of the 4 devices along b, as if b were two axes of size 2.
    """
    shape: list[int] = []
    chosen: list[int] = []
    parts = {
        name: (pre, size) for name, pre, size in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", along)
    }
    for name, size in re.findall(r"'(\w+)'=(\d+)", sizes):
        # A sub-axis `(pre)size` splits the axis into [pre, size, rest]; groups run along `size`.
        before, some = (int(each or 0) for each in parts.get(name, ("", "")))
        cut = [before, some, int(size) // (before * some)] if some else [int(size)]
        chosen += [len(shape) + (1 if some else 0)] if name in parts else []
        shape += cut
    devices = np.arange(math.prod(shape)) if ids is None else _iota(ids)
    order = [place for place in range(len(shape)) if place not in chosen] + chosen
    members = math.prod(shape[place] for place in chosen)
    groups: list[list[int]] = devices.reshape(shape).transpose(order).reshape(-1, members).tolist()
    return groups


def _iota(text: str) -> np.ndarray:
    """Return the numbers of an iota list: `[2,4]T(1,0)` is 0 to 7 as [2, 4], transposed."""
    match = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    assert match is not None, text
    numbers = np.arange(math.prod(_numbers(match[1]))).reshape(_numbers(match[1]))
    return numbers.transpose(_numbers(match[2])) if match[2] else numbers


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _axes(groups: list[list[int]], mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes along which members of a group differ."""
    sizes = tuple(mesh.shape.values())
    places = [np.stack(np.unravel_index(group, sizes)) for group in groups]  # [axes, members]
    differ = np.any([(place != place[:, :1]).any(1) for place in places], axis=0)
    return tuple(name for name, some in zip(mesh.shape, differ, strict=True) if some)
