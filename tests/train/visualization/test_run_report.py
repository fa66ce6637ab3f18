"""The report of a run: what it reads, its page, and its behavior in a browser."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import Chromium, find_chromium
from tests.train.visualization.pages import HOSTILE, check_page, needs_chromium
from train.cli.main import main
from train.errors import UserError
from train.visualization.run_report import (
    MAX_POINTS,
    RunReport,
    collect_curves,
    read_run,
    thin,
)

ROLLBACK = {"time": "2026-01-01T00:00:09", "event": "rolled back", "step": 30, "to": 20}


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def write_run(folder: Path, *, learning_rate: float = 0.1) -> Path:
    """Write the files of a run of 40 steps that was rolled back at 30 and resumed."""
    folder.mkdir()
    experiment = {
        "name": "books",
        "schedule": {"learning_rate": learning_rate},
        "model": {"layer_pattern": [{"mixer": {"kind": "full"}}]},
    }
    config = {"experiment": experiment, "chosen": {"model.layer_loop": "unroll"}}
    (folder / "config.json").write_text(json.dumps(config))
    metrics: list[dict[str, Any]] = [
        {"step": step, "split": "train", "loss": 5 - step / 10, "tokens_per_second": 1000 + step}
        for step in range(2, 41, 2)
    ]
    metrics[5]["loss"] = "NaN"
    validation = [
        {"step": step, "split": "validation", "loss": 4.5 - step / 20} for step in (20, 40)
    ]
    write_lines(folder / "metrics.jsonl", metrics + validation)
    started = {"event": "started", "step": 0, "versions": {"jax": "0.10.0"}, "mesh": {"data": 8}}
    events = [{"time": "2026-01-01T00:00:00", **started}, ROLLBACK]
    events.append(
        {"time": "2026-01-01T00:01:00", "event": "resumed", "step": 20, "changed": HOSTILE[0]}
    )
    write_lines(folder / "logbook.jsonl", events)
    (folder / "samples.txt").write_text(f"--- step 20\n{HOSTILE[0]}\n--- step 40\nsecond\nline\n")
    times = [
        {"began": 0, "now": 9, "step": 30, "seconds": {"start": 2, "step": 7}},
        {"began": 10, "now": 20, "step": 40, "seconds": {"replay": 1, "step": 9}},
    ]
    times[0]["peak_memory_bytes"] = {"host": 5 * 2**20}
    times[1]["peak_memory_bytes"] = {"host": 3 * 2**20}
    times.append({"began": 20, "now": 21, "step": 47, "seconds": {"step": 1}})  # 47 is not logged
    write_lines(folder / "time.jsonl", times)
    return folder


def test_run_is_read_from_its_files(tmp_path: Path) -> None:
    run = read_run(str(write_run(tmp_path / "run")))
    assert run["settings"]["model.layer_pattern.0.mixer.kind"] == "full"
    train_loss = dict(run["curves"]["loss"]["train"])
    assert train_loss[2] == 4.8
    assert math.isnan(train_loss[12])
    assert [each["event"] for each in run["events"]] == ["started", "rolled back", "resumed"]
    assert run["events"][1] == {
        "time": "2026-01-01T00:00:09",
        "event": "rolled back",
        "step": 30,
        "details": "to 20",
    }
    assert run["samples"][1] == {"step": 40, "text": "second\nline"}
    assert run["memory"] == {"host": 5 * 2**20}
    assert run["environment"] == {"mesh.data": 8, "versions.jax": "0.10.0"}
    assert (run["starts"], run["seconds"]["lost"]) == (3, 1)
    summary = run["summary"]
    assert summary["steps"] == 47
    assert summary["validation loss, best"] == 2.5
    assert summary["goodput"] == 17 / 21
    assert summary["tokens per second, median"] == 1022


def test_new_run_has_a_report(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path.rename(tmp_path.with_name("run\udcff"))  # a name need not be Unicode
    data = check_page(RunReport([str(folder)]).html())
    assert data["runs"][0]["curves"] == {}
    with pytest.raises(UserError, match="holds no run"):
        RunReport([str(folder.parent)])


def test_long_curves_keep_their_spikes() -> None:
    points = [(step, 1.0 + step % 7 / 10) for step in range(20_000)]
    points[12_345] = (12_345, 90.0)
    kept = thin(points)
    assert MAX_POINTS // 2 < len(kept) <= MAX_POINTS + 2
    assert (12_345, 90.0) in kept
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert kept == sorted(kept)
    assert thin(points[:9]) == points[:9]
    with_gaps = [(step, math.nan if step % 4 == 0 else 1.0) for step in range(4800)]
    with_gaps[5] = (5, 1000.0)
    assert (5, 1000.0) in thin(with_gaps)
    assert not any(math.isnan(value) for _, value in thin(with_gaps)[1:])


def test_median_speed_is_that_of_all_lines(tmp_path: Path) -> None:
    """The curve that is drawn keeps the extremes of each stretch, which are no sample of it."""
    folder = write_run(tmp_path / "long")
    lines = [
        {
            "step": step,
            "split": "train",
            "loss": 1.0,
            "tokens_per_second": 100.0 if step % 10 == 0 else 1000.0 + step % 3,
        }
        for step in range(1, 12_001)
    ]
    write_lines(folder / "metrics.jsonl", lines)
    report = read_run(str(folder))
    assert report["summary"]["tokens per second, median"] == 1001.0
    assert len(report["curves"]["tokens_per_second"]["train"]) <= MAX_POINTS + 2


def test_samples_of_a_discarded_course_are_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    steps = (13, 14, 15, 16, 14, 15)
    text = "".join(f"--- step {step}\nsample {number}\n" for number, step in enumerate(steps))
    (folder / "samples.txt").write_text(text)
    samples = [(each["step"], each["text"]) for each in read_run(str(folder))["samples"]]
    assert samples == [(13, "sample 0"), (14, "sample 4"), (15, "sample 5")]


def test_of_a_step_the_last_value_is_kept() -> None:
    records = [{"step": 3, "split": "train", "loss": loss} for loss in (9.0, 2.0)]
    assert collect_curves(records) == {"loss": {"train": [(3, 2.0)]}}


def test_several_runs_show_the_settings_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [
        str(write_run(tmp_path / name, learning_rate=rate))
        for name, rate in (("a", 0.1), ("b", 0.2))
    ]
    output = tmp_path / "both.html"
    with pytest.raises(SystemExit) as stop:
        main(["report", *runs, "--output", str(output), "--json"])
    assert stop.value.code == 0
    assert set(json.loads(capsys.readouterr().out)["runs"]) == {"a", "b"}
    page = output.read_text()
    data = check_page(page)
    differences = page.split('id="differences"')[1].partition("</div>")[0]
    assert re.findall("<t[hd]>(.*?)</t[hd]>", differences) == [
        *("setting", "a", "b"),
        *("schedule.learning_rate", "0.1", "0.2"),
    ]
    assert data["runs"][0]["curves"]["loss"]["train"][5] == [12, None]
    with pytest.raises(UserError, match="does not end with"):
        RunReport(runs).save("a.txt")


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    executable = find_chromium()
    assert executable is not None
    with Chromium(executable) as opened:
        yield opened


READY = "document.documentElement.dataset.ready"


@needs_chromium
def test_page_marks_events_and_shows_values(browser: Chromium, tmp_path: Path) -> None:
    RunReport([str(write_run(tmp_path / "run"))]).save(str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html", READY)
    titles = browser.evaluate(
        "[...document.querySelectorAll('.chart h3')].map((e) => e.firstChild.textContent)"
    )
    assert titles == ["loss (nats)", "tokens per second"]
    legend = browser.evaluate(
        "[...document.querySelectorAll('.chart .entry')].map((e) => e.textContent)"
    )
    assert legend == ["train", "validation"]  # of the loss; only training has a speed
    marks = "[...document.querySelectorAll('[data-event]')].map((e) => e.dataset.event)"
    assert browser.evaluate(marks) == ["rolled back", "resumed"]
    path = "document.querySelector('.chart path[data-label=train]').getAttribute('d')"
    assert browser.evaluate(path).count("M") == 2  # a gap at the nonfinite loss
    browser.hover(".chart > svg")
    read = browser.evaluate("document.querySelector('.chart .value').textContent")
    assert "train: 2.8 (step 22)" in read or "train: 3 (step 20)" in read
    samples = browser.evaluate(
        "[...document.querySelectorAll('#samples pre')].map((e) => e.textContent)"
    )
    assert samples == [HOSTILE[0], "second\nline"]
    assert browser.evaluate("document.title") == "Run run"
    browser.click("#log-loss")
    assert browser.evaluate(path) != ""
    assert browser.messages == []


@needs_chromium
@pytest.mark.parametrize("width", [1200, 390])
def test_several_runs_are_overlaid_and_fit(browser: Chromium, tmp_path: Path, width: int) -> None:
    runs = [str(write_run(tmp_path / name)) for name in ("a", "b", "c")]
    RunReport(runs).save(str(tmp_path / "page.html"))
    browser.resize(width, 800)
    browser.open(tmp_path / "page.html", READY)
    labels = browser.evaluate(
        "[...document.querySelector('.chart').querySelectorAll('path[data-label]')]"
        ".map((e) => e.dataset.label)"
    )
    assert labels == [f"{run} {split}" for run in "abc" for split in ("train", "validation")]
    assert browser.evaluate("document.querySelectorAll('.stack').length") == 3
    assert browser.evaluate("document.getElementById('differences').textContent") == (
        "All settings are equal."
    )
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    # The text of an SVG shrinks with it: labels of 12 units are 12 pixels, or nearly.
    unit = "(() => { const e = document.querySelector('.chart > svg');"
    unit += "return e.getBoundingClientRect().width / e.viewBox.baseVal.width; })()"
    assert browser.evaluate(unit) > 0.9
    assert browser.evaluate("document.querySelector('#events').scrollWidth") <= width
    assert browser.messages == []


@needs_chromium
def test_tick_labels_differ_in_a_small_range(browser: Chromium, tmp_path: Path) -> None:
    RunReport([str(write_run(tmp_path / "run"))]).save(str(tmp_path / "page.html"))
    browser.open(tmp_path / "page.html", READY)
    labels = browser.evaluate("labelsOf(ticksBetween(31.5721, 31.5752, false))")
    assert labels == ["31.573", "31.574", "31.575"]
    assert browser.evaluate("labelsOf([1, 2, 3])") == ["1", "2", "3"]
