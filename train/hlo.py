"""Reading a compiled program's text: computations, instructions, and how often each runs.

The text is XLA's, as `jax.stages.Compiled.as_text` gives it, of any platform.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_CALLED = re.compile(r"\b(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r"^(\d+)\)")


class Instruction(NamedTuple):
    """One line of a program."""

    name: str
    type: str  # of the result, with layout
    opcode: str
    operands_and_attributes: str  # operands and attributes, after the opening parenthesis

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of what it is given."""
        return tuple(re.findall(r"%([\w.\-]+)", self.operands_and_attributes.split(")", 1)[0]))

    def attribute(self, name: str) -> str:
        """The value of `name=`: up to the next attribute. Empty if there is none."""
        found = re.search(rf"\b{name}=(.*?)(?=, [a-z_]+=|$)", self.operands_and_attributes)
        return found[1] if found else ""


Computation = dict[str, Instruction]
"""Instructions by name."""


class Program(NamedTuple):
    """A module."""

    computations: dict[str, Computation]
    entry: str

    @classmethod
    def parse(cls, text: str) -> "Program":
        """Raises ValueError for a text without an entry computation."""
        computations: dict[str, Computation] = {}
        entry, current = "", None
        for line in text.splitlines():
            if current is None:
                if header := _HEADER.match(line):
                    current = computations.setdefault(header[1], {})
                    entry = header[1] if line.startswith("ENTRY") else entry
            elif line.startswith("}"):
                current = None
            elif found := _INSTRUCTION.match(line):
                current[found[1]] = Instruction(*found.groups())
        if not entry:
            raise ValueError("program: has no ENTRY; give the text of a compiled program")
        return cls(computations, entry)

    def execution_counts(self) -> dict[str, int]:
        """How often each computation runs, by name; in one run of the program.

        A loop whose number of turns is not to be seen counts once; of a choice each branch does.
        """
        counts = dict.fromkeys(self.computations, 0)
        waiting = [(self.entry, 1)]
        while waiting:
            name, times = waiting.pop()
            counts[name] += times
            for instruction in self.computations[name].values():
                each = times * self._turns(instruction)
                waiting += [(called, each) for called in self._called(instruction)]
        return counts

    def fused_computations(self) -> set[str]:
        """The names of computations that are fusions."""
        return {
            name
            for computation in self.computations.values()
            for instruction in computation.values()
            if instruction.opcode == "fusion"
            for name in self._called(instruction)
        }

    def _called(self, instruction: Instruction) -> Iterator[str]:
        if instruction.opcode in ("async-update", "async-done"):
            return  # they name what async-start has started
        names = _CALLED.findall(instruction.operands_and_attributes)
        for branches in _BRANCHES.findall(instruction.operands_and_attributes):
            names += re.findall(r"[\w.\-]+", branches)
        yield from (name for name in names if name in self.computations)

    def _turns(self, instruction: Instruction) -> int:
        """Of a loop, as the compiler has noted it; else the only number its condition knows."""
        if instruction.opcode != "while":
            return 1
        if noted := _TRIPS.search(instruction.operands_and_attributes):
            return int(noted[1])
        condition = self.computations.get(instruction.attribute("condition").lstrip("%"), {})
        bounds = [
            int(found[1])
            for each in condition.values()
            if each.opcode == "constant"
            and (found := _CONSTANT.match(each.operands_and_attributes))
        ]
        return bounds[0] if len(bounds) == 1 else 1


def array_bytes(type_: str) -> int:
    """Bytes of the arrays of a type, such as `(f32[2,3]{1,0}, pred[])`, without padding."""
    total = 0.0
    for name, bits, sizes in _ARRAY.findall(type_):
        count = math.prod(int(size) for size in sizes.split(",") if size)
        total += count * (1 if name == "pred" else int(bits) / 8)
    return math.ceil(total)


def array_shapes(type_: str) -> tuple[tuple[int, ...], ...]:
    """The shapes of the arrays of a type."""
    return tuple(
        tuple(int(size) for size in sizes.split(",") if size)
        for _, _, sizes in _ARRAY.findall(type_)
    )
