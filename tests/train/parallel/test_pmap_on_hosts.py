"""`pmap` on two processes: the run of one process, saved, evaluated and resumed."""

from pathlib import Path
from typing import Any

import jax
import pytest

import train
from tests.train.processes import run_two_processes
from tests.train.support import NO_DETECTOR, assert_close, losses, tiny, write_text
from train.assembly import make_engine_on
from train.engines.compiled_step import MIN_JAX_ON_SEVERAL_HOSTS
from train.errors import UserError
from train.parallel.mesh import MeshConfig, make_mesh
from transformer import Hardware

PROGRAM = """
import sys
from pathlib import Path
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
from tests.train.parallel.test_pmap_on_hosts import an_experiment
import train
folder = Path(sys.argv[3])
for steps in (3, 6):
    run = train.fit(an_experiment(folder, steps=steps, compile="pmap"), folder / "two", quiet=True)
print(run.final_metrics["loss"])
"""


def an_experiment(folder: Path, **changes: Any) -> train.Experiment:
    return tiny(folder, num_layers=1, dropout=0.0, recovery=NO_DETECTOR, **changes)


@pytest.mark.full
@pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_ON_SEVERAL_HOSTS, reason="pmap of this jax takes local arrays"
)
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    one, other = run_two_processes(PROGRAM, tmp_path)
    assert one == other
    run = train.fit(an_experiment(tmp_path, steps=6), tmp_path / "one", quiet=True)
    assert float(one) == pytest.approx(run.final_metrics["loss"], rel=1e-5)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    assert_close(train.load(tmp_path / "two").params, run.params, 1e-4)


def test_old_jax_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "__version_info__", (0, 7, 2))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with pytest.raises(UserError, match=r"compile pmap: on several hosts needs jax 0\.10\.0 or"):
        make_engine_on(mesh, an_experiment(tmp_path, compile="pmap"), Hardware())
