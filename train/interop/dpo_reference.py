"""Log-likelihoods of the reference of direct preference optimization, written beside the pairs.

A run with `--task.reference data` reads them: all weights can then be trained, and a step needs one
forward pass less.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.data.chat_template import ChatTemplate
from train.data.conversations import with_template
from train.data.preferences import PreferenceDataConfig, encode_split, parse_pair
from train.data.rows import read_rows
from train.errors import UserError
from train.run import load
from train.runtime.stages import track
from train.runtime.writing import write_atomically
from train.tasks.preference import pair_log_likelihoods
from transformer.models.language_model import LanguageModel

FIELDS = ("tokens", "targets", "weights", "segments", "positions")
"""Arrays of a batch that `pair_log_likelihoods` reads."""


def add_reference(
    workdir: str,
    pairs_path: str,
    output: str,
    *,
    max_length: int = PreferenceDataConfig.max_length,
    chat_template: str = "",
    batch_size: int = 8,
) -> int:
    """Write pairs with the log-likelihoods of a run; return their number.

    Args:
      workdir: Folder of the run, a language model.
      pairs_path: JSON lines of pairs.
      output: File to write.
      max_length: `data.max_length` of the DPO run.
      chat_template: `data.chat_template` of the DPO run.
      batch_size: Pairs of a forward pass.

    Raises:
      UserError: The pairs are malformed, the run is no language model, or a file cannot be read or
        written, or a log-likelihood is not finite.
    """
    run = load(workdir)
    model = run.model
    if not isinstance(model, LanguageModel) or run.tokenizer is None:
        raise UserError(f"{workdir}: is not a language model; give the run that DPO starts from")
    longest = model.config.max_length
    if longest is not None and max_length // 2 > longest:
        raise UserError(
            f"max_length {max_length}: half of it is more than the model's {longest} positions; "
            f"give {2 * longest} or less"
        )
    records = list(read_rows("pairs", pairs_path))
    pairs = [parse_pair(*each)._replace(reference=None) for each in records]
    tokenizer = with_template(run.tokenizer, chat_template)
    template = ChatTemplate.of_tokenizer(tokenizer)
    notes: list[str] = []
    split = encode_split("pairs", pairs, tokenizer, template, max_length // 2, notes)
    if len(split.reference) != len(pairs):
        raise UserError(f"{pairs_path}: {notes[-1]}; leave such pairs out, or raise --max-length")
    score = jax.jit(functools.partial(pair_log_likelihoods, model))
    length = int(split.lengths.max())
    found: list[np.ndarray] = []
    for start in track(range(0, len(pairs), batch_size), "scoring"):
        indices = np.arange(start, start + batch_size)
        batch = split.batch(np.where(indices < len(pairs), indices, -1), (length,))
        arrays = {name: batch[name] for name in FIELDS}
        found += list(np.asarray(score(run.params, arrays)))
    lines = [
        json.dumps({**record, "reference": _entry(where, scores, counts)}, ensure_ascii=False)
        for (where, record), scores, counts in zip(
            records, found[: len(pairs)], split.num_targets, strict=True
        )
    ]
    path = Path(output).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "\n".join([*lines, ""]))
    return len(lines)


def _entry(where: str, scores: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    if not np.isfinite(scores).all():  # JSON has no such numbers
        raise UserError(
            f"{where}: the log-likelihoods of its answers are not finite ({scores[0]}, "
            f"{scores[1]}); use an earlier checkpoint or a run trained in float32"
        )
    chosen, rejected = (min(float(each), 0.0) for each in scores)
    return {"chosen": chosen, "rejected": rejected, "tokens": [int(each) for each in counts]}
