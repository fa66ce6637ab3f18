"""`docs/attention.md` agrees with what the mixers declare."""

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from transformer import MIXERS
from transformer.attention.config import Backend
from transformer.testing.trial import default_config

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"
COLUMNS = ("causal", "cached", "segments", "cross", "any length")


def rows(heading: str) -> dict[str, dict[str, str]]:
    """Return the rows of the first table with this heading in its first column, by that column."""
    lines = PAGE.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    cut = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:]]
    count = next(i for i, line in enumerate(lines[start:]) if not line.startswith("|"))
    titles, _, *body = cut[:count]
    return {row[0].strip("`"): dict(zip(titles, row, strict=True)) for row in body}


KINDS = rows("kind")


def test_table_lists_every_mixer() -> None:
    own = ("transformer.attention.full", "transformer.attention.variants")
    assert set(KINDS) == {name for name, each in MIXERS.items() if each.__module__.startswith(own)}


@pytest.mark.parametrize("kind", KINDS)
def test_table_has_declared_abilities(kind: str) -> None:
    config, row = default_config(kind), KINDS[kind]
    abilities: Any = MIXERS[kind].abilities(config)
    said = {title.replace(" ", "_"): row[title] != "–" for title in COLUMNS}
    declared = dataclasses.asdict(abilities)
    assert said == {name: declared[name] for name in said}
    assert (row["segments"] == "by index") == config.depends_on_row_index
    assert all(row[title] in ("yes", "–", "by index") for title in COLUMNS)


@pytest.mark.parametrize("kind", KINDS)
def test_table_has_measured_cost_growth(kind: str) -> None:
    """At twice the length, a token costs as many FLOPs or about twice as many."""
    config = default_config(kind)
    counts = [MIXERS[kind].score_flops(config, 64, length) for length in (2**14, 2**15)]
    shorter, longer = (count.full for count in counts if count is not None)
    assert longer / shorter == pytest.approx(1 if KINDS[kind]["cost in T"] == "T" else 2, rel=0.3)


@pytest.mark.parametrize("kind", KINDS)
def test_table_has_the_file_of_each_mixer(kind: str) -> None:
    found = re.search(r"\((.*)\)", KINDS[kind]["file"])
    assert found is not None
    path = (PAGE.parent / found[1]).resolve()
    assert path.exists()
    assert MIXERS[kind].__module__.replace(".", "/") + ".py" == str(
        path.relative_to(PAGE.parents[1])
    )


def test_every_backend_is_documented() -> None:
    assert set(rows("backend")) == set(get_args(Backend)) - {"auto"}


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target


@pytest.mark.slow
def test_example_mixer_passes() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    before = dict(MIXERS)
    try:
        exec(compile(example, PAGE.name, "exec"), {"__name__": "example"})
        assert set(MIXERS) - set(before) == {"sharp"}
    finally:
        MIXERS.pop("sharp", None)
