"""Build the wheel and the source distribution, and train with them in an empty environment.

    python -m bench.release_check [--python python3.11] [--output dist] [--constraints FILE]

It needs `build` and `twine` in the Python that runs it, and the network. It exits with 1 at the
first failing step.
"""

import dataclasses
import os
import pathlib
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import tyro

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = {"configs", "train", "transformer"}
DATA_FILES = (
    "configs/py.typed",
    "train/config/new_config.py.template",
    "train/estimate/prices.toml",
    "train/estimate/targets/h100.txtpb",
    "train/visualization/assets/page.js",
    "transformer/py.typed",
)
"""Files beside the code without which some command fails, one of each kind."""

QUICKSTART = (
    "fit quickstart --steps 2 --batch-size 2 --data.max-bytes 200000 --data.sequence-length 32 "
    "--data.tokenizer.kind byte --evaluation.num-batches 1 --workdir"
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Build the distributions, and try the wheel in an empty environment."""

    python: str = sys.executable
    """Python of the empty environment."""
    output: str = ""
    """Folder that keeps the distributions. Empty: none."""
    constraints: str = ""
    """File of versions to install. Empty: the newest that pyproject.toml allows."""


def run(*command: str | pathlib.Path, folder: pathlib.Path) -> str:
    """Run a command in a folder, away from the repository's packages; return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    print("$", *command, flush=True)
    done = subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        print(done.stdout)
        raise SystemExit(f"{command[0]}: exit status {done.returncode}")
    return done.stdout


def check_contents(wheel: pathlib.Path, sdist: pathlib.Path) -> None:
    """Exit unless the distributions have all packages with their data, and nothing else."""
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    if tops != PACKAGES:
        raise SystemExit(f"{wheel.name}: holds {sorted(tops)}, and should {sorted(PACKAGES)}")
    if missing := [name for name in DATA_FILES if name not in names]:
        raise SystemExit(f"{wheel.name}: lacks {', '.join(missing)}")
    with tarfile.open(sdist) as archive:
        parts = [name.split("/") for name in archive.getnames()]
    if strays := {each[1] for each in parts if len(each) > 1} & {"tests", "bench", "docs"}:
        raise SystemExit(f"{sdist.name}: holds {sorted(strays)}")


def main(options: Options) -> None:
    """Build, check, install and train."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        built = pathlib.Path(options.output or folder / "dist").absolute()
        # From the committed files: a build in place would include stray files.
        source = folder / "source"
        run("git", "clone", "--quiet", "--no-local", ROOT, source, folder=folder)
        run(sys.executable, "-m", "build", "--outdir", built, source, folder=folder)
        [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist, folder=folder)
        check_contents(wheel, sdist)

        run(options.python, "-m", "venv", folder / "empty", folder=folder)
        programs = folder / "empty" / "bin"
        limits: list[str] = []
        if options.constraints:
            limits = ["--constraint", str(pathlib.Path(options.constraints).absolute())]
        run(programs / "pip", "install", "--quiet", *limits, wheel, folder=folder)
        run(programs / "python", "-c", "import transformer, train", folder=folder)
        program = programs / "linen-transformer"
        run(program, *QUICKSTART.split(), folder / "run", folder=folder)
        answer = run(
            program, "sample", folder / "run", "--prompt", "The", "--max-new-tokens", "4",
            folder=folder,
        )  # fmt: skip
        print(f"ok: {wheel.name} trains and samples ({answer.strip()!r})")


if __name__ == "__main__":
    main(tyro.cli(Options))
