"""Two processes with one device each read whole what is split over both: texts and embeddings."""

import json
from pathlib import Path

import pytest

from tests.train.processes import run_two_processes

PROGRAM = """
import dataclasses, json, sys
from pathlib import Path
import jax
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
jax.config.update("jax_disable_most_optimizations", True)
from tests.train.support import tiny
from tests.train.tasks.support import tiny_classifier, tiny_translator
from train.parallel.distributed import barrier
from train.parallel.mesh import MeshConfig
import train
folder = Path(sys.argv[3])
if jax.process_index() == 0:
    tiny(folder), tiny_translator(folder)  # write the texts
    width = tiny_classifier(folder).model.d_model
    (folder / "v.txt").write_text("cat" + " 0.5 -1" * (width // 2))
barrier("texts written")
translator = dataclasses.replace(tiny_translator(folder), steps=2)
run = train.fit(translator, str(folder / "translator"), quiet=True)
model = train.fit(tiny(folder, steps=2), str(folder / "model"), quiet=True)
split = dataclasses.replace(tiny_classifier(folder), steps=1, mesh=MeshConfig(data=1, fsdp=2))
train.fit(split, str(folder / "classifier"), init_from=str(folder / "v.txt"), quiet=True)
texts = model.generate(["the cat", "a cat"], max_new_tokens=5, temperature=0)
scores = [float(each.total) for each in model.score(["the cat", "a cat"])]
print(json.dumps([run.final_metrics["bleu"], texts, scores]))
"""


@pytest.mark.full
def test_two_processes_generate_and_start_together(tmp_path: Path) -> None:
    one, other = map(json.loads, run_two_processes(PROGRAM, tmp_path))
    assert one == other
    assert len(one[1]) == 2
    for run in ("translator", "model", "classifier"):
        events = (tmp_path / run / "logbook.jsonl").read_text()
        assert "sample failed" not in events
        assert '"finished"' in events
