"""Numbers in settings that overflow or exceed any memory are refused; full disks and pipes."""

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

from bench.drills.fuzz import put
from tests.train.support import command, tiny, write_config
from train.assembly import make_engine
from train.cli.config_verbs import PlanArguments
from train.cli.generation_verbs import SampleArguments
from train.cli.parsing import parse
from train.config.experiment_files import find_experiment
from train.config.io import experiment_from_dict, experiment_to_dict
from train.data.bitext import BitextDataConfig
from train.detector import RecoveryConfig
from train.engines.lora import LoRAConfig
from train.errors import UsageError, UserError
from train.estimate import remedies
from train.optim.schedules import ScheduleConfig
from transformer import (
    BlockConfig,
    FeedForwardConfig,
    Hardware,
    LanguageModel,
    RoPE,
    TransformerConfig,
)
from transformer.generation.sampling import SamplingConfig

OVERFLOWS = {
    "steps": (2**31, 2**63, 10**40, -(10**40)),
    "data.sequence_length": (2**63 - 1, 10**40),
    "model.num_layers": (2**63 - 1, 10**40),
    "model.layer_pattern.0.mixer.num_heads": (2**16 + 1, 10**40),
    "schedule.learning_rate": (math.inf, math.nan, 1e308),
    "optimizer.weight_decay": (math.inf, -math.inf, math.nan, 1e308),
    "model.layer_pattern.0.norm.epsilon": (math.inf, math.nan, 1e308),
}


@pytest.mark.parametrize("path", OVERFLOWS)
def test_numbers_of_settings_have_limits(path: str) -> None:
    for value in OVERFLOWS[path]:
        plain = experiment_to_dict(find_experiment("quickstart"))
        put(plain, path, value)
        with pytest.raises(UserError, match=rf"{path.rpartition('.')[2]}\b"):
            experiment_from_dict(plain, "an experiment")


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LoRAConfig, {"rank": -1}),
        (LoRAConfig, {"rank": 2, "alpha": 0.0}),
        (RecoveryConfig, {"threshold": 0.0}),
        (RecoveryConfig, {"lr_factor": 1.5}),
        (ScheduleConfig, {"warmup_steps": -1}),
        (ScheduleConfig, {"min_lr_ratio": 1.5}),
        (SamplingConfig, {"top_k": -1}),
        (SamplingConfig, {"top_p": 0.0}),
        (RoPE, {"theta": 1.0}),
        (RoPE, {"fraction": 1.5}),
        (FeedForwardConfig, {"activation": "relu", "swish_beta": 2.0}),
    ],
)
def test_numbers_out_of_range_are_refused(config: Any, settings: dict[str, Any]) -> None:
    config()
    name, value = list(settings.items())[-1]
    with pytest.raises((UsageError, ValueError), match=rf"\b{name} {value}: "):
        config(**settings)


def test_verb_options_are_checked() -> None:
    base = find_experiment("quickstart")
    with pytest.raises(UsageError, match=r"^seed 9223372036854775808: is too large; give"):
        parse(SampleArguments, ["W", "--seed", str(2**63)], verb="sample")
    with pytest.raises(UsageError, match=r"is not a finite number"):
        parse(PlanArguments, ["--tokens", "nan"], verb="plan", experiment=base)


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
        ({}, None),
        ({"model.d_model": 2**18}, "the training state"),
        ({"batch_size": 2**26}, "the inputs of the layers"),
        ({"batch_size": 2**26, "grad_accum_steps": 2**26}, "a batch's tokens"),
    ],
)
def test_what_no_memory_holds_is_refused_before_it_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], what: str | None
) -> None:
    monkeypatch.setattr(remedies, "host_memory_bytes", lambda: 2**33)
    plain = experiment_to_dict(tiny(tmp_path))
    for path, value in (changes | {"model.vocab_size": 32}).items():
        put(plain, path, value)
    experiment = experiment_from_dict(plain, "an experiment")
    engine = make_engine(experiment, Hardware(count=jax.device_count()))
    if what is None:
        remedies.check_minimum_memory(engine, experiment)
        return
    with pytest.raises(UserError, match=rf"^memory: {what} would take .*machine has 8.*iB; "):
        remedies.check_minimum_memory(engine, experiment)


@pytest.mark.full
def test_fit_checks_memory_before_building(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ("--workdir", str(tmp_path / "run"), "--quiet", "--batch-size", str(2**26))
    result = command(capsys, "fit", write_config(tmp_path), *given)
    assert (result.status, result.output) == (1, "")
    assert result.error.startswith("error: memory: the inputs of the layers would take ")


# Standard output.


@pytest.mark.parametrize(
    ("line", "target"), [("--help", ">/dev/full"), ("--help", ">&-"), ("fit --help", ">/dev/full")]
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
