import dataclasses
from typing import Any

import jax
import pytest

from train.errors import UserError
from train.experiment import Experiment
from train.parallel.mesh import MeshConfig
from train.runtime.oom import explain_oom, generic_remedies, is_oom_error, oom_message
from transformer import TransformerConfig

MODEL = TransformerConfig(d_model=768, num_layers=12)
EXPERIMENT = Experiment(model=MODEL, batch_size=32, grad_accum_steps=4)

COUNTED_DEVICES = 8

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


def test_remedies_name_settings_and_values() -> None:
    assert generic_remedies(EXPERIMENT) == [
        "set mesh.fsdp to 8 (now 1)",
        "raise grad_accum_steps (now 4) or lower batch_size (now 32)",
        "set model.remat to full (now none)",
        "lower data.sequence_length (now 256)",
        "lower model.d_model (now 768) or model.num_layers (now 12)",
    ]


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"grad_accum_steps": 32}, "raise grad_accum_steps"),
        ({"model": dataclasses.replace(MODEL, remat="full")}, "model.remat"),
        ({"mesh": MeshConfig(fsdp=8)}, "mesh.fsdp"),
    ],
)
def test_applied_settings_are_not_suggested(changes: dict[str, Any], remedy: str) -> None:
    remedies = generic_remedies(dataclasses.replace(EXPERIMENT, **changes))
    assert len(remedies) == 4
    assert not any(remedy in each for each in remedies)


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError(CPU), MemoryError()])
def test_oom_is_explained(error: Exception) -> None:
    lower = pytest.raises(UserError, match=r"memory: ran out.*lower batch_size")
    with lower, explain_oom(lambda: generic_remedies(EXPERIMENT)):
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
