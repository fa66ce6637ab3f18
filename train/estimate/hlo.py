"""Parse the text of compiled XLA programs: computations, loops, and collectives by mesh axis.

The text is that of `jax.stages.Compiled.as_text()`, on any platform.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")


_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


_CALLED = re.compile(r"\b(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")


_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


_CONSTANT = re.compile(r"^(\d+)\)")


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    type: str  # of the result, with layout
    opcode: str
    operands_and_attributes: str  # the rest of the line, after the opening parenthesis

    @property
    def operands(self) -> tuple[str, ...]:
        """Return the names of the operands."""
        return tuple(re.findall(r"%([\w.\-]+)", self.operands_and_attributes.split(")", 1)[0]))

    def attribute(self, name: str) -> str:
        """Return the value of `name=`, up to the next attribute; empty if absent."""
        match = re.search(rf"\b{name}=(.*?)(?=, [a-z_]+=|$)", self.operands_and_attributes)
        return match[1] if match else ""


Computation = dict[str, Instruction]
"""Instructions of a computation by name."""


class Program(NamedTuple):
    """A module: its computations and the name of the entry."""

    computations: dict[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Parse a program. Raises ValueError for a text without an entry computation."""
        computations: dict[str, Computation] = {}
        entry, current = "", None
        for line in text.splitlines():
            if current is None:
                if header := _HEADER.match(line):
                    current = computations.setdefault(header[1], {})
                    entry = header[1] if line.startswith("ENTRY") else entry
            elif line.startswith("}"):
                current = None
            elif match := _INSTRUCTION.match(line):
                current[match[1]] = Instruction(*match.groups())
        if not entry:
            raise ValueError("program: has no ENTRY; give the text of a compiled program")
        return cls(computations, entry)

    def execution_counts(self) -> dict[str, int]:
        """Return how many times each computation executes in one run of the program.

        A loop with an unknown trip count counts once. Each branch of a conditional counts.
        """
        # Walk the call tree from the entry. A computation that is called from several places, such
        # as a shared reduction, adds up its callers' counts.
        counts = dict.fromkeys(self.computations, 0)
        stack = [(self.entry, 1)]
        while stack:
            name, times = stack.pop()
            counts[name] += times
            for instruction in self.computations[name].values():
                each = times * self._trip_count(instruction)
                stack += [(called, each) for called in self._called_computations(instruction)]
        return counts

    def fused_computations(self) -> set[str]:
        """Return the names of computations that are fusions."""
        return {
            name
            for computation in self.computations.values()
            for instruction in computation.values()
            if instruction.opcode == "fusion"
            for name in self._called_computations(instruction)
        }

    def _called_computations(self, instruction: Instruction) -> Iterator[str]:
        if instruction.opcode in ("async-update", "async-done"):
            return  # they name what async-start has started
        names = _CALLED.findall(instruction.operands_and_attributes)
        for branches in _BRANCHES.findall(instruction.operands_and_attributes):
            names += re.findall(r"[\w.\-]+", branches)
        yield from (name for name in names if name in self.computations)

    def _trip_count(self, instruction: Instruction) -> int:
        """Return the trip count: the compiler's note, else the only constant of the condition."""
        # XLA writes `known_trip_count` where its analysis succeeds. Otherwise a loop of `lax.scan`
        # has a condition `i < n`, whose only integer constant is n.
        if instruction.opcode != "while":
            return 1
        if noted := _TRIP_COUNT.search(instruction.operands_and_attributes):
            return int(noted[1])
        condition = self.computations.get(instruction.attribute("condition").lstrip("%"), {})
        bounds = [
            int(match[1])
            for each in condition.values()
            if each.opcode == "constant"
            and (match := _CONSTANT.match(each.operands_and_attributes))
        ]
        return bounds[0] if len(bounds) == 1 else 1


def array_bytes(type_: str) -> int:
    """Return the unpadded bytes of the arrays of a type, such as `(f32[2,3]{1,0}, pred[])`."""
    total = 0.0
    for name, bits, sizes in _ARRAY.findall(type_):
        count = math.prod(int(size) for size in sizes.split(",") if size)
        total += count * (1 if name == "pred" else int(bits) / 8)
    return math.ceil(total)


def array_shapes(type_: str) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the arrays of a type."""
    return tuple(
        tuple(int(size) for size in sizes.split(",") if size)
        for _, _, sizes in _ARRAY.findall(type_)
    )


COLLECTIVE_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
"""Opcodes of collectives."""


WHOLE_ARRAY_KINDS = ("collective-permute", "collective-broadcast")
"""Collectives in which a device sends its array whole."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction."""

    kind: str
    """One of `COLLECTIVE_KINDS`."""
    axes: tuple[str, ...]
    """Mesh axes along which data travel."""
    group_size: int
    """Devices of one group."""
    bytes: int
    """Bytes of the whole array on one device: the output of an all-gather, the input of a
    reduce-scatter; for other kinds the input of each device."""
    count: int
    """Executions in one run of the program."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of each device's inputs."""
    op_name: str
    """XLA's `op_name`: the operation of the traced program that it comes from."""

    @property
    def bytes_sent(self) -> float:
        """Return the bytes that each device sends in one execution, over a ring.

        An all-reduce is a reduce-scatter and an all-gather.
        """
        if self.kind in WHOLE_ARRAY_KINDS:
            return self.bytes
        fraction = (self.group_size - 1) / self.group_size
        return self.bytes * fraction * (2 if self.kind == "all-reduce" else 1)


def find_collectives(text: str, mesh: Mesh) -> tuple[Collective, ...]:
    """Return the collectives that send data between devices of `mesh`.

    Args:
      text: Text of a program compiled for CPU, GPU or TPU (`Compiled.as_text()`).
      mesh: Mesh that the program was compiled for.

    The start and the end of an asynchronous collective count as one. Collectives of a loop count
    once per iteration.
    """
    program = Program.parse(text)
    runs, fused = program.execution_counts(), program.fused_computations()
    collectives: list[Collective] = []
    seen: set[str] = set()
    for name, computation in program.computations.items():
        for instruction in computation.values():
            if not runs[name] or instruction.opcode.removesuffix("-start") not in COLLECTIVE_KINDS:
                continue
            if name in fused:  # a TPU's start, middle and end of one, which share its channel
                channel = instruction.attribute("channel_id")
                if channel in seen:
                    continue
                seen.add(channel)
            collective = _parse_collective(name, instruction, computation, runs[name], mesh)
            if collective.axes:  # else it stays on one device
                collectives.append(collective)
    return tuple(collectives)


def total_collectives(
    collectives: Iterable[Collective],
) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """Return the number and the total bytes of collectives, by kind and mesh axes."""
    sums: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for one in collectives:
        count, size = sums.get((one.kind, one.axes), (0, 0))
        sums[one.kind, one.axes] = count + one.count, size + one.count * one.bytes
    return sums


def _parse_collective(
    name: str, instruction: Instruction, computation: Computation, count: int, mesh: Mesh
) -> Collective:
    kind = instruction.opcode.removesuffix("-start")
    if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"  # a TPU's fusion of it with the slice that each device keeps
    operand_types = ", ".join(computation[operand].type for operand in instruction.operands)
    groups = _groups(instruction, mesh.size)
    parts = mesh.size if kind in WHOLE_ARRAY_KINDS else len(groups[0])
    origin = re.search(r'op_name="([^"]*)"', instruction.operands_and_attributes)
    return Collective(
        kind=kind,
        axes=_axes(groups, mesh),
        group_size=parts,
        bytes=array_bytes(operand_types) * (parts if kind == "all-gather" else 1),
        count=count,
        shapes=array_shapes(operand_types),
        op_name=origin[1] if origin else "",
    )


def _groups(instruction: Instruction, devices: int) -> list[list[int]]:
    """Return the groups of devices that exchange data, as positions in the mesh."""
    if match := _MESH_GROUPS.search(instruction.operands_and_attributes):
        return _groups_of_mesh(match[1], match[2], match[3])
    # Three notations: named mesh axes, an iota list [groups,size]<=[dims]T(perm), explicit lists.
    pairs = instruction.attribute("source_target_pairs")
    text = pairs or instruction.attribute("replica_groups")
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
    if match is None:
        raise ValueError(f"replica groups {text}: are written in a way that is not known")
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
