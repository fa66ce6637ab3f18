import jax
import pytest

from train.errors import UserError
from train.runtime.oom import explain_oom, is_oom_error, oom_message

CPU = "RESOURCE_EXHAUSTED: Out of memory allocating 123 bytes."


@pytest.mark.parametrize(
    ("message", "amount"),
    [
        ("Used 19.68G of 15.48G hbm. Exceeded hbm capacity by 4.20G.", " asking for 19.68G"),
        ("while trying to allocate 12884901888 bytes.", " asking for 12884901888 bytes"),
        (CPU, " asking for 123 bytes"),
        ("Failed to allocate request for 2.00GiB (2147483648B)", " asking for 2.00GiB"),
        ("RESOURCE_EXHAUSTED", ""),
    ],
)
def test_requested_bytes_are_parsed(message: str, amount: str) -> None:
    text = oom_message(["give less", "have more"], message)
    assert text == f"memory: ran out{amount}; give less, or have more"


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError(CPU), MemoryError()])
def test_oom_is_explained(error: Exception) -> None:
    lower = pytest.raises(UserError, match=r"memory: ran out.*; lower batch_size$")
    with lower, explain_oom(lambda: ["lower batch_size"]):
        raise error


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INTERNAL: no"), ValueError(CPU)])
def test_other_errors_are_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, explain_oom(list):
        raise error
    assert caught.value is error


def test_oom_errors_are_recognized() -> None:
    assert is_oom_error(jax.errors.JaxRuntimeError("cuda: Out Of Memory"))
    assert is_oom_error(MemoryError("whatever"))
    assert not is_oom_error(jax.errors.JaxRuntimeError("INVALID_ARGUMENT"))
