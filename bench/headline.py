"""What README.md and RESULTS.md show of other files: headline figures, badges, the address.

    python -m bench headline

Figures are in docs/results/headline.json: a new measurement is written there, and the tables of
both pages follow from it. Fields of a figure:

    measurement  what was measured
    ours, peer   the result, and what it is compared with; **bold** where the peer is better
    machines     where, if it matters; the second machine's result is `second`, in **bold** if ours
                 is behind there
    command      that measures it again
    page         below docs/results that says more
    readme       a short name, if README.md shows the figure
"""

import html
import json
import tomllib
from pathlib import Path
from typing import Any

from docs.site.repository import colab_badge, repository

ROOT = Path(__file__).parents[1]
README, RESULTS = ROOT / "README.md", ROOT / "RESULTS.md"
FIGURES = ROOT / "docs/results/headline.json"
NOTEBOOK = "colab/train_and_sample.ipynb"


def tables() -> dict[Path, str]:
    """Return the headline figures as the table of each page that shows them."""
    figures: list[dict[str, Any]] = json.loads(FIGURES.read_text("utf-8"))
    results = ["| measurement | result | compared with | second machine | command |"]
    readme = ["| measurement | result | compared with |"]
    results.append("| --- " * 5 + "|")
    readme.append("| --- " * 3 + "|")
    for each in figures:
        first, second = ([f" ({machine})" for machine in each["machines"]] + ["", ""])[:2]
        result, again = each["ours"] + first, each["second"] + second
        link = each["page"].removeprefix("../")
        page = f"docs/{link}" if link != each["page"] else f"docs/results/{link}"
        results.append(
            f"| [{each['measurement']}]({page}) | {result} | {each['peer']} "
            f"| {again or '–'} | `{each['command']}` |"
        )
        if each["readme"]:
            found = ", ".join(filter(None, (result, again)))
            readme.append(f"| {each['readme']} | {found} | {each['peer']} |")
    return {README: "\n".join(readme), RESULTS: "\n".join(results)}


def address() -> str:
    """Return README's lines with the project's address; nothing until pyproject.toml has it."""
    found = repository()
    if found is None:
        return ""
    return f"{colab_badge(NOTEBOOK)}\n\n```bash\npip install git+{found}\n```"


def badge(name: str, value: str) -> str:
    """Return a badge as SVG, in the form that is usual on GitHub."""
    left, right = (round(6.6 * len(text)) + 12 for text in (name, value))
    width = left + right
    text = 'fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img">
<title>{name}: {html.escape(value)}</title>
<rect width="{width}" height="20" rx="3" fill="#555"/>
<rect x="{left}" width="{right}" height="20" rx="3" fill="#0969da"/>
<rect x="{left}" width="4" height="20" fill="#0969da"/>
<g text-anchor="middle" {text}>
<text x="{left / 2}" y="14">{name}</text>
<text x="{left + right / 2}" y="14">{html.escape(value)}</text>
</g>
</svg>
"""


def badges() -> dict[Path, str]:
    """Return the badges of README, from what pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    jax = next(each for each in project["dependencies"] if each.startswith("jax>"))
    shown = {
        "python": project["requires-python"].replace(">=", "≥ "),
        "jax": jax.removeprefix("jax").replace(">=", "≥ ").replace(",<", ", < "),
        "license": project["license"],
    }
    return {
        ROOT / f"docs/figures/badge_{name}.svg": badge(name, value) for name, value in shown.items()
    }


def with_block(page: str, name: str, text: str) -> str:
    """Return the page with a text between the markers of that name.

    Raises ValueError if the page has no such markers.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    if not found or end not in rest:
        raise ValueError(f"no markers {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}".replace("\n\n\n", "\n\n")


def written() -> dict[Path, str]:
    """Return the contents of all files that follow from others."""
    pages = {
        path: with_block(path.read_text("utf-8"), "headline figures", table)
        for path, table in tables().items()
    }
    pages[README] = with_block(pages[README], "address", address())
    return {**pages, **badges()}


def main() -> None:
    """Write the files."""
    for path, text in written().items():
        path.write_text(text, "utf-8")
