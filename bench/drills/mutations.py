"""Plant small faults made by machine, one at a time: which do the tests notice?

    python -m bench mutations [--results FILE] [--faults 300] [--seed 0] [--first EARLIER]

A fault is one change of the source: a comparison flipped, a constant shifted, two arguments
swapped, a term or a statement dropped, a condition negated, an axis replaced. Places are drawn with
a seed, more often where something is computed than where something is shown (`WEIGHTS`). For each
fault those of the nearest test files that `make test` runs run until the first failure, in a copy
of the checkout. Outcomes are appended to FILE; the same command again goes on where it stopped, and
with `--faults 0` it prints the table alone. With the outcomes of EARLIER tests, the table has the
faults that both had, and names what is no longer caught.

A fault is named by what it changes, not by its line, so that the same faults can be planted again
after the tests have changed. Faults that change nothing that anyone could observe are listed, each
with its reason, in `mutations_equivalent.txt`, and left out of the table.

Why not mutmut or cosmic-ray: mutmut runs tests in forks of one process, which JAX's threads do not
survive; cosmic-ray plants every fault of its kinds, neither sampled by weight nor with swapped
arguments, dropped statements or axes.
"""

import ast
import collections
import hashlib
import itertools
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import train
import transformer
from bench.drills.planted_bugs import ROOT, copy_tree, first_failure

PACKAGES = {"train": train, "transformer": transformer}

EQUIVALENT = Path(__file__).with_name("mutations_equivalent.txt")

WEIGHTS = {
    "transformer": 3.0,
    "transformer/chunked_cross_entropy.py": 6.0,
    "transformer/losses.py": 6.0,
    "transformer/generation": 6.0,
    "transformer/testing": 1.0,
    "transformer/shape_types.py": 0.0,
    "train": 2.0,
    "train/checkpoint": 6.0,
    "train/data": 3.0,
    "train/optim": 5.0,
    "train/detector.py": 6.0,
    "train/rollback.py": 6.0,
    "train/run_folder/provenance.py": 6.0,
    "train/step.py": 6.0,
    "train/resume.py": 6.0,
    "train/cli": 0.5,
    "train/cli/doctor.py": 0.25,
    "train/estimate": 0.5,
    "train/scaling": 0.5,
    "train/sweep": 0.5,
    "train/telemetry": 0.5,
    "train/visualization": 0.25,
}
"""Weight of a place by the longest of these names that its file begins with."""

SWAP_WEIGHT = 0.3
"""Factor of swapped arguments: there are more of them than of all other changes together."""

MOST_TEST_FILES = 8
"""Test files that run for one fault: the mirrored one, then the nearest by imports."""

COMMUTATIVE = ("max", "min", "maximum", "minimum", "logaddexp", "union", "isclose")
"""Functions whose arguments may be swapped."""

FLIPPED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


# Find and draw faults.


class Fault(NamedTuple):
    """Replacement of a piece of a file's text."""

    file: str
    function: str
    kind: str
    start: int  # in bytes
    end: int
    old: str
    new: str
    occurrence: int = 0
    """Number of equal changes before it in the function."""

    @property
    def name(self) -> str:
        """Name that stays when other lines of the file move."""
        parts = (self.file, self.function, self.kind, self.old, self.new, str(self.occurrence))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def nodes_of(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield each node that computes something, with the name of its function.

    Left out are messages, docstrings, what type checkers read, and the declarations of a function:
    decorators, annotations and defaults.
    """
    children: list[ast.AST] = list(ast.iter_child_nodes(node))
    match node:
        case ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.Expr(value=ast.Constant()):
            return
        case ast.If() if "TYPE_CHECKING" in ast.dump(node.test):
            return
        case ast.FunctionDef() | ast.ClassDef():
            function = f"{function}.{node.name}".lstrip(".")
            children = [*node.body]
        case ast.AnnAssign():
            children = [node.value] if node.value else []
        case ast.keyword() if axis_of(node) is not None:
            children = []
    yield function, node
    for child in children:
        yield from nodes_of(child, function)


def axis_of(node: ast.keyword) -> int | None:
    """Return the literal axis that is an argument's value."""
    try:
        axis = ast.literal_eval(node.value) if node.arg in ("axis", "dim") else None
    except ValueError:
        return None
    return axis if isinstance(axis, int) else None


def changes_of(
    node: ast.AST, text: Callable[[ast.AST], str]
) -> Iterator[tuple[str, ast.AST, ast.AST, str]]:
    """Yield each change of a node: kind, the first and last node that are replaced, new text."""
    match node:
        case ast.If(test=test) | ast.While(test=test):
            yield "negate a condition", test, test, f"not ({text(test)})"
        case ast.IfExp(test=test):
            yield "negate a condition", test, test, f"(not ({text(test)}))"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            joined = word.join(f"({text(value)})" for value in values)
            yield "and for or", node, node, f"({joined})"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            flipped = f"({text(left)} {FLIPPED[type(op)]} {text(right)})"
            yield "flip a comparison", node, node, flipped
        case ast.BinOp(
            left=left,
            op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.FloorDiv() | ast.Mod(),
        ):
            yield "drop a term", node, node, f"({text(left)})"
        case ast.Constant(value=bool(value)):
            yield "flip a constant", node, node, str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "shift a constant", node, node, repr(value + 1)
        case ast.keyword(value=value) if (axis := axis_of(node)) is not None:
            yield "replace an axis", value, value, str(axis - 1 if axis else 1)
        case ast.Call(func=func, args=args):
            name = func.attr if isinstance(func, ast.Attribute) else ast.unparse(func)
            for left, right in itertools.pairwise(args):
                starred = isinstance(left, ast.Starred) or isinstance(right, ast.Starred)
                if text(left) != text(right) and not starred and name not in COMMUTATIVE:
                    yield "swap two arguments", left, right, f"{text(right)}, {text(left)}"
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            yield "drop a statement", node, node, "pass"


def find_faults(file: str) -> list[Fault]:
    """Return all faults that can be planted in a file."""
    data = (ROOT / file).read_bytes()
    lines = data.splitlines(keepends=True)
    starts = [0, *itertools.accumulate(len(line) for line in lines)]

    def start(node: Any) -> int:
        return int(starts[node.lineno - 1] + node.col_offset)

    def end(node: Any) -> int:
        return int(starts[node.end_lineno - 1] + node.end_col_offset)

    def text(node: ast.AST) -> str:
        return data[start(node) : end(node)].decode()

    found = []
    for function, node in nodes_of(ast.parse(data)):
        for kind, first, last, new in changes_of(node, text) if function else ():
            span = start(first), end(last)
            found.append(Fault(file, function, kind, *span, data[slice(*span)].decode(), new))
    seen = collections.Counter[str]()
    faults = []
    for fault in sorted(found, key=lambda each: (each.start, each.end)):
        faults.append(fault._replace(occurrence=seen[fault.name]))
        seen[fault.name] += 1
    return faults


def weight_of(fault: Fault) -> float:
    """Return the weight of a fault among all."""
    names = [name for name in WEIGHTS if f"{fault.file}/".startswith(f"{name}/")]
    weight = WEIGHTS[max(names, key=len)]
    return weight * SWAP_WEIGHT if fault.kind == "swap two arguments" else weight


def draw(count: int, seed: int) -> list[Fault]:
    """Return the first `count` faults of a weighted order of all that there are."""
    keyed = []
    for path in (path for name in PACKAGES for path in (ROOT / name).rglob("*.py")):
        for fault in find_faults(path.relative_to(ROOT).as_posix()):
            # Efraimidis and Spirakis 2006: the largest u ** (1 / w) are a weighted sample. The
            # number of a fault depends on its name alone, so that other faults do not change it.
            if weight := weight_of(fault):
                keyed.append(
                    (random.Random(f"{seed} {fault.name}").random() ** (1 / weight), fault)
                )
    return [fault for _, fault in sorted(keyed, reverse=True)[:count]]


# The nearest tests of a file.


def imports_of(path: Path) -> set[str]:
    """Return the names of the modules that a file imports anywhere in it, from a package too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if package := PACKAGES.get(node.module):
                values = [getattr(package, each.name, None) for each in node.names]
                found |= {getattr(value, "__module__", "") for value in values}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def nearest_tests() -> dict[str, list[str]]:
    """Return the test files of each source file: the mirrored one, then the nearest by imports."""
    sources = [
        path.relative_to(ROOT)
        for root in (*PACKAGES, "tests")
        for path in (ROOT / root).rglob("*.py")
    ]
    users = collections.defaultdict(set)
    for path in sources:
        if path.name != "__init__.py":  # it imports whole packages
            for module in imports_of(ROOT / path):
                users[module].add(path)
    tests = {}
    for path in sources:
        folder = Path("tests", path.parent)
        found = [folder / f"test_{path.name}"]
        seen, frontier = {path}, {path}
        while frontier and len(found) < MOST_TEST_FILES:
            modules = (".".join(each.with_suffix("").parts) for each in frontier)
            reached = {user for module in modules for user in users[module]} - seen
            seen |= reached
            near = {each for each in reached if each.name.startswith("test_")}
            # Beside the mirrored file first, then the shortest.
            found += sorted(
                near, key=lambda each: (each.parent != folder, (ROOT / each).stat().st_size, each)
            )
            frontier = reached - near
        existing = [each for each in dict.fromkeys(found) if (ROOT / each).exists()]
        # Modules that are imported by name alone, as those of a registry.
        beside = [each.relative_to(ROOT) for each in sorted((ROOT / folder).glob("test_*.py"))]
        tests[str(path)] = [str(each) for each in (existing or beside)[:MOST_TEST_FILES]]
    return tests


# Outcomes.

Outcomes = Mapping[str, dict[str, Any]]
"""Records of planted faults, by the names of the faults."""


def load(results: Path) -> Outcomes:
    """Return the outcomes in a file."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def table(records: Outcomes, earlier: Outcomes) -> Iterator[str]:
    """Yield the lines of the table by folder, and the faults that nothing noticed.

    With outcomes of earlier tests, only the faults that both had are counted, the earlier first.
    """
    lines = EQUIVALENT.read_text().splitlines()
    equivalent = {line.split()[0] for line in lines if not line.startswith("#")}
    names = [name for name in records if name not in equivalent]
    columns = [records]
    if earlier:
        names = [name for name in names if name in earlier]
        columns = [earlier, records]
    folders = collections.defaultdict(list)
    for name in names:
        parts = Path(records[name]["file"]).parts
        folders["/".join(parts[: min(2, len(parts) - 1)])].append(name)
    yield f"{'folder':28} faults" + ("  caught before" if earlier else "") + "  caught"
    for folder, own in [*sorted(folders.items()), ("all", names)]:
        counts = [sum(column[name]["outcome"] != "missed" for name in own) for column in columns]
        shares = (f"{caught:6}  {caught / max(1, len(own)):4.0%}" for caught in counts)
        yield "  ".join((f"{folder:28} {len(own):6}", *shares))
    for name in sorted(names, key=lambda each: (records[each]["file"], records[each]["function"])):
        record = records[name]
        if record["outcome"] == "missed":
            noticed = name in earlier and earlier[name]["outcome"] != "missed"
            change = f"{record['old']!r} -> {record['new']!r}"
            place = f"{record['file']} {record['function']}"
            word = "no longer caught" if noticed else "missed"
            yield f"{word} {name} {place}: {record['kind']}: {change[:160]}"


def plant(fault: Fault, tests: list[str], folder: Path) -> dict[str, Any]:
    """Run the tests of a fault in a copy of the checkout; return the record of the outcome."""
    path, start = folder / fault.file, time.perf_counter()
    original = path.read_bytes()
    path.write_bytes(original[: fault.start] + fault.new.encode() + original[fault.end :])
    try:
        outcome = first_failure(folder, tests) or "missed"
    finally:
        path.write_bytes(original)
    seconds, line = round(time.perf_counter() - start), original[: fault.start].count(b"\n") + 1
    print(f"{seconds:4} s  {fault.file}:{line} {fault.kind}: {outcome}", flush=True)
    found = {"name": fault.name, "line": line, "outcome": outcome, "seconds": seconds}
    return {key: getattr(fault, key) for key in ("file", "function", "kind", "old", "new")} | found


def drill(
    results: Path = ROOT / "build" / "mutations.jsonl",
    faults: int = 300,
    seed: int = 0,
    first: Path | None = None,
) -> None:
    """Plant the faults that have no outcome yet, and print the table of all that have one.

    Args:
      results: File of outcomes, JSON lines.
      faults: Number of faults.
      seed: Seed of the places.
      first: Outcomes of earlier tests, JSON lines.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    known, tests = load(results), nearest_tests()
    with tempfile.TemporaryDirectory(prefix="mutations-") as name, results.open("a") as file:
        folder = Path(name)
        copy_tree(folder)
        for fault in draw(faults, seed):
            if fault.name not in known:
                record = plant(fault, tests[fault.file], folder)
                print(json.dumps(record), file=file, flush=True)
    print("\n".join(table(load(results), load(first) if first else {})))
