"""Plant small faults made by machine, one at a time: which do the tests notice?

    python -m bench.drills.mutations [--results FILE] [--faults 300] [--seed 0] [--tier test|full]
                                     [--first EARLIER]
    python -m bench.drills.mutations [--results FILE] [--first EARLIER] --table

A fault is one change of the source: a comparison flipped, a constant shifted, two arguments
swapped, a term or a statement dropped, a condition negated, an axis replaced. Places are drawn with
a seed, more often where something is computed than where something is shown (`WEIGHTS`). For each
fault the nearest test files run until the first failure, in a copy of the checkout. Outcomes are
appended to FILE; the same command again goes on where it stopped. With the outcomes of EARLIER
tests, what noticed a fault then runs before the others, which saves most of the time.

A fault is named by what it changes, not by its line, so that the same faults can be planted again
after the tests have changed. Faults that change nothing that anyone could observe are listed, each
with its reason, in `mutations_equivalent.txt`, and left out of the table.

Why not mutmut or cosmic-ray: mutmut runs tests in forks of one process, which JAX's threads do not
survive; cosmic-ray plants every fault of its kinds, neither sampled by weight nor with swapped
arguments, dropped statements or axes.
"""

import argparse
import ast
import collections
import concurrent.futures
import hashlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import train
import transformer
from bench.drills.planted_bugs import ROOT, TIERS, copy_tree

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

SECONDS = 900
"""Time after which the tests of a fault are stopped. A fault that makes them hang is noticed."""

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


class Change(NamedTuple):
    """Replacement of a piece of a file's text."""

    kind: str
    start: int
    end: int
    text: str


class Fault(NamedTuple):
    """One change in one function."""

    file: str
    function: str
    change: Change
    old: str
    occurrence: int
    """Number of equal changes before it in the function."""

    @property
    def name(self) -> str:
        """Name that stays when other lines of the file move."""
        parts = (self.file, self.function, self.change.kind, self.old, self.change.text)
        return hashlib.sha256("\0".join((*parts, str(self.occurrence))).encode()).hexdigest()[:12]


class _Finder(ast.NodeVisitor):
    """Collects the changes that one file allows, with the function of each."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.found: list[tuple[str, Change]] = []
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line.encode()))
        self._bytes = text.encode()
        self._function: list[str] = []

    def span(self, node: Any) -> tuple[int, int]:
        """Return the bytes of a node."""
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def source(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self._bytes[start:end].decode()

    def add(self, kind: str, node: ast.AST, text: str) -> None:
        """Record the replacement of a node."""
        self.found.append((".".join(self._function), Change(kind, *self.span(node), text)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        # Decorators, annotations and defaults of signatures are declarations, not steps.
        self._function.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._function.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._function.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._function.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave messages alone."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave messages alone."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave what type checkers read alone."""

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.dump(node.test):
            self.add("negate a condition", node.test, f"not ({self.source(node.test)})")
            self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.add("negate a condition", node.test, f"(not ({self.source(node.test)}))")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.add("negate a condition", node.test, f"not ({self.source(node.test)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " or " if isinstance(node.op, ast.And) else " and "
        values = [f"({self.source(value)})" for value in node.values]
        self.add("and for or", node, f"({word.join(values)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            left, right = self.source(node.left), self.source(node.comparators[0])
            text = f"({left} {FLIPPED[type(node.ops[0])]} {right})"
            self.add("flip a comparison", node, text)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv | ast.Mod):
            self.add("drop a term", node, f"({self.source(node.left)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self.add("shift a constant", node, str(node.value + 1))
        elif type(node.value) is float:
            self.add("shift a constant", node, repr(node.value + 1))
        elif type(node.value) is bool:
            self.add("flip a constant", node, str(not node.value))

    def visit_keyword(self, node: ast.keyword) -> None:
        try:
            axis = ast.literal_eval(node.value) if node.arg in ("axis", "dim") else None
        except ValueError:
            axis = None
        if isinstance(axis, int):
            self.add("replace an axis", node.value, str(axis - 1 if axis else 1))
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        for left, right in zip(node.args, node.args[1:], strict=False):
            texts = self.source(left), self.source(right)
            starred = any(isinstance(each, ast.Starred) for each in (left, right))
            if texts[0] != texts[1] and not starred and name not in COMMUTATIVE:
                (start, _), (_, end) = self.span(left), self.span(right)
                change = Change("swap two arguments", start, end, f"{texts[1]}, {texts[0]}")
                self.found.append((".".join(self._function), change))
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):  # a docstring
            return
        if isinstance(node.value, ast.Call):
            self.add("drop a statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.add("drop a statement", node, "pass")
        self.generic_visit(node)


def weight_of(file: str) -> float:
    """Return the weight of each place in a file."""
    names = [name for name in WEIGHTS if file == name or file.startswith(f"{name}/")]
    return WEIGHTS[max(names, key=len)]


def find_faults(file: str) -> list[Fault]:
    """Return all faults that can be planted in a file."""
    text = (ROOT / file).read_text()
    finder = _Finder(text)
    finder.visit(ast.parse(text))
    faults, seen = [], collections.Counter[tuple[str, str, str, str]]()
    for function, change in sorted(finder.found, key=lambda each: each[1][1:3]):
        old = text.encode()[change.start : change.end].decode()
        key = (function, change.kind, old, change.text)
        if function:  # constants of a module are names, limits and tables
            faults.append(Fault(file, function, change, old, seen[key]))
            seen[key] += 1
    return faults


def draw(count: int, seed: int) -> list[Fault]:
    """Return the first `count` faults of a weighted order of all that there are."""
    files = sorted(str(path.relative_to(ROOT)) for name in ("transformer", "train")
                   for path in (ROOT / name).rglob("*.py"))  # fmt: skip
    keyed = []
    for fault in (fault for file in files for fault in find_faults(file)):
        # Efraimidis and Spirakis 2006: the largest u ** (1 / w) are a weighted sample. The number
        # of a fault depends on its name alone, so that other faults do not change the draw.
        uniform = random.Random(f"{seed} {fault.name}").random()
        weight = weight_of(fault.file)
        if fault.change.kind == "swap two arguments":
            weight *= SWAP_WEIGHT
        if weight:
            keyed.append((uniform ** (1 / weight), fault))
    keyed.sort(key=lambda each: each[0], reverse=True)
    return [fault for _, fault in keyed[:count]]


def imports_of(path: Path, modules: set[str]) -> set[str]:
    """Return the modules that a file imports anywhere in it, from a package too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            if node.module in PACKAGES:
                values = [getattr(PACKAGES[node.module], each.name, None) for each in node.names]
                names += [getattr(value, "__module__", "") for value in values]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= modules.intersection(names)
    return found


def nearest_tests() -> dict[str, list[str]]:
    """Return the test files of each source file: the mirrored one, then the nearest by imports."""
    sources = [path.relative_to(ROOT) for root in ("transformer", "train", "tests")
               for path in sorted((ROOT / root).rglob("*.py"))]  # fmt: skip
    module_of = {str(path): ".".join(path.with_suffix("").parts) for path in sources}
    modules = set(module_of.values())
    users = collections.defaultdict(set)
    for path in sources:
        if path.name != "__init__.py":  # it imports whole packages
            for module in imports_of(ROOT / path, modules):
                users[module].add(str(path))
    tests = {}
    for path in sources:
        if path.parts[0] == "tests":
            continue
        found: list[str] = [str(Path("tests", path.parent, f"test_{path.name}"))]
        seen, frontier = {str(path)}, [str(path)]
        while frontier and len(found) < MOST_TEST_FILES:
            reached = sorted({user for each in frontier for user in users[module_of[each]]} - seen)
            seen.update(reached)
            near = [each for each in reached if Path(each).name.startswith("test_")]
            # Beside the mirrored file first, then the shortest.
            folder = str(Path("tests", path.parent))
            near.sort(key=lambda each: (str(Path(each).parent) != folder,
                                        (ROOT / each).stat().st_size))  # fmt: skip
            found += near
            frontier = [each for each in reached if each not in near]
        existing = [each for each in dict.fromkeys(found) if (ROOT / each).exists()]
        # Modules that are imported by name alone, as those of a registry.
        beside = sorted((ROOT / "tests" / path.parent).glob("test_*.py"))
        existing = existing or [str(each.relative_to(ROOT)) for each in beside]
        tests[str(path)] = existing[:MOST_TEST_FILES]
    return tests


def run_tests(folder: Path, tests: list[str], tier: str, cache: Path) -> str:
    """Run tests until the first failure; return "missed", or what noticed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += [*tests, *(["-m", TIERS[tier]] if TIERS[tier] else [])]
    environment = os.environ | {
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TESTS_COMPILATION_CACHE": str(cache),
    }
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"no end after {SECONDS} s"
    if process.returncode in (0, 5):  # 5: no test was selected
        return "missed"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"status {process.returncode}"


def load(results: Path) -> dict[str, dict[str, Any]]:
    """Return the outcomes in a file, by the names of their faults."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def equivalent() -> set[str]:
    """Return the names of the faults that change nothing."""
    lines = EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []
    return {line.split()[0] for line in lines if line and not line.startswith("#")}


def folder_of(file: str) -> str:
    """Return the folder that a file counts for in the table."""
    return "/".join(Path(file).parts[:2]) if len(Path(file).parts) > 2 else Path(file).parts[0]


def _row(name: str, *counts: list[bool]) -> str:
    shares = (f"{sum(caught):6}  {sum(caught) / max(1, len(caught)):4.0%}" for caught in counts)
    return "  ".join((f"{name:28} {len(counts[0]):6}", *shares))


def table(
    records: dict[str, dict[str, Any]], earlier: Mapping[str, dict[str, Any]]
) -> Iterator[str]:
    """Yield the lines of the table by folder, and the faults that nothing noticed.

    With outcomes of earlier tests, only the faults that both had are counted, the earlier first.
    """
    names = [name for name in records if name not in equivalent()]
    columns = [records]
    if earlier:
        names = [name for name in names if name in earlier]
        columns = [{name: earlier[name] for name in names}, records]
    folders = collections.defaultdict(list)
    for name in names:
        folders[folder_of(records[name]["file"])].append(name)
    yield f"{'folder':28} faults" + ("  caught before" if earlier else "") + "  caught"
    for folder, own in [*sorted(folders.items()), ("all", names)]:
        yield _row(
            folder, *([column[name]["outcome"] != "missed" for name in own] for column in columns)
        )
    for name in sorted(names, key=lambda each: (records[each]["file"], records[each]["function"])):
        record = records[name]
        if record["outcome"] == "missed":
            noticed = name in earlier and earlier[name]["outcome"] != "missed"
            change = f"{record['old']!r} -> {record['new']!r}"
            place = f"{record['file']} {record['function']}"
            word = "no longer caught" if noticed else "missed"
            yield f"{word} {name} {place}: {record['kind']}: {change[:160]}"


def noticed_by(outcome: str, folder: Path) -> list[str]:
    """Return the test that an outcome names, without its case, if it is still there."""
    name = outcome.removeprefix("FAILED ").partition("[")[0]
    file, _, function = name.partition("::")
    path = folder / file
    there = outcome.startswith("FAILED ") and path.is_file()
    return [name] if there and f"def {function}(" in path.read_text() else []


def plant_all(
    faults: list[Fault], results: Path, tier: str, workers: int, earlier: Mapping[str, Any]
) -> None:
    """Run the tests of each fault that `results` lacks, in copies of the checkout.

    Args:
      faults: What to plant.
      results: File of outcomes.
      tier: Tests to run.
      workers: Faults at a time.
      earlier: Outcomes of other tests, by the names of faults.
    """
    tests = nearest_tests()
    known = load(results)
    lock, folders = threading.Lock(), queue.SimpleQueue[Path]()
    caches = results.with_suffix(".cache")
    with tempfile.TemporaryDirectory(prefix="mutations-") as temporary:
        for number in range(workers):
            folder = Path(temporary, str(number))
            folder.mkdir()
            copy_tree(folder)
            folders.put(folder)

        def plant(fault: Fault) -> None:
            folder, start = folders.get(), time.perf_counter()
            path = folder / fault.file
            original = path.read_bytes()
            change = fault.change
            planted = original[: change.start] + change.text.encode() + original[change.end :]
            try:
                path.write_bytes(planted)
                cache = caches / folder.name
                first = noticed_by(earlier.get(fault.name, {}).get("outcome", ""), folder)
                outcome = run_tests(folder, first, tier, cache) if first else "missed"
                if outcome == "missed":
                    outcome = run_tests(folder, tests[fault.file], tier, cache)
            finally:
                path.write_bytes(original)
                folders.put(folder)
            record = {
                "name": fault.name,
                "file": fault.file,
                "function": fault.function,
                "line": original[: change.start].count(b"\n") + 1,
                "kind": change.kind,
                "old": fault.old,
                "new": change.text,
                "outcome": outcome,
                "seconds": round(time.perf_counter() - start),
            }
            with lock, results.open("a") as file:
                file.write(json.dumps(record) + "\n")
                place = f"{fault.file}:{record['line']}"
                print(f"{record['seconds']:4} s  {place} {change.kind}: {outcome}", flush=True)

        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            list(pool.map(plant, [fault for fault in faults if fault.name not in known]))


def main() -> None:
    """Plant the faults, or print the table of those that were planted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results = ROOT / "build" / "mutations.jsonl"
    parser.add_argument("--results", type=Path, default=results, help="outcomes, JSON lines")
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tier", choices=TIERS, default="test")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--first", type=Path, help="outcomes of earlier tests, JSON lines")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    earlier = load(options.first) if options.first else {}
    if not options.table:
        faults = draw(options.faults, options.seed)
        plant_all(faults, options.results, options.tier, options.workers, earlier)
    print("\n".join(table(load(options.results), earlier)))


if __name__ == "__main__":
    main()
