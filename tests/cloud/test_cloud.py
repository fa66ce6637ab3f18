"""The launch recipes, offline: they parse, validate, and print what they would do."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from train.runtime.signals import PREEMPTED_EXIT_STATUS

CLOUD = Path(__file__).parents[2] / "cloud"
SCRIPTS = ("tpu_vm.sh", "gke.sh", "slurm.sbatch")
TPU: dict[str, Any] = dict(
    NAME="run",
    ZONE="us-east5-a",
    TYPE="v5p-128",
    REPOSITORY="https://example.org/it.git",
    CONFIG="llama:3-8b",
    WORKDIR="gs://bucket/a run",
)
GKE: dict[str, Any] = dict(
    NAME="run",
    IMAGE="example.org/it:1",
    CHIP="tpu-v5p-slice",
    TOPOLOGY="4x4x4",
    HOSTS="16",
    CONFIG="llama:3-8b",
    WORKDIR="gs://bucket/run",
)


def run_script(
    script: str, *arguments: str, dry: bool = True, **variables: Any
) -> "subprocess.CompletedProcess[str]":
    folder = Path(sys.executable).parent  # python3 and shellcheck
    known = {"PATH": f"{folder}:{os.environ['PATH']}", "PAUSE": "0", **variables}
    known |= {"DRY_RUN": "1"} if dry else {}
    command = ["bash", str(CLOUD / script), *arguments]
    return subprocess.run(command, env=known, capture_output=True, text=True, timeout=60)


def remote_script(line: str) -> str:
    """Return the script that a dry-run line of `tpu-vm ssh` sends to the hosts."""
    split = """eval "words=(${1#+})"; printf '%s\\0' "${words[@]}\""""
    command = ["bash", "-c", split, "bash", line]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    assert words[:5] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh"]
    return words[words.index("--command") + 1]


class Host:
    """Host without uv: an empty home folder and the few programs that setup needs.

    `curl` is a stand-in that prints an installer, and the installer makes a stand-in of uv. Both
    write their arguments to `log`.
    """

    def __init__(self, root: Path) -> None:
        self.home, self.programs = root / "home", root / "programs"
        self.home.mkdir()
        self.programs.mkdir()
        for name in ("bash", "sh", "env", "git", "mkdir", "chmod", "cat", "head"):
            actual = shutil.which(name)
            assert actual
            (self.programs / name).symlink_to(actual)
        self.log = root / "log"
        uv = f'#!/bin/sh\necho "$PWD: uv $*" >> {self.log}\n'
        (self.programs / "curl").write_text(
            f"#!/bin/sh\necho \"curl $*\" >> {self.log}\ncat <<'INSTALLER'\n"
            f'mkdir -p "$UV_INSTALL_DIR"\necho \'{uv}\' > "$UV_INSTALL_DIR/uv"\n'
            'chmod +x "$UV_INSTALL_DIR/uv"\nINSTALLER\n'
        )
        (self.programs / "curl").chmod(0o755)

    def run(self, script: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        known = {"PATH": str(self.programs), "HOME": str(self.home), **variables}
        command = ["bash", "-c", script]
        return subprocess.run(
            command, env=known, cwd=self.home, capture_output=True, text=True, timeout=60
        )

    def logged(self) -> list[str]:
        """Return the log of the stub programs since the last call."""
        lines = self.log.read_text().splitlines()
        self.log.unlink()
        return lines


INSTALLER = "curl -LsSf https://astral.sh/uv/install.sh"
VENV = "uv venv --quiet --allow-existing --python 3.12 .venv"
INSTALL = "uv pip install --quiet --python .venv/bin/python -c constraints.txt"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


class Repository:
    """Git repository with one file, `code`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, folder.as_uri()
        folder.mkdir()
        self.git("init", "--quiet")

    def git(self, *arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(self.folder), *who, *arguments], check=True)

    def commit(self, code: str) -> None:
        (self.folder / "code").write_text(code)
        self.git("add", "code")
        self.git("commit", "--quiet", "--message", code)


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_passes(script: str) -> None:
    checker = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    assert checker
    command = [checker, "-x", f"cloud/{script}"]
    result = subprocess.run(command, cwd=CLOUD.parent, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (0, "")


def test_tpu_is_requested_set_up_used_and_released() -> None:
    result = run_script("tpu_vm.sh", "train", **TPU, SPOT="1", PROJECT="mine")
    assert (result.returncode, result.stderr) == (0, "")
    steps = result.stdout.splitlines()
    assert len(steps) == 4
    assert all(step.endswith("--zone us-east5-a --project mine") for step in steps)
    create, setup, fit, delete = steps
    assert "queued-resources create run --node-id run --accelerator-type v5p-128" in create
    assert "--runtime-version v2-alpha-tpuv5 --spot" in create
    assert "constraints.txt" in remote_script(setup)
    assert "--worker all" in fit
    # Quoted once for the local shell and once for the remote shell.
    assert re.search(r"fit\\ llama:3-8b\\ --workdir\\ gs://bucket/a\\\\\\ run", fit)
    assert "delete run --force" in delete


def test_setup_installs_uv_and_updates_the_code(tmp_path: Path, host: Host) -> None:
    def setup(repository: Repository) -> list[str]:
        shown = run_script("tpu_vm.sh", "setup", **TPU | {"REPOSITORY": repository.url})
        assert (shown.returncode, shown.stderr) == (0, "")
        [line] = shown.stdout.splitlines()
        result = host.run(remote_script(line))
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
        return host.logged()

    folder = host.home / "it"
    installs = [f"{folder}: {VENV}", f"{folder}: {INSTALL} -e .[tpu] gcsfs"]
    code = folder / "code"
    first, second = Repository(tmp_path / "a first"), Repository(tmp_path / "second")
    first.commit("one")
    assert setup(first) == [INSTALLER, *installs]
    assert code.read_text() == "one"
    first.commit("two")
    assert setup(first) == installs
    assert code.read_text() == "two"
    second.commit("three")
    code.write_text("changed on the host")
    assert setup(second) == installs
    assert code.read_text() == "three"


def test_setup_stops_at_the_first_failure(tmp_path: Path, host: Host) -> None:
    line = run_script(
        "tpu_vm.sh", "setup", **TPU | {"REPOSITORY": f"file://{tmp_path}/none"}
    ).stdout
    result = host.run(remote_script(line))
    assert result.returncode != 0
    assert host.logged() == [INSTALLER]  # code that was not fetched is not installed
    (host.home / ".local" / "bin" / "uv").unlink()
    (host.programs / "curl").write_text("#!/bin/sh\nexit 6\n")
    repository = Repository(tmp_path / "repository")
    repository.commit("one")
    line = run_script("tpu_vm.sh", "setup", **TPU | {"REPOSITORY": repository.url}).stdout
    assert host.run(remote_script(line)).returncode != 0


@pytest.mark.parametrize("folder", ["runs/a", "/mnt/disk/runs", "file:///mnt/runs"])
def test_local_workdir_raises(folder: str) -> None:
    for script, verbs, variables in (
        ("tpu_vm.sh", ("fit", "train"), TPU),
        ("gke.sh", ("up", "show", "xpk"), GKE),
    ):
        for verb in verbs:
            result = run_script(script, verb, **variables | {"WORKDIR": folder})
            assert (result.returncode, result.stdout) == (2, ""), (script, verb)
            assert f"WORKDIR {folder}: is not in a bucket" in result.stderr


@pytest.mark.parametrize(
    ("kind", "image"),
    [
        ("v4-64", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v6e-16", "v2-alpha-tpuv6e"),
        ("tpu7x-16", "v2-alpha-tpu7-ubuntu2404"),
    ],
)
def test_each_tpu_kind_has_its_image(kind: str, image: str) -> None:
    result = run_script("tpu_vm.sh", "up", **{**TPU, "TYPE": kind})
    assert f"--runtime-version {image} " in result.stdout
    assert "--spot" not in result.stdout


def test_usage_errors() -> None:
    cases: list[tuple[str, tuple[str, ...], dict[str, Any], str]] = [
        ("tpu_vm.sh", ("up",), {}, "NAME is not set"),
        ("gke.sh", ("up",), {}, "NAME is not set"),
        ("slurm.sbatch", (), {}, "CONFIG is not set"),
        ("tpu_vm.sh", ("up",), {**TPU, "TYPE": "v9-8"}, "TYPE v9-8: is not known"),
        ("tpu_vm.sh", (), TPU, "usage: cloud/tpu_vm.sh"),
        ("gke.sh", (), TPU, "usage: cloud/gke.sh"),
    ]
    for script, verb, variables, message in cases:
        result = run_script(script, *verb, **variables)
        assert (result.returncode, result.stdout) == (2, "")
        assert message in result.stderr


def test_missing_program_is_named(tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        actual = shutil.which(name)
        assert actual
        (tmp_path / name).symlink_to(actual)
    shown = run_script("tpu_vm.sh", "status", dry=False, **TPU | {"PATH": str(tmp_path)})
    assert shown.returncode == 2
    assert "gcloud is not installed" in shown.stderr


@pytest.fixture(scope="module")
def jobset() -> dict[str, Any]:
    result = run_script("gke.sh", "show", **GKE, ARGUMENTS="--mesh.fsdp -1 --seed '3'", CHIPS="8")
    assert (result.returncode, result.stderr) == (0, "")
    loaded: dict[str, Any] = yaml.safe_load(result.stdout)
    return loaded


def test_jobset_has_the_requested_settings(jobset: dict[str, Any]) -> None:
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 10
    [job] = jobset["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == 16
    pod = job["template"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    words = ["fit", "llama:3-8b", "--workdir", "gs://bucket/run"]
    assert container["args"] == [*words, "--mesh.fsdp", "-1", "--seed", "3"]
    assert container["resources"]["limits"] == {"google.com/tpu": "8"}
    assert container["imagePullPolicy"] == "Always"
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4x4"


def test_jobset_jobs_are_valid_kubernetes_jobs(jobset: dict[str, Any]) -> None:
    [job] = jobset["spec"]["replicatedJobs"]
    full = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "host"},
        "spec": job["template"]["spec"],
    }
    kubernetes_validate.validate(full, "1.31", strict=True)
    full["spec"]["completion"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(full, "1.31", strict=True)


def test_gke_dry_run() -> None:
    applied = run_script("gke.sh", "up", **GKE).stdout
    assert applied.startswith("+ kubectl apply -f -\n")
    assert "kind: JobSet" in applied
    assert run_script("gke.sh", "down", **GKE).stdout == "+ kubectl delete jobset run\n"
    line = run_script("gke.sh", "xpk", **GKE, CLUSTER="pod", TYPE="v5p-128").stdout
    assert line.startswith("+ xpk workload create --cluster pod --workload run")


def test_slurm_dry_run() -> None:
    result = run_script(
        "slurm.sbatch", CONFIG="gpt2", WORKDIR="/shared/a run", ARGUMENTS="--seed 1"
    )
    assert result.stdout == (
        "+ srun --kill-on-bad-exit=0 --cpus-per-task=64 .venv/bin/python -m train fit gpt2 "
        "--workdir /shared/a\\ run --seed 1\n"
    )


def test_preempted_job_is_requeued(tmp_path: Path) -> None:
    for name, text in {"srun": "exit 75", "scontrol": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    result = run_script(
        "slurm.sbatch", dry=False, CONFIG="a", WORKDIR="b", PATH=path, SLURM_JOB_ID="7"
    )
    assert (result.returncode, result.stdout) == (0, "requeue 7\n")
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 1\n")
    result = run_script("slurm.sbatch", dry=False, CONFIG="a", WORKDIR="b", PATH=path)
    assert (result.returncode, result.stdout) == (1, "")
    text = (CLOUD / "slurm.sbatch").read_text()
    assert "#SBATCH --requeue" in text
    assert re.search(r"#SBATCH --signal=USR1@(\d+)", text)


def test_skypilot_task_is_complete() -> None:
    task = yaml.safe_load((CLOUD / "sky.yaml").read_text())
    assert set(task) == {"name", "num_nodes", "workdir", "resources", "envs", "setup", "run"}
    used = set(re.findall(r"\$(?!SKYPILOT)([A-Z]+)\b", task["run"]))
    assert used == set(task["envs"])
    assert task["resources"]["use_spot"]
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [PREEMPTED_EXIT_STATUS]
    # SkyPilot does not launch while a variable's value is null.
    assert [name for name, value in task["envs"].items() if value is None] == ["WORKDIR"]
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[part]], check=True)


def test_skypilot_setup_installs_uv(host: Host) -> None:
    task = yaml.safe_load((CLOUD / "sky.yaml").read_text())
    installs = [f"{host.home}: {VENV}", f"{host.home}: {INSTALL} -e .[cuda13] s3fs gcsfs"]
    for expected in ([INSTALLER, *installs], installs):
        result = host.run(task["setup"])
        assert (result.returncode, result.stderr) == (0, "")
        assert host.logged() == expected


def test_skypilot_run_rejects_a_local_workdir(host: Host) -> None:
    task = yaml.safe_load((CLOUD / "sky.yaml").read_text())
    python = host.home / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$*"\n')
    python.chmod(0o755)
    variables = {
        "CONFIG": "gpt2",
        "ARGUMENTS": "--seed 1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "0",
    }
    for folder in ("runs/sky", "/mnt/runs", "file:///mnt/runs", ""):
        result = host.run(task["run"], **variables, WORKDIR=folder)
        assert (result.returncode, result.stdout) == (2, "")
        [line] = result.stderr.splitlines()
        assert f"WORKDIR {folder}: is not in a bucket" in line
    result = host.run(task["run"], **variables, WORKDIR="s3://bucket/a run")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "-m train fit gpt2 --workdir s3://bucket/a run --seed 1\n"
