"""Runs as models of lm-evaluation-harness: with the package where it is installed, or a stub.

`python -m bench lm-eval` compares with the harness's own model.
"""

import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import train
from tests.train import lm_eval_stub
from tests.train.support import NO_DETECTOR, command, tiny
from tests.train.support import light_compiler as light_compiler
from tests.train.support import shared_programs as shared_programs
from train.errors import UserError
from train.interop.huggingface import import_model
from train.run import Run
from transformer.generation.generate import generate
from transformer.generation.log_likelihood import log_likelihoods
from transformer.generation.sampling import SamplingConfig
from transformer.models.language_model import LanguageModel

POSITIONS = 16


@pytest.fixture(scope="module")
def harness() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        if importlib.util.find_spec("lm_eval") is None:
            for name, module in lm_eval_stub.modules().items():
                patch.setitem(sys.modules, name, module)
        yield importlib.import_module("train.interop.lm_eval")
        patch.delitem(sys.modules, "train.interop.lm_eval")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("harness")
    experiment = tiny(folder, num_layers=1, dropout=0.0, steps=12, recovery=NO_DETECTOR)
    return train.fit(experiment, folder / "run")


@pytest.fixture(scope="module")
def model(harness: Any, run: Run) -> Any:
    # As the harness's command gives them.
    return harness.HarnessModel(run, batch_size="2", max_batch_size=8, device="cuda:0")


def request(*args: Any) -> Any:
    return types.SimpleNamespace(args=args)


def encode(run: Run, text: str) -> list[int]:
    assert run.tokenizer is not None
    return [int(token) for token in run.tokenizer.encode(text)]


def score(run: Run, row: list[int], context: int) -> float:
    assert isinstance(run.model, LanguageModel)
    return log_likelihoods(run.model, run.params, [row], context_lengths=[context])[0].total


def greedy(run: Run, tokens: list[int], count: int) -> str:
    assert isinstance(run.model, LanguageModel)
    assert run.tokenizer is not None
    sampling, stop = SamplingConfig(temperature=0), run.tokenizer.eos_token_id
    found = generate(
        run.model, run.params, [tokens], max_new_tokens=count, sampling=sampling, stop_token=stop
    )
    return run.tokenizer.decode(found.tokens[0])


def test_log_likelihoods_of_continuations(model: Any, run: Run) -> None:
    """After a context, one with a space at its end, none, and one longer than the model."""
    assert run.tokenizer is not None
    long = "the cat sat on a mat and saw"
    best = greedy(run, encode(run, "the c"), 2)
    pairs = [("the cat", " sat"), ("the cat ", "sat"), ("", "the"), (long, " red"), ("the c", best)]
    found = model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    end = run.tokenizer.eos_token_id
    expected = [
        score(run, encode(run, "the cat sat"), 7),
        score(run, encode(run, "the cat sat"), 7),
        score(run, [end, *encode(run, "the")], 1),
        score(run, encode(run, long + " red")[-POSITIONS - 1 :], POSITIONS + 1 - 4),
        score(run, encode(run, "the c" + best), 5),
    ]
    np.testing.assert_allclose([total for total, _ in found], expected, rtol=1e-5)
    assert found[0][1] is False
    assert found[4][1] is True


def test_rolling_windows_predict_each_token_once(model: Any, run: Run) -> None:
    assert run.tokenizer is not None
    text = "the cat sat on a mat and saw red fish by"
    tokens = encode(run, text)
    assert len(tokens) == 40
    windows = [
        score(run, [run.tokenizer.eos_token_id, *tokens[:16]], 1),
        score(run, tokens[15:32], 1),
        score(run, tokens[23:40], 9),  # with as much context as there is room for
    ]
    short = score(run, [run.tokenizer.eos_token_id, *encode(run, "a mat")], 1)
    found = model.loglikelihood_rolling([request(text), request("a mat")], disable_tqdm=True)
    np.testing.assert_allclose(found, [sum(windows), short], rtol=1e-5)


def test_texts_end_at_stop_strings(model: Any, run: Run) -> None:
    """More contexts than the batch has rows, one of them longer than the model, and one empty."""
    assert run.tokenizer is not None
    contexts = ["the", "a mat and", "the cat sat on a mat", "s", ""]
    rows = [encode(run, context)[-10:] for context in contexts]
    rows[-1] = [run.tokenizer.eos_token_id]
    whole = [greedy(run, row, 6) for row in rows]
    settings: dict[str, Any] = {"until": ["never"], "max_gen_toks": 6}
    requests = [request(context, settings) for context in contexts]
    assert model.generate_until(requests, disable_tqdm=True) == whole
    stop = whole[0][2:4]
    cut = [text.split(stop)[0] for text in whole]
    assert cut[0] != whole[0]
    requests = [request(context, {"until": [stop], "max_gen_toks": 6}) for context in contexts]
    assert model.generate_until(requests, disable_tqdm=True) == cut


def test_what_the_model_cannot_do_is_refused(harness: Any, model: Any, tmp_path: Path) -> None:
    text = "a" * 17
    for call, message in (
        (lambda: model.loglikelihood([request("a", text)]), "continuation 'a+': has 17 tokens"),
        (
            lambda: model.generate_until([request("a", {"max_gen_toks": 16})]),
            "max_gen_toks 16: leaves no room",
        ),
        (
            lambda: model.generate_until([request("a", {"num_beams": 4})]),
            "gen_kwargs num_beams: not supported; leave out",
        ),
        (lambda: model.chat_template(True), "apply_chat_template: the run's tokenizer has no chat"),
        (lambda: harness.HarnessModel(model.run, max_length=17), "max_length 17: the model has 16"),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            call()
    fixture = Path(__file__).parent / "sentence_transformers" / "bert-mean"
    import_model(str(fixture), str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"^lm-eval: task MaskedLanguageModeling does not predict"):
        harness.HarnessModel(tmp_path / "run")


def test_conversations_are_written_by_the_template(harness: Any, run: Run) -> None:
    assert run.tokenizer is not None
    template = (
        "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer = run.tokenizer.with_chat_template(template)
    model = harness.HarnessModel(dataclasses.replace(run, tokenizer=tokenizer))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "be"}]
    assert model.chat_template(True) == template
    assert model.apply_chat_template(turns[:1]) == "[a]>"
    assert model.apply_chat_template(turns, add_generation_prompt=False) == "[a][be"


def test_command_passes_options_on(
    harness: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[str] = []
    monkeypatch.setattr(sys, "argv", ["train"])
    monkeypatch.setenv("DISABLE_MULTIPROC", "")  # restored afterwards; a given value stays
    command_module = importlib.import_module("lm_eval.__main__")
    monkeypatch.setattr(command_module, "cli_evaluate", lambda: given.extend(sys.argv))
    assert command(capsys, "lm-eval", "runs/a,b", "--tasks", "word").status == 0
    model = ["--model", "linen-transformer", "--model_args", '{"run": "runs/a,b"}']
    assert given == ["lm-eval", "run", *model, "--batch_size", "auto", "--tasks", "word"]


def test_command_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "lm_eval.__main__", raising=False)
    result = command(capsys, "lm-eval", "runs/a", "--tasks", "word")
    assert result.status == 1
    assert result.error.startswith("error: lm-eval: needs the package lm_eval")
