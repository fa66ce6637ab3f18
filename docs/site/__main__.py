"""Build the documentation site.

    python -m docs.site [--output build/site]

All pages are first written to `build/docs`: those of `docs/`, those of the repository's root, the
reference that is generated from the code, and the files that pages link to. Sphinx then builds
them. Any warning, such as a link that leads nowhere, fails the build. Nothing is fetched.
"""

import argparse
import shutil
import sys
from pathlib import Path

from sphinx.cmd.build import build_main

from docs.site.stage import stage

ROOT = Path(__file__).parents[2]


def main(arguments: list[str] | None = None) -> int:
    """Build the site and return the exit status of Sphinx."""
    parser = argparse.ArgumentParser(prog="python -m docs.site", description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "site")
    parser.add_argument("--pages", type=Path, default=ROOT / "build" / "docs")
    given = parser.parse_args(arguments)
    shutil.rmtree(given.pages, ignore_errors=True)
    stage(given.pages)
    settings = ["--conf-dir", str(ROOT / "docs" / "site"), "--fresh-env", "--quiet"]
    strict = ["--fail-on-warning", "--keep-going"]
    status: int = build_main([*settings, *strict, str(given.pages), str(given.output)])
    print(f"{given.output / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
