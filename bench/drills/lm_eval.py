"""Evaluate models with EleutherAI's lm-evaluation-harness three ways, and compare the numbers.

    python -m bench lm_eval [--only WORD]

Small models of GPT-2's and Llama's kind, trained for some seconds by torch and saved with their
tokenizers, are evaluated by the harness's own `hf` (torch and transformers), as imported runs by
`train.interop.lm_eval`, and by `local-completions` at the server of the run. The tasks are made
here: multiple choice, last words, perplexity in rolling windows, and generation, also after
contexts that are longer than the model. Compared is each answer: texts and greedy flags must be
equal, and log-likelihoods within 1e-4.

It needs the extras `hf` and `lm_eval`, `lm_eval[api]` and accelerate, and no network.
"""

import contextlib
import functools
import json
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "JAX_PLATFORMS": "cpu"}

import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from tokenizers import processors

from bench.drills._reference_table import Options, compare_cases, train_byte_level, versions
from bench.drills.server import Server
from train.interop.huggingface import import_model
from train.interop.lm_eval import HarnessModel

POSITIONS = 64
LARGEST = 1e-4
"""Largest difference of a log-likelihood that passes."""

TASKS: dict[str, dict[str, Any]] = {
    "choice": dict(
        output_type="multiple_choice",
        doc_to_text="{{question}}",
        doc_to_choice="{{options}}",
        doc_to_target="gold",
        metric_list=[dict(metric="acc"), dict(metric="acc_norm")],
    ),
    "word": dict(
        output_type="loglikelihood",
        doc_to_text="{{context}}",
        doc_to_target="{{target}}",
        target_delimiter="",
        metric_list=[dict(metric="perplexity"), dict(metric="acc")],
    ),
    "rolling": dict(
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[dict(metric="word_perplexity"), dict(metric="bits_per_byte")],
    ),
    "answer": dict(
        output_type="generate_until",
        doc_to_text="{{question}}",
        doc_to_target="{{answer}}",
        generation_kwargs=dict(until=["\n", " the"], max_gen_toks=12, do_sample=False),
        metric_list=[dict(metric="exact_match", aggregation="mean", higher_is_better=True)],
    ),
}
LONG_TASK = "long_answer"
"""Generation after long contexts, which `local-completions` cuts to another length than `hf`."""
TASKS[LONG_TASK] = TASKS["answer"]

SIZES = dict(num_hidden_layers=2, num_attention_heads=4)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        SIZES | dict(n_embd=48, n_layer=2, n_head=4, n_positions=POSITIONS),
    ),
    "llama": (
        "LlamaConfig",
        "LlamaForCausalLM",
        SIZES
        | dict(hidden_size=48, intermediate_size=96, num_key_value_heads=2)
        | dict(max_position_embeddings=POSITIONS),
    ),
}


def read_texts() -> list[str]:
    """Return sentences in English: documentation of Python's library, in ASCII."""
    sources = (Path(os.__file__).parent / name for name in ("argparse.py", "datetime.py", "os.py"))
    text = " ".join(" ".join(path.read_text().split()) for path in sources)
    return [text[start : start + 200] for start in range(0, len(text) - 200, 200)]


def make_tokenizer(kind: str, texts: Sequence[str]) -> Any:
    """Return a byte-level tokenizer; that of `llama` puts a token before each text."""
    backend = train_byte_level(texts, 600)
    end = "<|endoftext|>"
    backend.add_special_tokens([end])
    names = dict(eos_token=end, bos_token=end)
    if kind == "llama":
        backend.add_special_tokens(["<s>"])
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
        names["bos_token"] = "<s>"
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def write_model(kind: str, folder: Path, texts: Sequence[str]) -> Any:
    """Train a model for some seconds and write it with its tokenizer; return both."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(kind, texts)
    config_class, model_class, settings = KINDS[kind]
    config = getattr(transformers, config_class)(
        **settings,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = getattr(transformers, model_class)(config)
    tokens = torch.tensor(tokenizer("".join(texts)).input_ids)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(150):
        starts = torch.randint(len(tokens) - POSITIONS, (16,))
        batch = torch.stack([tokens[start : start + POSITIONS] for start in starts.tolist()])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def write_tasks(folder: Path, texts: Sequence[str], model: Any, tokenizer: Any) -> None:
    """Write the tasks and their documents."""
    drawn = random.Random(0)
    words = [text.split() for text in texts]

    def part(size: int) -> list[str]:
        chosen = drawn.choice(words)
        start = drawn.randrange(max(1, len(chosen) - size))
        return chosen[start : start + size]

    def greedy(context: str, count: int) -> str:
        tokens = tokenizer(context, return_tensors="pt").input_ids[:, -POSITIONS + count :]
        found = model.generate(tokens, max_new_tokens=count, do_sample=False, pad_token_id=0)
        return str(tokenizer.decode(found[0, tokens.shape[1] :]))

    documents: dict[str, list[Any]] = {name: [] for name in TASKS}
    for number in range(12):
        context = " ".join(part(4 + 3 * number))  # of 4 to 37 words, some longer than the model
        options = [" ".join(part(1 + index)) for index in range(4)]
        # Of a context with a space at its end, which the harness moves, and of an empty one.
        question = ("" if number == 5 else context) + (" " if number == 3 else "")
        documents["choice"].append(dict(question=question, options=options, gold=number % 4))
        short = " ".join(part(6))
        target = greedy(short, 2) if number % 2 else " " + part(1)[0]
        documents["word"].append(dict(context=short, target=target))
        window = " ".join(" ".join(part(30)) for _ in range(1 + number % 4))
        documents["rolling"].append(dict(text=window))
        answer = greedy(short, 12).split("\n")[0].split(" the")[0] if number % 2 else "no"
        documents["answer"].append(dict(question=short, answer=answer))
        long = f"{context} {context} {context}"
        documents[LONG_TASK].append(dict(question=long, answer="no"))

    for name, settings in TASKS.items():
        data = folder / f"{name}.json"
        data.write_text("\n".join(map(json.dumps, documents[name])))
        task = dict(
            task=name,
            dataset_path="json",
            dataset_kwargs=dict(data_files=dict(test=str(data))),
            test_split="test",
            **settings,
        )
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML


def evaluate(model: Any, tasks: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return the harness's results, with the answers to each document."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return dict(
        lm_eval.simple_evaluate(
            model=model,
            tasks=list(tasks),
            task_manager=manager,
            log_samples=True,
            bootstrap_iters=0,
        )
    )


def answers_of(results: dict[str, Any], task: str) -> list[list[Any]]:
    """Return the model's answers to each document of a task."""
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [[each[0] for each in sample["resps"]] for sample in samples]


def compare(found: dict[str, Any], expected: dict[str, Any], task: str) -> tuple[str, bool]:
    """Return a line with the metrics of both and the differences, and whether they pass."""
    largest, differing, num_greedy, count = 0.0, 0, 0, 0
    pairs = zip(answers_of(found, task), answers_of(expected, task), strict=True)
    for ours, theirs in (pair for row in pairs for pair in zip(*row, strict=True)):
        count += 1
        if isinstance(theirs, str):
            differing += ours != theirs
            continue
        value, reference = (each[0] if isinstance(each, tuple) else each for each in (ours, theirs))
        largest = max(largest, abs(float(value) - float(reference)))
        if isinstance(theirs, tuple):
            num_greedy += bool(theirs[1])
            differing += bool(ours[1]) != bool(theirs[1])
    metrics = []
    for name, value in expected["results"][task].items():
        if "," in name and "stderr" not in name:
            metrics.append(f"{name.partition(',')[0]} {found['results'][task][name]:.6g}")
            is_exact = name.startswith(("acc", "exact"))
            differing += is_exact and found["results"][task][name] != value
    passed = largest <= LARGEST and not differing
    shown = f"{count:3} answers  {num_greedy:2} greedy  {largest:8.1e}  {differing:2} differ"
    return f"{task:12} {shown}  {', '.join(metrics)}{'' if passed else '  FAILED'}", passed


def compare_kind(kind: str, _: Any) -> tuple[str, bool]:
    """Evaluate one model three ways; return the tables, and whether all numbers are equal."""
    texts, lines, all_passed = read_texts(), [], True
    with tempfile.TemporaryDirectory() as root, contextlib.ExitStack() as stack:
        source, tasks, workdir = (Path(root) / name for name in ("model", "tasks", "run"))
        tasks.mkdir()
        write_tasks(tasks, texts, *write_model(kind, source, texts))
        import_model(str(source), str(workdir))
        reference_model = functools.partial(
            HFLM, pretrained=str(source), device="cpu", dtype="float32", batch_size=4
        )
        server = Server(str(workdir))
        stack.callback(server.stop)
        client = LocalCompletionsAPI(
            model=server.model,
            base_url=f"{server.url}/completions",
            tokenizer=str(source),
            tokenizer_backend="huggingface",
            add_bos_token=kind == "llama",
            max_length=POSITIONS,
            batch_size=4,
        )
        # One token is generated after each scored text, and one is the context of a window.
        same_length = reference_model(max_length=POSITIONS - 2)
        ours = HarnessModel(workdir, batch_size=4)
        for name, model, reference, names in (
            ("HarnessModel", ours, reference_model(), [*TASKS]),
            (
                "local-completions",
                client,
                same_length,
                [name for name in TASKS if name != LONG_TASK],
            ),
        ):
            lines.append(f"\n{kind}, {name} and hf")
            found, expected = (evaluate(each, names, tasks) for each in (model, reference))
            for task in names:
                line, passed = compare(found, expected, task)
                lines.append(line)
                all_passed &= passed
    return "\n".join(lines), all_passed


def drill(options: Options) -> int:
    """Print the tables; return 1 if numbers differ."""
    head = [f"{versions('lm_eval', 'torch', 'transformers', 'jax')}, CPU, float32"]
    return compare_cases(options, KINDS, compare_kind, head=head)
