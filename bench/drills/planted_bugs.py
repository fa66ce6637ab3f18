"""Plant 44 bugs, one at a time, and run the tests of their modules: does the suite detect them?

    python -m bench planted_bugs [--only WORD]

Each bug replaces one piece of text in a copy of the checkout; the checkout itself is not changed.
Those of the module's test files that `make test` runs then run until the first failure: a bug that
lets them pass is MISSED, and the exit status is 1.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("transformer", "train", "configs", "tests", "bench", "colab", "cloud", "docs")

SECONDS = 900
"""Time after which tests are stopped. A bug that makes them hang is detected."""


class Bug(NamedTuple):
    """One bug: a replacement in one file, and the tests that should detect it."""

    what: str
    file: str
    right: str
    """Text that the file has exactly once."""
    wrong: str
    tests: str
    """Files and folders under tests/, separated by spaces."""


BUGS = (
    Bug(
        "a causal mask that hides the query's own key",
        "transformer/attention/masks.py",
        "visible &= k <= q",
        "visible &= k < q",
        "transformer/attention/test_masks.py transformer/attention/test_attend.py",
    ),
    Bug(
        "scores not divided by the root of the head's width",
        "transformer/attention/full.py",
        "scale=score.scale(q.shape[-1]),",
        "scale=1.0,",
        "transformer/attention/test_scores.py transformer/attention/test_full.py",
    ),
    Bug(
        "RMSNorm without epsilon",
        "transformer/layers/norms.py",
        "keepdims=True) + epsilon)",
        "keepdims=True))",
        "transformer/layers/test_norms.py",
    ),
    Bug(
        "RoPE with the wrong sign",
        "transformer/attention/rope.py",
        "jnp.concatenate([a * cos - b * sin,",
        "jnp.concatenate([a * cos + b * sin,",
        "transformer/attention/test_rope.py transformer/attention/test_full.py",
    ),
    Bug(
        "dropout that does not rescale what it keeps",
        "transformer/layers/basic.py",
        "x / (1 - dropout_rate)",
        "x",
        "transformer/layers/test_dropout.py",
    ),
    Bug(
        "the same dropout key in every layer",
        "transformer/models/stack.py",
        "fold_in(dropout_rngs, layer.layer_index)",
        "fold_in(dropout_rngs, 0)",
        "transformer/models/test_stack.py",
    ),
    Bug(
        "beam search without its length penalty",
        "transformer/generation/beam_search.py",
        "scores = totals / length_penalty_divisor(search.step + 1, config.length_penalty)",
        "scores = totals",
        "transformer/generation/test_beam_search.py",
    ),
    Bug(
        "a cache that writes one slot too late",
        "transformer/attention/cache.py",
        "start = jnp.broadcast_to(positions[:, 0], len(tokens))",
        "start = jnp.broadcast_to(positions[:, 0] + 1, len(tokens))",
        "transformer/attention/test_cache.py transformer/generation/test_generate.py",
    ),
    Bug(
        "a rolling cache that keeps one token more than it has slots",
        "transformer/attention/cache.py",
        "recent = positions > jnp.max",
        "recent = positions >= jnp.max",
        "transformer/attention/variants/test_sliding_window.py transformer/attention/test_cache.py",
    ),
    Bug(
        "merged attention that forgets the maximum it subtracted",
        "transformer/attention/backends/partial.py",
        "jnp.log(safe_total) + maximum",
        "jnp.log(safe_total)",
        "transformer/attention/backends",
    ),
    Bug(
        "label smoothing over vocabulary padding",
        "transformer/chunked_cross_entropy.py",
        "axis=-1) / settings.vocab_size",
        "axis=-1) / logits.shape[-1]",
        "transformer/test_chunked_cross_entropy.py",
    ),
    Bug(
        "a row that joins a running batch in the place of another",
        "transformer/generation/running_batch.py",
        "if row is None][: len(group)]",
        "if True][: len(group)]",
        "transformer/generation/test_running_batch.py",
    ),
    Bug(
        "an answer that nobody waits for keeps its place in the batch",
        "train/serving/decoding_thread.py",
        "            self._batch.remove(generation)",
        "            pass",
        "train/serving",
    ),
    Bug(
        "every position of a sample drawn with the same key",
        "transformer/generation/sampling.py",
        "jax.vmap(jax.random.fold_in)(rngs, positions)",
        "jax.vmap(jax.random.fold_in)(rngs, positions * 0)",
        "transformer/generation/test_sampling.py",
    ),
    Bug(
        "a load-balancing loss that ignores the choices",
        "transformer/layers/moe_dispatch.py",
        "jnp.sum(assigned * probability, axis=-1)",
        "jnp.sum(probability * probability, axis=-1)",
        "transformer/layers/test_moe_routing.py transformer/layers/test_moe.py",
    ),
    Bug(
        "Performer's features without the norm of the vector",
        "transformer/attention/variants/performer.py",
        "log = x @ random_vectors.T - _half_square(x)[..., None]",
        "log = x @ random_vectors.T",
        "transformer/attention/variants/test_random_features.py "
        "transformer/attention/variants/test_performer.py",
    ),
    Bug(
        "a wrong mesh axis in the table of shardings",
        "train/parallel/sharding.py",
        '"kv_heads": ("tensor",)',
        '"kv_heads": ("fsdp",)',
        "train/parallel/test_sharding.py train/parallel/test_meshes.py",
    ),
    Bug(
        "a data cursor that is one batch ahead",
        "train/data/batches.py",
        "first = cursor * self.batch_size\n"
        "        return self.examples(np.arange(first + start, first + stop))\n",
        "first = (cursor + 1) * self.batch_size\n"
        "        return self.examples(np.arange(first + start, first + stop))\n",
        "train/data/test_batches.py train/data/test_corpus.py",
    ),
    Bug(
        "evaluation that counts one target of each window too few",
        "train/data/batches.py",
        "offset >= num_context[:, None]",
        "offset > num_context[:, None]",
        "train/data/test_evaluation_batches.py",
    ),
    Bug(
        "a checkpoint's digests not compared",
        "train/checkpoint/manifest.py",
        "if digests[name] != digest]",
        "if not digests[name]]",
        "train/checkpoint",
    ),
    Bug(
        "microbatches summed, not averaged",
        "train/step.py",
        "return jax.tree.map(lambda g: g / count, grads), losses",
        "return grads, losses",
        "train/test_step.py",
    ),
    Bug(
        "the same dropout at every step",
        "train/step.py",
        "step_key = jax.random.fold_in(state.key, state.step)",
        "step_key = state.key",
        "train/test_step.py",
    ),
    Bug(
        "weight decay of biases and gains too",
        "train/optim/optimizer.py",
        "optax.add_decayed_weights(weight_decay, mask=is_matrix)",
        "optax.add_decayed_weights(weight_decay)",
        "train/optim",
    ),
    Bug(
        "anomalies that enter the history of normal steps",
        "train/detector.py",
        "jnp.where(accept, new, old), after, detector)",
        "jnp.where(True, new, old), after, detector)",
        "train/recovery/test_detector.py train/recovery/test_monitor.py",
    ),
    Bug(
        "a rollback that trains on the same batches again",
        "train/rollback.py",
        "jax.device_put(np.int32(last.cursor)",
        "jax.device_put(np.int32(state.cursor)",
        "train/recovery",
    ),
    Bug(
        "a run resumed on another text",
        "train/resume.py",
        'if restored.metadata.get("corpus") != run.corpus_digest:',
        'if restored.metadata.get("corpus") is None:',
        "train/test_resume.py train/cli/test_main.py",
    ),
    # What was trained, read or written is lost.
    Bug(
        "a checkpoint counted before it is complete",
        "train/checkpoint/manager.py",
        "if step != self._saving_step",
        "if step",
        "train/checkpoint",
    ),
    Bug(
        "older checkpoints deleted before the new one is committed",
        "train/checkpoint/manager.py",
        "            self._orbax.save(step, args=args.Composite(**items), force=True)\n",
        "            for old in set(self.steps()) - self._retention.steps_to_keep([step]):\n"
        "                self._orbax.delete(old)\n"
        "            self._orbax.save(step, args=args.Composite(**items), force=True)\n",
        "train/checkpoint",
    ),
    Bug(
        "the best checkpoint deleted as one of the old",
        "train/checkpoint/retention.py",
        "[*self.pinned_steps, self.best_step]",
        "[*self.pinned_steps]",
        "train/checkpoint",
    ),
    Bug(
        "a run whose last steps are not saved",
        "train/loop.py",
        "if is_last or stop_signal or save_due or evaluator.is_best(step):",
        "if stop_signal or save_due or evaluator.is_best(step):",
        "train/test_resume.py train/test_loop.py",
    ),
    Bug(
        "a checkpoint of a state whose anomaly is not known yet",
        "train/loop.py",
        "wait = bool(stop_signal) or evaluator.evaluates_after(step) or save_due",
        "wait = bool(stop_signal) or evaluator.evaluates_after(step)",
        "train/recovery train/test_loop.py",
    ),
    Bug(
        "a resumed run that skips a batch",
        "train/loop.py",
        "prefetch(self.load_batch, int(state.cursor))",
        "prefetch(self.load_batch, int(state.cursor) + (start_step > 0))",
        "train/test_resume.py train/test_loop.py",
    ),
    Bug(
        "a resumed stream that repeats a batch",
        "train/data/streaming.py",
        "self._positions[self._cursor] = [reader.position for reader in self.readers]",
        "self._positions[self._cursor + 1] = [reader.position for reader in self.readers]",
        "train/data/test_streaming.py",
    ),
    Bug(
        "a resumed stream that drops the rest of a shuffle window",
        "train/data/streaming.py",
        "for index in order[start.document :]]",
        "for index in order[start.document + (start.document > 0) :]]",
        "train/data/test_streaming.py",
    ),
    Bug(
        "answers of a conversation without the token that ends them",
        "train/data/conversations.py",
        "after = np.append(tokenizer.encode(completion), tokenizer.eos_token_id)",
        "after = tokenizer.encode(completion)",
        "train/data/test_conversations.py train/tasks/test_instruction.py",
    ),
    Bug(
        "end tokens of a model's files forgotten by its run",
        "train/data/tokenizer_settings.py",
        'generation["eos_token_id"] = list(end_token_ids)',
        'generation["eos_token_id"] = list(end_token_ids)[:1]',
        "train/data/test_tokenizer_settings.py train/data/test_tokenizer_files.py "
        "train/test_huggingface.py",
    ),
    Bug(
        "a weight imported into its neighbour",
        "transformer/interop/llama.py",
        'gate_up_proj.weight", ("layers/feed_forward/gate", "layers/feed_forward/up")',
        'gate_up_proj.weight", ("layers/feed_forward/up", "layers/feed_forward/gate")',
        "transformer/interop",
    ),
    # Checks behind which stands a result that is wrong, and looks right.
    Bug(
        "arrays that Orbax left out of its index not missed",
        "train/checkpoint/manifest.py",
        "if len(keys[name]) <= math.prod(",
        "if not math.prod(",
        "train/checkpoint",
    ),
    Bug(
        "a run resumed with other settings",
        "train/resume.py",
        "if forbidden := forbidden_changes(changes, requested):",
        "if forbidden := forbidden_changes({}, requested):",
        "train/test_resume.py",
    ),
    Bug(
        "a checkpoint restored under an edited config.json",
        "train/run_folder/provenance.py",
        "if requested[name] != trained[name]:",
        "if type(requested[name]) is not type(trained[name]):",
        "train/run_folder train/test_resume.py",
    ),
    Bug(
        "an adapter applied to other base weights",
        "train/run_folder/base_weights.py",
        "if metadata.get(BASE_KEY) != base_digest(folder):",
        "if metadata.get(BASE_KEY) is None:",
        "train/lora",
    ),
    Bug(
        "tokens written beyond the end of a cache",
        "transformer/attention/cache.py",
        "if not may_be_below(first, size - length + 1):",
        "if not may_be_below(first, size + 1):",
        "transformer/attention/test_cache.py transformer/generation/test_generate.py",
    ),
    Bug(
        "token ids that the vocabulary does not have",
        "train/data/corpus.py",
        "if largest >= tokenizer.vocab_size:",
        "if largest > tokenizer.vocab_size:",
        "train/data",
    ),
    Bug(
        "tensors that a model has no place for left out in silence",
        "transformer/interop/weight_files.py",
        "        if extra:\n            raise",
        "        if extra and missing:\n            raise",
        "transformer/interop",
    ),
    Bug(
        "fields of a config.json that change the result ignored",
        "transformer/interop/fields.py",
        "                raise InteropError(\n"
        '                    f"{self._source}: {name} {value!r} is not supported for this type',
        "                InteropError(\n"
        '                    f"{self._source}: {name} {value!r} is not supported for this type',
        "transformer/interop",
    ),
    Bug(
        "lines of two languages paired though one file is shorter",
        "train/data/bitext.py",
        "if len(sources) != len(targets):",
        "if not sources and targets:",
        "train/data/test_bitext.py train/tasks/test_translation.py",
    ),
)


def copy_tree(folder: Path) -> None:
    """Copy what the tests need into `folder`."""
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*COPIED, ".github", ".ci"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder / path.name)


def first_failure(folder: Path, tests: Sequence[str]) -> str:
    """Run tests of `make test` in a copy of the checkout. Return the first that fails, or ""."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, "-m", "not full", *tests],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TESTS_COMPILATION_CACHE": str(folder / "build" / "compiled"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"no end after {SECONDS} s"
    if process.returncode in (0, 5):  # 5: no test was selected
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*?)?(?: - .*)?$", output, re.MULTILINE)
    return failed[1] if failed else f"status {process.returncode}: {output[-3000:]}"


def drill(only: str = "") -> int:
    """Plant every bug and print which test detects it; return 1 if one is missed.

    Args:
      only: Plant only the bugs whose description has this.
    """
    bugs = [bug for bug in BUGS if only in bug.what]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="planted-bugs-") as name:
        folder = Path(name)
        copy_tree(folder)
        for bug in bugs:
            path, start = folder / bug.file, time.perf_counter()
            text = path.read_text()
            if text.count(bug.right) != 1:
                raise SystemExit(f"{bug.file}: has {bug.right!r} {text.count(bug.right)} times")
            path.write_text(text.replace(bug.right, bug.wrong))
            caught_by = first_failure(folder, [f"tests/{test}" for test in bug.tests.split()])
            path.write_text(text)
            missed += not caught_by
            seconds = time.perf_counter() - start
            print(f"{bug.what:62} {seconds:6.0f} s  {caught_by or 'MISSED'}", flush=True)
    print(f"{len(bugs) - missed} of {len(bugs)} planted bugs caught by the tests of `make test`")
    return int(missed > 0)
