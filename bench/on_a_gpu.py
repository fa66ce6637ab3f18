"""All measurements on a GPU that results refer to, in one call of ten minutes.

    python -m bench.on_a_gpu --output FOLDER [--parts eabcdf] [--nanogpt PATH] [--tiny]

Parts run one after the other, each a process with a time limit, and write what they print as they
go. A part whose packages are missing is skipped with their names. `--tiny` tries every part with
small models, on a CPU too.
"""

import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "torch")


@dataclass(frozen=True)
class Options:
    """Run the measurements on a GPU."""

    output: Path = Path("gpu-results")
    """Folder for what each part prints."""
    parts: str = "eabcdf"
    """Parts in this order: e tests, a decoding, b training step of 124M, c profile of
    transformer_base, d Llama of 1.3B, f plan beside what was measured."""
    nanogpt: Path | None = None
    """A checkout of nanoGPT; without it part b has no peer."""
    tiny: bool = False
    """Small models, to try the script."""


@dataclass(frozen=True)
class Part:
    """One process: what it is for, its command and its time limit."""

    title: str
    command: tuple[str, ...]
    seconds: int
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""


def parts(options: Options) -> dict[str, list[Part]]:
    """Return the processes of each part."""
    tiny = options.tiny
    precision = ("--precision", "float32" if tiny else "bfloat16")
    python = (sys.executable, "-m")
    quick = ("--rounds", "1", "--steps", "1", "--warmup", "1")
    decode = (*python, "bench.decode", "--variants", *precision, "--batch", "1", "--rounds")
    small = ("--layers", "2", "--width", "64", "--heads", "2", "--vocabulary", "512")
    large = ("--layers", "48", "--width", "1600", "--heads", "25")
    step: tuple[str, ...] = (*python, "bench.train_step", *precision)
    step += quick if tiny else ("--rounds", "3", "--steps", "10", "--warmup", "5", "--compile")
    nanogpt = ("--against", "nanogpt", "--nanogpt", str(options.nanogpt))
    profiled = (
        ("transformer_base", "--rows", "1", "--steps", "1") if tiny else ("transformer_base",)
    )
    planned = ("--steps", "2") if tiny else ("--cases", "gpt2", "transformer_base", "bert_base")
    return {
        "e": [
            Part(
                "tests",
                (*python, "pytest", "-q", "-c", "tests_device/pytest.ini", "--rootdir", ".")
                + (("--collect-only",) if tiny else ())
                + ("tests_device",),
                150,
                ("pytest",),
            )
        ],
        "a": [
            Part("decoding, 124M", (*decode, "1" if tiny else "3", *(small if tiny else ())), 70),
            *([] if tiny else [Part("decoding, 1.5B", (*decode, "2", *large), 80)]),
        ],
        "b": [
            Part(
                "training step, 124M",
                (*step, "--shapes", "small" if tiny else "gpt2-1k")
                + (nanogpt if options.nanogpt else ("--against", "products")),
                80,
                ("torch",) if options.nanogpt else (),
            )
        ],
        "c": [Part("profile of transformer_base", (*python, "bench.step_profile", *profiled), 50)],
        "d": [
            Part(
                "Llama, 1.3B",
                (*step, "--against", "hf", "--shapes", "llama-tiny" if tiny else "llama-1b"),
                110,
                ("torch", "transformers"),
            )
        ],
        "f": [Part("plan", (*python, "bench.drills.plan_time", *planned), 50)],
    }


def versions() -> str:
    """Return the installed versions, for the record."""
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} missing")
    return ", ".join(found)


def main(options: Options) -> int:
    """Run the parts; return the number of those that failed."""
    options.output.mkdir(parents=True, exist_ok=True)
    print(versions(), flush=True)
    by_letter, failed = parts(options), 0
    for letter in options.parts:
        for number, part in enumerate(by_letter[letter]):
            missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
            if missing:
                print(
                    f"== {letter} {part.title}: not run, without {', '.join(missing)}", flush=True
                )
                continue
            print(f"== {letter} {part.title}", flush=True)
            start, path = time.monotonic(), options.output / f"{letter}{number}.txt"
            with path.open("w") as log:
                process = subprocess.Popen(
                    part.command,
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                try:
                    code = process.wait(part.seconds * (10 if options.tiny else 1))
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)  # its contenders too
                    code = -1
            failed += code != 0
            print("\n".join(path.read_text().splitlines()[-25:]))
            ended = {0: "done", -1: "out of time"}.get(code, f"failed with {code}")
            print(f"-- {ended} after {time.monotonic() - start:.0f} s, {path}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
