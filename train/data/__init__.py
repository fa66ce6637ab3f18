"""Text in, batches of tokens out.

`DataConfig` says what to read; `prepare` makes a `Corpus` of it (a `Tokenizer` and a
`TokenStream` for each split); `Batches` and `evaluation_batches` cut that into windows. For tasks
with separate examples `prepare_parallel`, `prepare_labelled`, `prepare_listops` and
`prepare_tagged` make an `ExampleCorpus`, whose examples `TrainingBatches` and `HeldOutBatches` put
together by length.

The names below are imported when they are first asked for: `train.data.config` has to be had in
milliseconds by a command line that may only be asked for help.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.data.batches import Batches
    from train.data.buckets import buckets_by_rows, buckets_by_tokens
    from train.data.config import DataConfig, TokenizerConfig
    from train.data.corpus import Corpus, prepare
    from train.data.evaluation import EvaluationBatches, evaluation_batches
    from train.data.example_batches import HeldOutBatches, TrainingBatches
    from train.data.example_corpus import ExampleCorpus
    from train.data.labelled import LabelledSplit, prepare_labelled
    from train.data.labelled_config import LabelledDataConfig
    from train.data.listops import prepare_listops
    from train.data.listops_config import ListOpsDataConfig
    from train.data.masked import MaskedBatches, MaskedEvaluationBatches, Masking
    from train.data.parallel import ParallelSplit, prepare_parallel
    from train.data.parallel_config import ParallelDataConfig
    from train.data.streams import TokenStream
    from train.data.tagged import TaggedSplit, prepare_tagged
    from train.data.tagged_config import TaggedDataConfig
    from train.data.tokenizer import StreamDecoder, Tokenizer
    from train.data.tokenizer_training import train_tokenizer
    from train.data.windows import Batch

_HOMES = {
    "Batch": "windows",
    "Batches": "batches",
    "Corpus": "corpus",
    "DataConfig": "config",
    "EvaluationBatches": "evaluation",
    "ExampleCorpus": "example_corpus",
    "HeldOutBatches": "example_batches",
    "LabelledDataConfig": "labelled_config",
    "LabelledSplit": "labelled",
    "ListOpsDataConfig": "listops_config",
    "MaskedBatches": "masked",
    "MaskedEvaluationBatches": "masked",
    "Masking": "masked",
    "ParallelDataConfig": "parallel_config",
    "ParallelSplit": "parallel",
    "StreamDecoder": "tokenizer",
    "TaggedDataConfig": "tagged_config",
    "TaggedSplit": "tagged",
    "TokenStream": "streams",
    "Tokenizer": "tokenizer",
    "TokenizerConfig": "config",
    "TrainingBatches": "example_batches",
    "buckets_by_rows": "buckets",
    "buckets_by_tokens": "buckets",
    "evaluation_batches": "evaluation",
    "prepare": "corpus",
    "prepare_labelled": "labelled",
    "prepare_listops": "listops",
    "prepare_parallel": "parallel",
    "prepare_tagged": "tagged",
    "train_tokenizer": "tokenizer_training",
}

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "DataConfig",
    "EvaluationBatches",
    "ExampleCorpus",
    "HeldOutBatches",
    "LabelledDataConfig",
    "LabelledSplit",
    "ListOpsDataConfig",
    "MaskedBatches",
    "MaskedEvaluationBatches",
    "Masking",
    "ParallelDataConfig",
    "ParallelSplit",
    "StreamDecoder",
    "TaggedDataConfig",
    "TaggedSplit",
    "TokenStream",
    "Tokenizer",
    "TokenizerConfig",
    "TrainingBatches",
    "buckets_by_rows",
    "buckets_by_tokens",
    "evaluation_batches",
    "prepare",
    "prepare_labelled",
    "prepare_listops",
    "prepare_parallel",
    "prepare_tagged",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
