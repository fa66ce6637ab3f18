"""Names and summaries of the shipped configs, read without running them: no JAX is loaded."""

import ast
import dataclasses
import difflib
import importlib.resources
from collections.abc import Iterable
from typing import cast


@dataclasses.dataclass(frozen=True)
class ShippedConfig:
    """A file of `configs/`."""

    name: str
    summary: str
    """First line of its docstring."""
    experiments: tuple[str, ...]
    """Names of its experiments; the first is the default."""


def shipped_configs() -> list[ShippedConfig]:
    """Return all shipped config files, by name."""
    # `configs` imports `train`: the only reference against that direction.
    files = (importlib.resources.files("configs")).iterdir()
    sources = {
        file.name.removesuffix(".py"): file.read_text(encoding="utf-8")
        for file in files
        if file.name.endswith(".py") and file.name != "__init__.py"
    }
    return [_read(name, sources[name]) for name in sorted(sources)]


def _read(name: str, source: str) -> ShippedConfig:
    """Read a config's summary, and the names in its `EXPERIMENTS`, a dict with literal keys.

    A file that computes the dict lists the names in a tuple `NAMES`.
    """
    tree = ast.parse(source)
    values = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if "NAMES" in values:
        names = ast.literal_eval(values["NAMES"])
    else:
        names = [ast.literal_eval(key) for key in cast(ast.Dict, values["EXPERIMENTS"]).keys if key]
    summary = (ast.get_docstring(tree) or "").partition("\n")[0]
    return ShippedConfig(name, summary, tuple(names))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean gpt2?)` for the known name closest to a misspelled one, or nothing."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.65)
    return f" (did you mean {close[0]}?)" if close else ""
