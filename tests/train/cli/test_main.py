import dataclasses
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.train.support import command, lines_of, losses, write_config
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.cli.config_verbs import FitArguments
from train.cli.main import main, print_error
from train.cli.parsing import parse
from train.config.experiment_files import find_experiment, list_experiments
from train.config.io import flatten_experiment
from train.errors import UsageError, UserError
from train.optim.elementwise import Lion
from transformer import AttentionConfig, Precision

Capture = pytest.CaptureFixture[str]


class Trained(NamedTuple):
    config: str
    workdir: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("cli")
    light = {"num_layers": "1", "dropout": "0.0", "recovery": "RecoveryConfig(window=0)"}
    config, workdir = write_config(folder, **light), str(folder / "run")
    with pytest.raises(SystemExit) as stop:
        main(["fit", config, "--workdir", workdir, "--steps", "3", "--quiet"])
    assert stop.value.code == 0
    return Trained(config, workdir)


def one_object(output: str) -> dict[str, object]:
    """Parse standard output, which must be one line with one JSON object."""
    assert output.endswith("\n")
    assert output.count("\n") == 1
    actual = json.loads(output)
    assert isinstance(actual, dict)
    return actual


@pytest.mark.full
@pytest.mark.parametrize("name", list_experiments())
def test_contract_options_of_every_experiment(name: str) -> None:
    line = (
        "--steps 7 --batch-size 4800 --seed 11 --data.path text.txt --log-every 3 "
        "--checkpoint.every 5 --mesh.data 2 --mesh.fsdp -1 --mesh.tensor 2 "
        "--model.precision bfloat16 --workdir here"
    )
    base = find_experiment(name)
    replace = dataclasses.replace
    parsed = parse(FitArguments, line.split(), verb="fit", experiment=base)
    assert parsed.workdir == "here"
    assert parsed.experiment == replace(
        base,
        steps=7,
        batch_size=4800,
        seed=11,
        data=replace(base.data, path="text.txt"),
        log_every=3,
        checkpoint=replace(base.checkpoint, every=5),
        mesh=replace(base.mesh, data=2, fsdp=-1, tensor=2),
        model=replace(base.model, precision=Precision.parse("bfloat16")),
    )


def flag(name: str, value: object) -> list[str]:
    """Return a line of config.txt as a flag, unless it is None, empty, or part of a list."""
    path, _, last = name.replace("_", "-").rpartition(".")
    prefix = f"--{path}." if path else "--"
    if value in (None, []) or last.isdigit():
        return []
    if isinstance(value, bool):
        return [f"{prefix}{last if value else f'no-{last}'}"]
    return [f"{prefix}{last}={value}"]


@pytest.mark.parametrize("name", ["quickstart", "multi30k", "sst2"])
def test_every_setting_is_a_flag(name: str) -> None:
    wanted = find_experiment(name)
    model = dataclasses.replace(
        wanted.model, num_layers=1, tie_embeddings=not wanted.model.tie_embeddings, remat="full"
    )
    base = dataclasses.replace(wanted, model=model, optimizer=Lion(beta1=0.5), steps=7, name="x")
    settings = flatten_experiment(wanted)
    words = [word for path, value in settings.items() for word in flag(path, value)]
    assert parse(FitArguments, words, verb="fit", experiment=base).experiment == wanted


def test_settings_inside_a_layer_and_parts_of_a_precision() -> None:
    place = "--model.layer-pattern.0"
    words = [f"{place}.residual-dropout", "0.25", f"{place}.mixer.num-heads", "12"]
    words += ["--model.no-causal", "--model.tie-embeddings"]
    words += ["--model.precision", "compute=bfloat16,softmax=bfloat16"]
    base = find_experiment("quickstart")
    model = parse(FitArguments, words, verb="fit", experiment=base).experiment.model
    [block] = model.layer_pattern
    assert isinstance(block.mixer, AttentionConfig)
    assert (block.residual_dropout, block.mixer.num_heads) == (0.25, 12)
    assert (model.causal, model.tie_embeddings) == (False, True)
    assert (model.precision.compute, model.precision.softmax) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("fti quickstart", "verb fti: is not known (did you mean fit?); choose one of fit,"),
        ("predict W", "verb predict: is not known; choose one of fit, evaluate"),
        ("fit --steps 3", "fit: CONFIG is missing; write python -m train fit CONFIG"),
        ("fit quickstrat", "config quickstrat: is not known (did you mean quickstart?); choose"),
        ("fit gpt2:tiny", "gpt2 has no experiment tiny; choose one of small, medium"),
        ("fit quickstart --steps 0", "steps 0: give 1 or more"),
        (
            "fit quickstart --model.d-model 50",
            "error: AttentionConfig.num_heads 6: does not divide",
        ),
        ("fit quickstart --help optimiser", "no part of the settings (did you mean optimizer?);"),
        ("fit quickstart --import --steps 3", "--import: names no module"),
        ("doctor now", "doctor now: takes no arguments but --json; leave it out"),
    ],
)
def test_usage_errors(capsys: Capture, line: str, message: str) -> None:
    result = command(capsys, *line.split())
    assert (result.status, result.output) == (2, "")
    assert result.error.startswith("error: ")
    assert result.error.count("\n") == 1
    assert message in result.error


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fit quickstart --stepz 3", ("--stepz", "Perhaps you meant", "--steps INT")),
        ("fit quickstart --steps many", ("Error parsing --steps", "'many'", "Number of weight")),
        ("fit quickstart --steps", ("Missing value", "'--steps'")),
        ("fit quickstart --optimizer.kind odd", ("invalid choice 'odd'", "'adamw'", "'muon'")),
        ("fit quickstart --model.precision float8", ("--model.precision", "float8 is not known")),
        ("describe quickstart --layers 3", ("--layers", "--model.num-layers")),
        ("sample", ("Missing from python -m train sample", "W", "Folder of the run")),
        ("evaluate W stray", ("Unrecognized options: stray",)),
    ],
)
def test_arguments_that_tyro_refuses(capsys: Capture, line: str, words: tuple[str, ...]) -> None:
    result = command(capsys, *line.split())
    assert (result.status, result.output) == (2, "")
    assert all(each in result.error for each in words)


def test_unencodable_characters_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, "ascii"))
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    monkeypatch.setattr("train.cli.main.usage", lambda: "2 × 3")
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("train", run_name="__main__")
    sys.stdout.flush()
    assert (stop.value.code, shown.getvalue()) == (0, b"2 \\xd7 3\n")


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("evaluate RUN --split test", 1, "split 'test': the data have only train, validation; set"),
        ("evaluate RUN --step 99", 1, "99: does not exist; the folder has steps 3"),
        ("evaluate /no/such/run", 1, "workdir /no/such/run: does not exist; give the folder"),
        ("sample RUN --top-p 0", 2, "top_p 0.0: give more than 0"),
        ("sample RUN --beams=0", 2, "leave it out (it supports --max-new-tokens, --temper"),
        ("sample RUN --prompt caïman", 1, "lacks ('ï')"),
        ("sample RUN --max-new-tokens 0", 1, "max_new_tokens 0"),
        ("fit OWN --workdir RUN --steps 2", 1, "is at step 3 already; give --steps 3 or more"),
        ("fit OWN --workdir RUN --steps 3 --batch-size 16", 1, "trained with batch_size = 8"),
        ("fit OWN --workdir RUN --steps 3 --mesh.fsdp 3", 2, "mesh data -1 x fsdp 3"),
    ],
)
def test_errors(
    capsys: Capture,
    trained: Trained,
    count_devices: Callable[[int], None],
    line: str,
    status: int,
    message: str,
) -> None:
    count_devices(8)
    places = {"RUN": trained.workdir, "OWN": trained.config}
    result = command(capsys, *(places.get(word, word) for word in line.split()))
    assert (result.status, result.output) == (status, "")
    assert result.error.startswith("error: ")
    assert result.error.count("\n") == 1
    assert message in result.error


def test_name_of_a_config_suggests_its_run(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("runs/gpt2-medium")
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    result = command(capsys, "evaluate", "gpt2:medium")
    assert "did you mean runs/gpt2-medium?" in result.error


def test_debug_shows_a_traceback(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "gpt9", "--debug"])
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert "UsageError: config gpt9" in shown


def test_errors_are_one_line(capsys: Capture) -> None:
    actual = [
        print_error(UserError("thing: has\n  two lines; mend it")),
        print_error(UsageError("verb: is not known")),
        print_error(FileNotFoundError(2, "No such file or directory", "a.txt")),
        print_error(KeyboardInterrupt()),
    ]
    assert actual == [1, 2, 1, 130]
    remedy = "check the path, its permissions and the free disk space"
    assert capsys.readouterr().err.splitlines() == [
        "error: thing: has two lines; mend it",
        "error: verb: is not known",
        f"error: [Errno 2] No such file or directory: 'a.txt'; {remedy}",
        "interrupted",
    ]


def test_fit_as_json(capsys: Capture, trained: Trained) -> None:
    """Also for a finished run: the metrics are those of its end."""
    line = ("fit", trained.config, "--workdir", trained.workdir, "--steps", "3", "--json")
    result = command(capsys, *line)
    assert (result.status, result.error) == (0, "")
    last = lines_of(Path(trained.workdir) / "metrics.jsonl")[-1]
    assert last.pop("split") == "validation"
    assert one_object(result.output) == {"workdir": trained.workdir, **last}


@pytest.mark.full
def test_evaluate(capsys: Capture, trained: Trained) -> None:
    result = command(capsys, "evaluate", trained.workdir, "--json")
    assert (result.status, result.error) == (0, "")
    metrics = one_object(result.output)
    assert (metrics.pop("step"), metrics.pop("split")) == (3, "validation")
    last = lines_of(Path(trained.workdir) / "metrics.jsonl")[-1]
    assert metrics == pytest.approx({name: last[name] for name in metrics}, rel=1e-6)
    assert set(metrics) == {"loss", "perplexity", "bits_per_byte"}
    shown = command(capsys, "evaluate", trained.workdir).output
    assert f"loss: {last['loss']:.4f}\n" in shown
    assert f"bits per byte: {last['bits_per_byte']:.4f}\n" in shown


@pytest.mark.full
def test_sample(capsys: Capture, trained: Trained) -> None:
    options = ("--max-new-tokens", "5", "--seed", "3")
    prompts = ("--prompt", "the cat", "sat")
    result = command(capsys, "sample", trained.workdir, *prompts, *options, "--json")
    assert (result.status, result.error) == (0, "")
    texts = one_object(result.output)["text"]
    assert isinstance(texts, list)
    assert [len(text) <= 5 for text in texts] == [True, True]
    shown = command(capsys, "sample", trained.workdir, *prompts, *options)
    assert shown.output == f"the cat{texts[0]}\n---\nsat{texts[1]}\n"
    streamed = command(capsys, "sample", trained.workdir, "--prompt", "the cat", *options)
    assert streamed.output == f"the cat{texts[0]}\n"


@pytest.mark.full
def test_score(capsys: Capture, trained: Trained) -> None:
    texts = ("--text", "the cat", "sat")
    result = command(capsys, "score", trained.workdir, *texts, "--context", "the", "--json")
    assert (result.status, result.error) == (0, "")
    scores = one_object(result.output)
    assert set(scores) == {"log_likelihood", "tokens"}
    totals, counts = scores["log_likelihood"], scores["tokens"]
    assert isinstance(totals, list)
    assert all(total < 0 for total in totals)
    assert counts == [7, 3]
    shown = command(capsys, "score", trained.workdir, *texts, "--context", "the").output
    assert [line.split()[0] for line in shown.splitlines()] == [
        "log-likelihood",
        *(f"{total:.4f}" for total in totals),
    ]


def test_describe_as_json(capsys: Capture) -> None:
    result = command(capsys, "describe", "gpt2:small", "--json")
    assert (result.status, result.error) == (0, "")
    parameters = one_object(result.output)["parameters"]
    assert isinstance(parameters, dict)
    assert parameters["total"] == 124_439_808


ROOT = Path(__file__).parents[3]


def process(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Return the exit status, output and errors of a new process, on one device."""
    ran = subprocess.run(
        [sys.executable, "-m", "train", *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    return ran.returncode, ran.stdout, ran.stderr


STOP = """
import os, signal
from train.reporter import Reporter

def stop(reporter, step, metrics, log_training=Reporter.log_training):
    log_training(reporter, step, metrics)
    if step == int(os.environ.get("STOP_AT", 0)):
        os.kill(os.getpid(), signal.SIGTERM)

Reporter.log_training = stop
"""


@pytest.mark.full
def test_stopped_process_resumes(tmp_path: Path) -> None:
    """Act as a scheduler: SIGTERM, exit status 75, the same command again."""
    config = write_config(tmp_path, steps="40", checkpoint="CheckpointConfig(every=0)")
    with Path(config).open("a") as file:
        file.write(STOP)
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    broken, full = tmp_path / "broken", tmp_path / "whole"
    commands = {each: ("fit", config, "--workdir", str(each), "--quiet") for each in (broken, full)}
    said = "stopped by SIGTERM at step 23, checkpoint saved; run the same command to resume"
    stopped = process(*commands[broken], STOP_AT="23", **cache)
    assert stopped == (75, "", f"{broken}: {said}\n")
    assert max(losses(broken)) == 23
    for again in commands.values():
        assert process(*again, **cache) == (0, "", "")
    assert losses(broken) == losses(full)
    ends = [lines_of(workdir / "metrics.jsonl")[-1] for workdir in (broken, full)]
    assert ends[0] == ends[1]
    events = [line["event"] for line in lines_of(broken / "logbook.jsonl")]
    begun = [event for event in events if event != "saved"]
    assert begun == ["started", "preempted", "resumed", "finished"]
    nothing = ("--data.path", "/no/such/file", "--workdir", str(tmp_path / "run"))
    refused = "error: data.path /no/such/file: does not exist; give a file, a folder or a glob\n"
    assert process("fit", "quickstart", *nothing) == (1, "", refused)
