"""Verbs that ask a run's model about texts: `sample`, `score`, `embed` and `serve`."""

import dataclasses
import io
import os
import sys
from collections.abc import Collection, Iterable
from typing import Annotated, Literal

import numpy as np

from train.assembly import make_task
from train.cli.parsing import RunArguments, given_flags, parse, print_json
from train.data.chat_template import Message
from train.data.tokenizer_settings import decode_text
from train.errors import UsageError, UserError, as_usage_errors, as_user_error, printable
from train.files import expand_path
from train.run import Run, load
from train.run_folder.folder import RunFolder
from train.run_folder.run_config import read_experiment
from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom
from train.runtime.writing import write_atomically
from train.serving.answers import Generator
from train.serving.embedder import Embedder, is_text_encoder
from train.serving.server import Server
from train.tasks.evaluation import perplexity
from train.tasks.instruction import answer_conversations, answer_prompts
from train.tasks.task import SampleOptions
from train.tasks.text_scores import score_texts
from transformer.generation.sampling import SamplingConfig
from transformer.models.language_model import LanguageModel
from transformer.text_embeddings import MIN_NORM, EmbeddingPooling
from transformer.validation import Bounds, PositiveInt, Seed


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleArguments(RunArguments):
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
    source_language: str = ""
    """Code of the language of the prompt (translation only, with tokenizers that have tokens for
    languages: en_XX, eng_Latn); empty: the run's own setting."""
    target_language: str = ""
    """Code of the language to translate into, likewise."""
    seed: Seed = 0
    """Seed of the random draws."""
    chat: bool = False
    """Write each prompt by the tokenizer's chat template. Without --prompt: a conversation, with a
    line of standard input for each turn; an empty line begins a new one."""


GENERATION_OPTIONS = (
    *("max_new_tokens", "temperature", "top_k", "top_p", "beams"),
    *("source_language", "target_language", "seed"),
)
"""Options of generation; each task supports some of them."""


def run_sample(arguments: list[str]) -> int:
    """Print the model's answers; return the exit status."""
    given = parse(SampleArguments, arguments, verb="sample")
    # From the settings alone: an option without effect is refused before weights are loaded.
    task = make_task(read_experiment(RunFolder.open_existing(given.workdir)))
    check_supported_options(given_flags(arguments), task.supported_options)
    with as_usage_errors():
        sampling = SamplingConfig(given.temperature, given.top_k, given.top_p)
    continues = task.continues_prompt and not given.chat
    prompts = given.prompt if continues else [""] * len(given.prompt)
    stream = _Stream(prompts[0]) if not given.json and len(prompts) == 1 else None
    options = SampleOptions(
        given.max_new_tokens,
        sampling,
        given.beams,
        given.seed,
        source_language=given.source_language,
        target_language=given.target_language,
        on_text=stream,
    )
    with explain_oom(
        lambda: ["give fewer prompts or a smaller --max-new-tokens", LARGER_DEVICES_REMEDY]
    ):
        run = load(given.workdir, step=given.step, quantize=given.quantize)
        if given.chat:
            check_can_chat(run)
            if not any(given.prompt):
                if given.json:
                    raise UsageError("sample --chat --json: needs --prompt; give one or more")
                chat(run, options)
                return 0
            texts = answer_prompts(run, given.prompt, options)
        else:
            texts = task.sample(run, given.prompt, options)
    if given.json:
        print_json({"text": texts})
    elif stream is not None:
        stream("\n")
    else:
        separator = "\n---\n" if continues else "\n"
        print_text(separator.join(p + text for p, text in zip(prompts, texts, strict=True)) + "\n")
    return 0


def check_supported_options(given: Collection[str], supported: Collection[str]) -> None:
    """Raise UsageError for options that the run's task does not use."""
    ignored = [
        _flag(name) for name in GENERATION_OPTIONS if name in given and name not in supported
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
        print_text(self._prompt + piece)
        self._prompt = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreArguments(RunArguments):
    """Print the log-likelihood of texts under a run's model, in nats."""

    text: tuple[str, ...]
    """Texts to score."""
    context: tuple[str, ...] | None = None
    """Text that precedes each (of a translation model, the source): one for all, or one for each.
    An empty one is the beginning of a document. Without, a text's first token is not scored."""


def run_score(arguments: list[str]) -> int:
    """Print log-likelihoods of texts; return the exit status."""
    options = parse(ScoreArguments, arguments, verb="score")
    texts, contexts = list(options.text), options.context
    if contexts is not None and len(contexts) == 1:
        contexts = contexts * len(texts)
    run = load(options.workdir, step=options.step, quantize=options.quantize)
    with explain_oom(lambda: ["give fewer or shorter texts", LARGER_DEVICES_REMEDY]):
        scores = score_texts(make_task(run.experiment), run, texts, contexts)
    totals, counts = [each.total for each in scores], [each.num_tokens for each in scores]
    if options.json:
        print_json({"log_likelihood": totals, "tokens": counts})
        return 0
    print("log-likelihood   tokens   perplexity   text")
    for total, count, text in zip(totals, counts, texts, strict=True):
        print(f"{total:14.4f} {count:8} {perplexity(-total / count):12.2f}   {text!r}")
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedArguments(RunArguments):
    """Compute vectors of texts, for search and comparison: their products are cosines."""

    text: tuple[str, ...] = ()
    """Texts; without --output their cosines are printed."""
    input: str = ""
    """File with a text on each line, after those of --text."""
    output: str = ""
    """File of NumPy (.npy) to write: float32 [texts, width]."""
    pooling: EmbeddingPooling | None = None
    """Vector of a text: the mean of its tokens, its first or last one, or their maximum. Default:
    that of the model's files, or else the mean for an encoder and the last for a decoder."""
    normalize: Literal["yes", "no"] | None = None
    """Scale vectors to length 1. Default: as the model's files say, or else yes."""
    prompt: str | None = None
    """Text to put before each."""
    prompt_name: str | None = None
    """Name of a prompt of the model's files to put before each."""


def run_embed(arguments: list[str]) -> int:
    """Print or write vectors of texts; return the exit status."""
    options = parse(EmbedArguments, arguments, verb="embed")
    if options.output and not options.output.endswith(".npy"):
        raise UsageError(f"output {options.output}: give a name that ends with .npy")
    texts = [*options.text, *(read_lines(options.input) if options.input else ())]
    if not texts:
        raise UsageError("embed: has no texts; give --text, or --input FILE")
    run = load(options.workdir, step=options.step, quantize=options.quantize)
    with explain_oom(lambda: ["give shorter texts", LARGER_DEVICES_REMEDY]):
        vectors = run.embed(
            texts,
            pooling=options.pooling,
            normalize=None if options.normalize is None else options.normalize == "yes",
            prompt=options.prompt,
            prompt_name=options.prompt_name,
        )
    if options.output:
        content = io.BytesIO()
        np.save(content, vectors)
        write_atomically(expand_path(options.output), content.getvalue())
        record = {"output": options.output, "shape": list(vectors.shape)}
        shape = " vectors of ".join(map(str, vectors.shape))
        options.show(record, f"wrote {options.output}: {shape} numbers")
    elif options.json:
        print_json({"embeddings": vectors.tolist()})
    else:
        scaled = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), MIN_NORM)
        print("cosine with each text")
        for row, text in zip(scaled @ scaled.T, texts, strict=True):
            print(f"{' '.join(f'{cosine:6.3f}' for cosine in row)}   {text!r}")
    return 0


def read_lines(path: str) -> list[str]:
    """Return the lines of a file that are not empty."""
    file = expand_path(path)
    with as_user_error(f"input {path}"):
        text = decode_text(file, file.read_bytes())
    return [line for line in text.splitlines() if line.strip()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeArguments(RunArguments):
    """Answer an OpenAI-compatible HTTP API with a run's language model or text encoder."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every network of the machine."""
    port: Annotated[int, Bounds(0, 65535)] = 8000
    """Port to listen on; 0: a free one, which is printed."""
    model_name: str = ""
    """Name of the model in requests; default: the name of the run's experiment."""
    max_tokens: PositiveInt = 2048
    """Most tokens of an answer. An answer in a chat has as many if its request names no limit."""
    max_prompt_tokens: PositiveInt = 8192
    """Most tokens of a prompt."""
    max_batch_size: PositiveInt = 32
    """Most answers that are generated at a time. More requests wait."""
    api_key: str | None = None
    """Key that requests must send as a bearer token; default: that of the environment variable
    SERVE_API_KEY, or none if it is not set."""
    allowed_hosts: tuple[str, ...] = ()
    """Names under which a proxy or a tunnel reaches the server, or patterns of them
    (`*.example.org`). Default: on this machine alone localhost; with another --host any name."""


def run_serve(arguments: list[str]) -> int:
    """Serve a run until Ctrl-C; return the exit status."""
    options = parse(ServeArguments, arguments, verb="serve")
    key = os.environ.get("SERVE_API_KEY") if options.api_key is None else options.api_key
    if key is not None and not key.strip():
        raise UsageError("api_key: is empty; give a key, or leave it out for a server without one")
    if key is None and options.host not in ("127.0.0.1", "::1", "localhost"):
        warning = "is open to the network without a key; give --api-key"
        print(f"host {options.host}: {warning}", file=sys.stderr)
    with explain_oom(lambda: [LARGER_DEVICES_REMEDY]):
        run = load(options.workdir, step=options.step, quantize=options.quantize)
        answers: Embedder | Generator
        if is_text_encoder(run):
            answers = Embedder(run, options.max_prompt_tokens)
        else:
            answers = Generator(
                run, options.max_tokens, options.max_prompt_tokens, options.max_batch_size
            )
            answers.decoding.compile_ahead()
    name, step = options.model_name or run.experiment.name, run.step
    del run  # with the stacked weights, of which the generator may have copies
    address = options.host, options.port
    with Server(address, answers, name, key or "", options.allowed_hosts) as server:
        host = f"[{options.host}]" if ":" in options.host else options.host
        url = f"http://{host}:{server.server_port}/v1"
        if options.json:
            print_json({"url": url, "model": name, "step": step})
        else:
            print(f"{name} of step {step} is served at {url}; Ctrl-C stops it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            if not answers.close():
                # A thread is inside XLA, which aborts if the interpreter ends below it.
                sys.stdout.flush()
                os._exit(0)
    return 0


def chat(run: Run, options: SampleOptions) -> None:
    """Answer lines of standard input, each with the conversation so far in view.

    An empty line begins a new conversation.
    """
    options = dataclasses.replace(options, on_text=print_text)
    messages: list[Message] = []
    for question in read_questions():
        if not question.strip():
            messages = []
            continue
        messages.append({"role": "user", "content": question.strip()})
        answers = answer_conversations(run, [messages], options)
        print(flush=True)
        messages.append({"role": "assistant", "content": answers[0].strip()})


def read_questions() -> Iterable[str]:
    """Yield the lines of standard input to its end."""
    while True:
        if sys.stdin.isatty():
            # Not on standard output, which has the answers alone and may be a file.
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        yield line


def check_can_chat(run: Run) -> None:
    """Raise UserError for a run without a language model."""
    if not isinstance(run.model, LanguageModel) or run.tokenizer is None:
        kind = type(run.experiment.task).__name__
        raise UserError(f"sample --chat: task {kind} has no language model; leave --chat out")


def print_text(text: str) -> None:
    """Print what a model wrote. A terminal gets no characters that it would obey; a file, all."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
