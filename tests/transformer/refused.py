from typing import Any

import pytest


def assert_refused(config_class: Any, fields: dict[str, Any]) -> None:
    """Assert that settings raise an error of one line that names the first of the fields."""
    with pytest.raises(ValueError, match=rf"\b{next(iter(fields))} .*: ") as caught:
        config_class(**fields)
    assert "\n" not in str(caught.value)
