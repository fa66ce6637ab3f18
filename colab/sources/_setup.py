# %% install-text [markdown]
# ## Check the machine and install
#
# On Colab, choose a GPU or TPU first (*Runtime > Change runtime type*). On Kaggle, enable *Settings > Accelerator* and *Internet*. The first cell shows the devices.
#
# The second cell installs the project if it is missing: from the checkout that contains this notebook, from an uploaded archive of the project (`.zip`, `.tar.gz` or `.whl`; on Colab in `/content`, on Kaggle as a data set), or from `REPOSITORY`. It keeps the version of every installed package, because JAX and its libraries match the GPU or TPU of this machine.

# %% look
import os

# Programs that a notebook starts share a GPU with it. A TPU has one owner: they use the CPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
try:
    import jax

    devices = jax.devices()
    if devices[0].platform == "tpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    print(
        f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), jax {jax.__version__}"
    )
except ImportError:
    print("JAX is not installed yet. The next cell installs it for the CPU.")

# %% install
import importlib.util
import os
import pathlib
import shutil
import tempfile
from importlib import metadata

REPOSITORY = ""  # @param {type:"string"}
COLAB_FILES = pathlib.Path("/content")
KAGGLE_INPUT = pathlib.Path("/kaggle/input")


def is_project(folder):
    file = folder / "pyproject.toml"
    return file.is_file() and 'name = "linen-transformer"' in file.read_text()


def find_project():
    """Return what pip can install: a checkout, an uploaded archive, or the address."""
    here = pathlib.Path.cwd()
    found = [folder for folder in (here, *here.parents) if is_project(folder)]
    # Kaggle mounts what is uploaded as data some folders below, and unpacks archives.
    inputs = [pathlib.Path(folder) for folder, _, _ in os.walk(KAGGLE_INPUT)]
    for place in (here, COLAB_FILES, *inputs):
        for ending in (".whl", ".zip", ".tar.gz"):
            found += sorted(place.glob(f"*linen*transformer*{ending}"))
    unpacked = [folder for folder in inputs if is_project(folder)]
    if found:
        return str(found[0])
    if unpacked:  # pip writes into the folder that it builds, and this one is read-only
        return str(shutil.copytree(unpacked[0], pathlib.Path(tempfile.mkdtemp(), "project")))
    if REPOSITORY:
        return REPOSITORY
    raise ValueError(
        "REPOSITORY: is empty, and neither a checkout nor an archive of the project is in "
        f"{here}, {COLAB_FILES} or {KAGGLE_INPUT}; upload linen-transformer.zip (on Kaggle: "
        "Add input > Upload), or set REPOSITORY to the project's git address (git+https://...)"
    )


if importlib.util.find_spec("train") is None:
    project = find_project()
    installed = {each.name: each.version for each in metadata.distributions() if each.name}
    held = [f"{name}=={version}\n" for name, version in sorted(installed.items())]
    constraints = pathlib.Path(tempfile.mkdtemp(), "constraints.txt")
    constraints.write_text("".join(held))
    print(f"Installing {project}.")
    # %pip install --quiet --constraint {constraints} {project}

# %% doctor-text [markdown]
# ## Check hardware and versions
#
# The doctor lists hardware and package versions, and says how to fix what is wrong.

# %% doctor
from train.cli.doctor import run_checks

run_checks().print()
