"""What holds in all tests of the trainer."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def plots_as_stubs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Draw the loss plot of a run, but do not render it, unless the module has `RENDERS_PLOTS`.

    It is half of the time of a tiny run whose programs are compiled.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "RENDERS_PLOTS", False):
            patch.setattr("train.telemetry.loss_plot.png", lambda figure: b"not rendered")
        yield
