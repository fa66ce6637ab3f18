"""Build the wheel and the source distribution, and train with them in an empty environment."""

import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from bench.race.harness import ROOT

PACKAGES = ("configs", "train", "transformer")

QUICKSTART = (
    "fit quickstart --steps 2 --batch-size 2 --data.max-bytes 200000 --data.sequence-length 32 "
    "--data.tokenizer.kind byte --evaluation.num-batches 1 --workdir"
)


@dataclass(frozen=True)
class ReleaseOptions:
    """Build the distributions, and train with the wheel in an empty environment.

    Needs `build` and `twine` in the Python that runs it, and the network. Ends with status 1 at the
    first failing step.
    """

    python: str = sys.executable
    """Python of the empty environment."""
    output: str = ""
    """Folder that keeps the distributions. Empty: none."""
    constraints: str = ""
    """File of versions to install. Empty: the newest that pyproject.toml allows."""


def release_check(options: ReleaseOptions) -> None:
    """Build, check, install and train."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # Away from the repository, whose packages would be imported in place of the installed ones.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

        def run(*command: str | Path) -> str:
            print("$", *command, flush=True)
            words = [str(word) for word in command]
            done = subprocess.run(
                words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{done.stdout}\n{words[0]}: exit status {done.returncode}")
            return done.stdout

        built = Path(options.output or folder / "dist").absolute()
        # From the committed files: a build in place would include stray files.
        source = folder / "source"
        run("git", "clone", "--quiet", "--no-local", ROOT, source)
        run(sys.executable, "-m", "build", "--outdir", built, source)
        [wheel], [sdist] = built.glob("*.whl"), built.glob("*.tar.gz")
        run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
        held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
        committed = set(run("git", "-C", source, "ls-files", *PACKAGES).split())
        if wrong := held ^ committed:
            raise SystemExit(
                f"{wheel.name}: has too much or too little: {', '.join(sorted(wrong))}"
            )

        run(options.python, "-m", "venv", folder / "empty")
        programs = folder / "empty" / "bin"
        limits: list[str] = []
        if options.constraints:
            limits = ["--constraint", str(Path(options.constraints).absolute())]
        run(programs / "pip", "install", "--quiet", *limits, wheel)
        run(programs / "python", "-c", "import transformer, train")
        program = programs / "linen-transformer"
        run(program, *QUICKSTART.split(), folder / "run")
        answer = run(program, "sample", folder / "run", "--prompt", "The", "--max-new-tokens", "4")
        print(f"ok: {wheel.name} trains and samples ({answer.strip()!r})")
