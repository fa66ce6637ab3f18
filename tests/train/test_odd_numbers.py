"""Numbers in settings that overflow or exceed any memory raise immediately."""

import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_type_hints

import jax
import jax.numpy as jnp
import pytest

from bench.drills._fuzz_models import put
from tests.train.support import command, tiny, write_config
from train.cli.config_verbs import PlanArguments
from train.cli.generation_verbs import SampleArguments
from train.cli.parsing import parse
from train.config.experiment_files import find_experiment
from train.config.io import experiment_from_dict, experiment_to_dict
from train.data.example_configs import BitextDataConfig
from train.engine import make_engine
from train.errors import UsageError, UserError
from train.experiment import Experiment
from train.runtime import oom
from transformer import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    Hardware,
    LanguageModel,
    TransformerConfig,
)
from transformer.validation import (
    MAX_FLOAT,
    MAX_INTEGER_BY_FIELD,
    check_at_least,
    check_number,
    check_numbers,
)

CONFIGS = ("quickstart", "multi30k", "listops", "trec", "ud_ewt", "bert:base")


def numbers(config: Any, kind: type, path: str = "") -> Iterator[str]:
    """Return the dotted names of all settings of a type."""
    if isinstance(config, tuple):
        for index, each in enumerate(config):
            yield from numbers(each, kind, f"{path}{index}.")
    elif dataclasses.is_dataclass(config):
        for name, hint in get_type_hints(type(config)).items():
            if hint is kind:
                yield f"{path}{name}"
            yield from numbers(getattr(config, name, None), kind, f"{path}{name}.")


def settings(kind: type) -> list[tuple[str, str]]:
    """Return (config, setting) of all numbers of a type; each name once."""
    result: dict[str, str] = {}
    for name in CONFIGS:
        for path in numbers(find_experiment(name), kind):
            if "precision" not in path:
                result.setdefault(path, name)
    return [(name, path) for path, name in result.items()]


def changed(config: str, path: str, value: float) -> dict[str, Any]:
    plain = experiment_to_dict(find_experiment(config))
    put(plain, path, value)
    return plain


@pytest.mark.parametrize(("config", "path"), settings(int))
def test_every_integer_has_a_limit(config: str, path: str) -> None:
    for value in (2**63 - 1, 2**63, 10**40, -(10**40)):
        last = path.rpartition(".")[2]
        if value == MAX_INTEGER_BY_FIELD.get(last):
            continue
        with pytest.raises(UserError, match=rf"{last}\b"):
            experiment_from_dict(changed(config, path, value), "an experiment")


@pytest.mark.parametrize(("config", "path"), settings(float))
def test_every_float_fits_float32(config: str, path: str) -> None:
    for value in (math.inf, -math.inf, math.nan, 1e308):
        with pytest.raises(UserError, match=path.rpartition(".")[2]):
            experiment_from_dict(changed(config, path, value), "an experiment")


def test_errors_name_the_setting() -> None:
    experiment = find_experiment("quickstart")
    mixer = AttentionConfig()
    object.__setattr__(mixer, "soft_cap", math.inf)  # as in a class without checks
    block = dataclasses.replace(experiment.model.layer_pattern[0], mixer=mixer)
    with pytest.raises(
        ValueError, match=r"^model.layer_pattern.1.mixer.soft_cap inf: is not a finite"
    ):
        TransformerConfig(layer_pattern=(experiment.model.layer_pattern[0], block))


def test_the_largest_numbers() -> None:
    check_number("num_heads", MAX_INTEGER_BY_FIELD["num_heads"])
    check_number("x", -(2**31 - 1))
    check_number("x", -0.0)
    check_number("x", -MAX_FLOAT)
    assert jnp.isfinite(jnp.float32(MAX_FLOAT))
    check_numbers((True, "word", None, find_experiment, Experiment))
    with pytest.raises(ValueError, match=r"^a.num_heads 65537: is too large; give at most 65536$"):
        check_number("a.num_heads", 65537)
    with pytest.raises(ValueError, match=r"^x -2147483648: is too large; give at most 2147483647$"):
        check_number("x", -(2**31))
    with pytest.raises(ValueError, match=r"^x with more than 30 digits: is too large"):
        check_number("x", 10**5000)
    with pytest.raises(ValueError, match=r"^rate inf: is not a finite number; give one$"):
        check_at_least("rate", math.inf, 0)


@pytest.mark.parametrize(
    ("kind", "flag", "value"),
    [
        *((SampleArguments, flag, str(2**63)) for flag in ("--max-new-tokens", "--seed", "--step")),
        *((PlanArguments, flag, str(2**31)) for flag in ("--compile-best", "--show")),
        *((PlanArguments, "--tokens", value) for value in ("inf", "nan")),
    ],
)
def test_verb_options_are_checked(kind: Any, flag: str, value: str) -> None:
    default = (
        PlanArguments(experiment=find_experiment("quickstart")) if kind is PlanArguments else None
    )
    with pytest.raises(UsageError, match=r"is too large; give|is not a finite number"):
        parse(kind, [flag, value], verb="verb", default=default)


def test_tokens_of_a_batch_fit_32_bits() -> None:
    experiment = find_experiment("quickstart")
    length = experiment.sequence_length
    dataclasses.replace(experiment, batch_size=(2**31 - 1) // length)
    with pytest.raises(UsageError, match=r"tokens with data.sequence_length .* lower one of them"):
        dataclasses.replace(experiment, batch_size=2**31 // length)
    translation = find_experiment("multi30k")
    assert isinstance(translation.data, BitextDataConfig)
    most = dataclasses.replace(translation.data, batch_tokens=2**31 - 1)
    dataclasses.replace(translation, data=most)


def test_weight_larger_than_any_memory() -> None:
    block = BlockConfig(feed_forward=FeedForwardConfig(d_ff=2**24))
    config = TransformerConfig(
        vocab_size=9, d_model=2**24, num_layers=9_999, layer_pattern=(block,)
    )
    with pytest.raises(ValueError, match=r"^weight \w+: .* entries are more than any memory holds"):
        LanguageModel(config, hardware=Hardware()).logical_axes()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model.d_model": 2**18}, "the training state"),
        ({"batch_size": 2**26}, "the inputs of the layers"),
        ({"batch_size": 2**26, "grad_accum_steps": 2**26}, "a batch's tokens"),
    ],
)
def test_oversized_models_are_rejected_before_building(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], what: str
) -> None:
    monkeypatch.setattr(oom, "host_memory_bytes", lambda: 2**33)
    plain = experiment_to_dict(tiny(tmp_path))
    for path, value in changes.items():
        put(plain, path, value)
    put(plain, "model.vocab_size", 32)
    experiment = experiment_from_dict(plain, "an experiment")
    engine = make_engine(experiment, Hardware(count=jax.device_count()))
    with pytest.raises(
        UserError, match=rf"^memory: {what} would take .*, and the machine has 8.*iB; "
    ):
        oom.check_minimum_memory(engine, experiment)
    fits = tiny(tmp_path)
    fits = dataclasses.replace(fits, model=dataclasses.replace(fits.model, vocab_size=32))
    oom.check_minimum_memory(make_engine(fits, Hardware(count=jax.device_count())), fits)


@pytest.mark.full
def test_fit_checks_memory_before_building(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    given = ("--workdir", str(tmp_path / "run"), "--quiet", "--batch-size", str(2**26))
    result = command(capsys, "fit", write_config(tmp_path), *given)
    assert (result.status, result.output) == (1, "")
    assert result.error.startswith("error: memory: the inputs of the layers would take ")
    assert result.error.count("\n") == 1


# Standard output.


@pytest.mark.parametrize(
    ("line", "target"),
    [
        *itertools.product(["--help"], [">/dev/full", ">&-"]),
        ("fit quickstart --help", ">/dev/full"),
        ("goodput --help", ">/dev/full"),
    ],
)
def test_full_or_closed_standard_output(line: str, target: str) -> None:
    ran = subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -m train {line} {target}', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if target == ">&-":
        assert (ran.returncode, ran.stderr) == (0, "")
    else:
        assert ran.returncode == 1
        assert ran.stderr.startswith("error: [Errno 28] No space left on device")
        assert ran.stderr.count("\n") == 1


@pytest.mark.full
def test_closed_pipe_is_no_error() -> None:
    line = [sys.executable, "-m", "train", "describe", "quickstart"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        assert ran.stdout is not None
        assert ran.stderr is not None
        ran.stdout.close()
        assert (ran.wait(), ran.stderr.read()) == (0, "")
