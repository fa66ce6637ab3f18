"""Files that follow from others are what their generators write now."""

from importlib import import_module

import pytest

from bench.__main__ import README, readme
from bench.entries import PACKAGES, entries
from bench.headline import written


def test_headline_figures_badges_and_address_are_up_to_date() -> None:
    for path, text in written().items():
        assert path.read_text("utf-8") == text, f"{path.name}: run python -m bench headline"


def test_list_of_benchmarks_is_up_to_date() -> None:
    assert README.read_text("utf-8") == readme(), "run python -m bench readme"


def test_every_benchmark_has_a_name_of_its_own() -> None:
    names = [each.name for package in PACKAGES for each in entries()[package]]
    assert len(names) == len(set(names))


@pytest.mark.full
def test_every_benchmark_can_be_started() -> None:
    """The module that an entry names has the function that it names."""
    for listed in entries().values():
        for each in listed:
            module, function = each.run.split(":")
            try:
                loaded = import_module(f"bench.{module}")
            except ModuleNotFoundError as error:
                if (error.name or "").startswith(("bench", "train.", "transformer.")):
                    raise
                continue  # another library, which `needs` names
            assert callable(getattr(loaded, function)), each.name
