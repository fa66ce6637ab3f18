import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.train.estimate.tiny_models import (
    TINY,
    describe_tiny,
)
from tests.train.support import light_compiler as light_compiler
from train.data.data_config import TextDataConfig, TokenizerConfig
from train.engines.lora import LoRAConfig
from train.errors import UserError
from train.estimate.describe import describe
from train.experiment import Experiment
from train.optim.elementwise import AdamW
from transformer import LearnedPositions


def test_flops_are_shown_up_to_the_maximum_length() -> None:
    table = dataclasses.replace(TINY, position_embedding=LearnedPositions(700))
    assert [flops.sequence_length for flops in describe_tiny(table).flops] == [11, 128, 512]
    assert [flops.sequence_length for flops in describe_tiny(TINY).flops] == [11]


def test_json_has_the_totals() -> None:
    plain = json.loads(json.dumps(describe_tiny(TINY).as_dict()))
    assert plain["parameters"]["total"] == 2414
    assert plain["parameters"]["parts"]["positions"] == 19 * 7
    assert plain["parameters"]["estimate"] == 12 * 3 * 49 + 17 * 7
    forward, training = (plain["flops_per_token"][kind] for kind in ("forward", "training"))
    assert forward["total"] == 2688 + 3168 + 1092 + 238
    assert forward["total_causal"] == 2688 + 1728 + 1092 + 238
    for name in ("total", "total_causal"):
        assert training[name] == 3 * forward[name]
    assert plain["memory_bytes"]["total"] == describe_tiny(TINY).memory.total
    assert plain["decoding"]["variants"][0]["num_kv_heads"] == [3]


def test_tables_fit_a_narrow_terminal() -> None:
    text = io.StringIO()
    described = describe_tiny(TINY)
    described.print(Console(file=text, width=80))
    assert "…" not in text.getvalue()
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert ["total", "2,414"] in rows
    assert ["gradients", "9.62", "KiB"] in rows
    assert ["AdamW", "4+4+8=16", "6+4+8=18", "4+4+8=16", "38.5", "KiB"] in rows
    assert "Decoding after 11 tokens\n" in re.sub(" +\n", "\n", text.getvalue())
    assert "--ask-compiler" in text.getvalue()


def experiment(**tokenizer: Any) -> Experiment:
    data = TextDataConfig(sequence_length=11, tokenizer=TokenizerConfig(**tokenizer))
    return Experiment(model=dataclasses.replace(TINY, vocab_size=0), data=data, batch_size=5)


def test_byte_tokenizer_needs_no_text() -> None:
    described = describe(experiment(kind="byte"))
    assert described.config.vocab_size == 257  # the bytes, and what stands between documents
    assert described.quantities.batch_shape == (5, 11)
    assert described.notes == ()


def test_trained_tokenizer_is_assumed_to_fill_its_vocabulary() -> None:
    described = describe(experiment(kind="bpe", vocab_size=509))
    assert described.config.vocab_size == 509
    assert len(described.as_dict()["notes"]) == 1


def test_character_tokenizer_reads_the_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abcab cabca bcabc\n" * 50)
    base = experiment(kind="character")
    data = dataclasses.replace(
        base.text_data, path=str(tmp_path / "text.txt"), cache_dir=str(tmp_path / "cache")
    )
    described = describe(dataclasses.replace(base, data=data))
    assert described.config.vocab_size == len(set("abc \n")) + 1
    missing = dataclasses.replace(data, path=str(tmp_path / "none.txt"))
    with pytest.raises(UserError, match=r"none\.txt.*; or give --model\.vocab-size"):
        describe(dataclasses.replace(base, data=missing))


def test_optimizer_states_of_lora_are_those_of_its_parameters_alone() -> None:
    described = describe_tiny(TINY, lora=LoRAConfig(rank=2), optimizer=AdamW())
    adamw, memory = described.optimizer_states[0], described.memory
    assert adamw.weights == memory.weights > 4 * 2463
    assert adamw.gradients == memory.gradients == 4 * described.trainable
    assert adamw.optimizer_state == memory.optimizer == 8 * described.trainable + 4


def test_one_token() -> None:
    """The cache of one token is all of the cache."""
    [first, *_] = describe_tiny(TINY, sequence_length=1).decoding_costs
    assert first.cache_bytes_per_token == first.cache_bytes == 3 * (5 + 11) * 4
