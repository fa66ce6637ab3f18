"""Verbs without a CONFIG: those that read a run's folder, and `doctor`.

What computes is imported inside the verbs, so that `VERB --help` loads no JAX.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING

from train.cli.parsing import as_usage_errors, parse, pop_json_flag, pop_positional
from train.errors import UsageError, UserError

if TYPE_CHECKING:
    from train.data.chat_template import Message
    from train.run import Run
    from train.tasks.task import SampleOptions


@dataclasses.dataclass(frozen=True)
class EvaluateArguments:
    """Print the metrics of a run on a whole split of its data."""

    split: str = "validation"
    """Split to evaluate: train, validation, or test if the data have one."""
    step: int | None = None
    """Step of the checkpoint; default: the run's evaluation weights (the newest checkpoint, unless
    the run keeps its best one or averages several)."""
    average_checkpoints: int | None = None
    """Average the weights of this many checkpoints: the selected one and those before it."""


def run_evaluate(arguments: list[str]) -> int:
    """Print a run's metrics; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "evaluate")
    options = parse(EvaluateArguments, arguments, verb="evaluate W")
    from train.evaluation.evaluator import evaluate_run
    from train.run import load
    from train.tasks.task_registry import make_task

    run = load(workdir, step=options.step, average_checkpoints=options.average_checkpoints)
    metrics, notes = evaluate_run(run, options.split), make_task(run.experiment).metric_notes
    if json_wanted:
        print(json.dumps({"step": run.step, "split": options.split, **metrics, **notes}))
    else:
        for name, value in metrics.items():
            print(f"{name.replace('_', ' ')}: {value:.4f}")
        for name, text in notes.items():
            print(f"{name.replace('_', ' ')}: {text}")
    return 0


@dataclasses.dataclass(frozen=True)
class SampleArguments:
    """Run a model on prompts: continue text, translate, classify, tag tokens, or fill [MASK]."""

    prompt: tuple[str, ...] = ("",)
    """Input texts; several run as one batch."""
    max_new_tokens: int = 200
    """Limit of generated tokens per prompt (language models only, as are temperature, top-k, top-p
    and seed)."""
    temperature: float = 0.8
    """Divisor of the logits: below 1 sharpens the distribution; 0 always takes the most likely
    token."""
    top_k: int = 0
    """Sample among this many most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that together reach this probability."""
    beams: int = 0
    """Hypotheses of beam search (translation only); 0: the run's own setting."""
    seed: int = 0
    """Seed of the random draws."""
    step: int | None = None
    """Step of the checkpoint; default: the run's evaluation weights."""
    chat: bool = False
    """Write each prompt by the tokenizer's chat template. Without --prompt: a conversation, with a
    line of standard input for each turn."""


GENERATION_OPTIONS = ("max_new_tokens", "temperature", "top_k", "top_p", "beams", "seed")
"""Options of generation; each task supports some of them."""


def run_sample(arguments: list[str]) -> int:
    """Print the model's answers; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "sample")
    given = parse(SampleArguments, arguments, verb="sample W")
    from train.run import load, read_experiment, sample
    from train.run_folder.folder import RunFolder
    from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom
    from train.tasks.task import SampleOptions
    from train.tasks.task_registry import make_task
    from transformer.generation.sampling import SamplingConfig

    # From the settings alone: an option without effect is refused before weights are loaded.
    task = make_task(read_experiment(RunFolder.open_existing(workdir)))
    check_supported_options(arguments, task.supported_options)
    with as_usage_errors():
        sampling = SamplingConfig(given.temperature, given.top_k, given.top_p)
    with explain_oom(
        lambda: ["give fewer prompts or a smaller --max-new-tokens", LARGER_DEVICES_REMEDY]
    ):
        run = load(workdir, step=given.step)
        if given.chat and not any(given.prompt):
            if json_wanted:
                raise UsageError("sample --chat --json: needs --prompt; give one or more")
            chat(run, SampleOptions(given.max_new_tokens, sampling, given.beams, given.seed))
            return 0
        continues = task.continues_prompt and not given.chat
        prompts = given.prompt if continues else [""] * len(given.prompt)
        stream = _Stream(prompts[0]) if not json_wanted and len(prompts) == 1 else None
        options = SampleOptions(given.max_new_tokens, sampling, given.beams, given.seed)
        if given.chat:
            texts = answer_once(run, list(given.prompt), options, stream)
        else:
            texts = sample(
                run,
                list(given.prompt),
                max_new_tokens=given.max_new_tokens,
                sampling=sampling,
                num_beams=given.beams,
                seed=given.seed,
                on_text=stream,
            )
    if json_wanted:
        print(json.dumps({"text": texts}))
    elif stream is not None:
        stream("\n")
    else:
        separator = "\n---\n" if continues else "\n"
        print(separator.join(p + text for p, text in zip(prompts, texts, strict=True)))
    return 0


def check_supported_options(arguments: Iterable[str], supported: Collection[str]) -> None:
    """Raise UsageError for options that the run's task does not use."""
    flags = {each.partition("=")[0].replace("_", "-") for each in arguments}
    ignored = [
        flag
        for name in GENERATION_OPTIONS
        if name not in supported and (flag := _flag(name)) in flags
    ]
    if ignored:
        others = f" (it supports {', '.join(map(_flag, supported))})" if supported else ""
        raise UsageError(
            f"sample {', '.join(ignored)}: has no effect on this run's task; leave it out{others}"
        )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Stream:
    """Print text as it is generated, with the prompt before the first piece.

    The prompt waits for the first piece because an error may come before it.
    """

    def __init__(self, prompt: str):
        self._prompt = prompt

    def __call__(self, piece: str) -> None:
        print(self._prompt + piece, end="", flush=True)
        self._prompt = ""


@dataclasses.dataclass(frozen=True)
class ScoreArguments:
    """Print the log-likelihood of texts under a run's model, in nats."""

    text: tuple[str, ...]
    """Texts to score."""
    context: tuple[str, ...] | None = None
    """Text that precedes each (of a translation model, the source): one for all, or one for each.
    An empty one is the beginning of a document. Without, a text's first token is not scored."""
    step: int | None = None
    """Step of the checkpoint; default: the run's evaluation weights."""


def run_score(arguments: list[str]) -> int:
    """Print log-likelihoods of texts; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "score")
    options = parse(ScoreArguments, arguments, verb="score W")
    from train.evaluation.text_scores import score_texts
    from train.run import load
    from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom

    texts, contexts = list(options.text), options.context
    if contexts is not None and len(contexts) == 1:
        contexts = contexts * len(texts)
    with explain_oom(lambda: ["give fewer or shorter texts", LARGER_DEVICES_REMEDY]):
        scores = score_texts(load(workdir, step=options.step), texts, contexts)
    totals, counts = [each.total for each in scores], [each.num_tokens for each in scores]
    if json_wanted:
        print(json.dumps({"log_likelihood": totals, "tokens": counts}))
        return 0
    print("log-likelihood   tokens   perplexity   text")
    for total, count, text in zip(totals, counts, texts, strict=True):
        print(f"{total:14.4f} {count:8} {math.exp(-total / count):12.2f}   {text!r}")
    return 0


@dataclasses.dataclass(frozen=True)
class GoodputArguments:
    """Print how a run's time was spent, over all its processes, including a running one."""


def run_goodput(arguments: list[str]) -> int:
    """Print a run's goodput; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "goodput")
    parse(GoodputArguments, arguments, verb="goodput W")
    from train.run_folder.folder import RunFolder
    from train.telemetry.goodput import (
        ACTIVITY_DESCRIPTIONS,
        compute_goodput,
        format_duration,
        read_time_records,
    )

    folder = RunFolder.open_existing(workdir)
    records = read_time_records(folder.time_log)
    if not records:
        raise UserError(f"{folder.time_log}: is empty; fit writes it from its first step on")
    goodput = compute_goodput(records)
    if json_wanted:
        plain = dataclasses.asdict(goodput) | {
            "total": goodput.total,
            "share": goodput.productive_fraction,
        }
        print(json.dumps(plain))
        return 0
    for activity, seconds in goodput.seconds.items():
        print(
            f"{activity:9} {seconds / (goodput.total or 1):6.1%} "
            f"{format_duration(seconds):>12}   {ACTIVITY_DESCRIPTIONS[activity]}"
        )
    print(f"{'all':9} {1:6.1%} {format_duration(goodput.total):>12}   starts: {goodput.starts}")
    return 0


def run_doctor(arguments: list[str]) -> int:
    """Print a report of this machine; return 1 if it has a problem."""
    from train.doctor.report import run_checks

    json_wanted = pop_json_flag(arguments)
    if arguments:
        raise UsageError(f"doctor {arguments[0]}: takes no arguments but --json; leave it out")
    report = run_checks()
    if json_wanted:
        print(json.dumps(report.as_dict()))
    else:
        report.print()
    return 0 if report.ok else 1


@dataclasses.dataclass(frozen=True)
class AttentionArguments:
    """Write a page that shows every attention head of a run's model over a text."""

    text: str
    """Text that the model reads; of a translation model, the source."""
    output: str
    """File to write: .html for the interactive page; .png, .pdf or .svg for a figure."""
    target: str | None = None
    """Translation that the decoder reads; default: the model's own translation."""
    layer: int = 0
    """Layer to open first."""
    head: int = 0
    """Head to open first."""
    one_head: bool = False
    """Draw only that layer and head in a figure, with its tokens."""
    step: int | None = None
    """Step of the checkpoint; default: the run's evaluation weights."""


def run_attention(arguments: list[str]) -> int:
    """Write the attention of a run's model over a text; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdir = pop_positional(arguments, "W", "attention")
    options = parse(AttentionArguments, arguments, verb="attention W")
    from train.run import load
    from train.visualization.attention_view import FIGURE_FORMATS, bad_output, view_attention

    is_figure = options.output.endswith(FIGURE_FORMATS)
    if not is_figure and not options.output.endswith(".html"):
        raise bad_output(options.output)
    if options.one_head and not is_figure:
        raise UsageError("--one-head: is for figures; give an --output that ends with .png")
    run = load(workdir, step=options.step)
    view = view_attention(run, options.text, options.target, layer=options.layer, head=options.head)
    view.save(options.output, one_head=options.one_head)
    if json_wanted:
        heads = sum(each.weights.shape[1] for each in view.maps)
        print(json.dumps({"output": options.output, "stages": view.stages, "heads": heads}))
    else:
        print(f"wrote {options.output}: {view.subtitle}")
    return 0


@dataclasses.dataclass(frozen=True)
class ReportArguments:
    """Write a page of a run, or of several compared."""

    output: str
    """File to write, ending with .html."""


def run_report(arguments: list[str]) -> int:
    """Write the report of runs; return the exit status."""
    json_wanted = pop_json_flag(arguments)
    workdirs = [pop_positional(arguments, "W", "report")]
    while arguments and not arguments[0].startswith("-"):
        workdirs.append(arguments.pop(0))
    options = parse(ReportArguments, arguments, verb="report W")
    from train.visualization.run_report import RunReport

    report = RunReport(workdirs)
    report.save(options.output)
    if json_wanted:
        summaries = {run["label"]: run["summary"] for run in report.runs}
        print(json.dumps({"output": options.output, "runs": summaries}))
    else:
        print(f"wrote {options.output}: {report.title}")
    return 0


def answer_once(
    run: "Run",
    prompts: list[str],
    options: "SampleOptions",
    on_text: Callable[[str], None] | None,
) -> list[str]:
    """Return the answer to each prompt.

    Raises:
      UserError: The run has no language model.
    """
    from train.tasks.instruction import answer_prompts

    check_can_chat(run)
    return answer_prompts(run, prompts, options, on_text)


def chat(run: "Run", options: "SampleOptions", questions: Iterable[str] | None = None) -> None:
    """Answer questions one after the other, each with the conversation so far in view.

    Args:
      run: The run.
      options: Length and sampling.
      questions: Lines of text; default: those of standard input, with a prompt at a terminal. An
        empty line begins a new conversation.
    """
    from train.tasks.instruction import answer_conversations

    check_can_chat(run)
    messages: list[Message] = []
    for question in read_questions() if questions is None else questions:
        if not question.strip():
            messages = []
            continue
        messages.append({"role": "user", "content": question.strip()})
        answers = answer_conversations(run, [messages], options, _print_piece)
        print(flush=True)
        messages.append({"role": "assistant", "content": answers[0].strip()})


def read_questions() -> Iterable[str]:
    """Yield the lines of standard input to its end."""
    at_terminal = sys.stdin.isatty()
    while True:
        if at_terminal:
            # Not on standard output, which has the answers alone and may be a file.
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


def check_can_chat(run: "Run") -> None:
    """Raise UserError for a run without a language model."""
    from transformer.models.language_model import LanguageModel

    if not isinstance(run.model, LanguageModel) or run.tokenizer is None:
        kind = type(run.experiment.task).__name__
        raise UserError(f"sample --chat: task {kind} has no language model; leave --chat out")


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)
