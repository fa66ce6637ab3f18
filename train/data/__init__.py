"""Text in, batches of tokens out.

`DataConfig` says what to read; `prepare_corpus` makes a `Corpus` of it (a `Tokenizer` and a
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
    from train.data.batches import TextTrainingBatches
    from train.data.buckets import bucket_by_rows, bucket_by_tokens
    from train.data.config import TextDataConfig, TokenizerConfig
    from train.data.corpus import TextCorpus, prepare_text
    from train.data.evaluation import TextEvaluationBatches, make_text_evaluation_batches
    from train.data.example_batches import ExampleEvaluationBatches, ExampleTrainingBatches
    from train.data.example_corpus import ExampleCorpus
    from train.data.labelled import ClassificationSplit, prepare_classification
    from train.data.labelled_config import ClassificationDataConfig
    from train.data.listops import prepare_listops
    from train.data.listops_config import ListOpsDataConfig
    from train.data.masked import MaskedEvaluationBatches, MaskedTrainingBatches, Masking
    from train.data.parallel import BitextSplit, prepare_bitext
    from train.data.parallel_config import BitextDataConfig
    from train.data.streams import TokenStream
    from train.data.tagged import TokenLabelSplit, prepare_token_labels
    from train.data.tagged_config import TokenLabelDataConfig
    from train.data.tokenizer import StreamDecoder, Tokenizer
    from train.data.tokenizer_training import train_tokenizer
    from train.data.windows import HostBatch

_HOMES = {
    "HostBatch": "windows",
    "TextTrainingBatches": "batches",
    "TextCorpus": "corpus",
    "TextDataConfig": "config",
    "TextEvaluationBatches": "evaluation",
    "ExampleCorpus": "example_corpus",
    "ExampleEvaluationBatches": "example_batches",
    "ClassificationDataConfig": "labelled_config",
    "ClassificationSplit": "labelled",
    "ListOpsDataConfig": "listops_config",
    "MaskedTrainingBatches": "masked",
    "MaskedEvaluationBatches": "masked",
    "Masking": "masked",
    "BitextDataConfig": "parallel_config",
    "BitextSplit": "parallel",
    "StreamDecoder": "tokenizer",
    "TokenLabelDataConfig": "tagged_config",
    "TokenLabelSplit": "tagged",
    "TokenStream": "streams",
    "Tokenizer": "tokenizer",
    "TokenizerConfig": "config",
    "ExampleTrainingBatches": "example_batches",
    "bucket_by_rows": "buckets",
    "bucket_by_tokens": "buckets",
    "make_text_evaluation_batches": "evaluation",
    "prepare_text": "corpus",
    "prepare_classification": "labelled",
    "prepare_listops": "listops",
    "prepare_bitext": "parallel",
    "prepare_token_labels": "tagged",
    "train_tokenizer": "tokenizer_training",
}

__all__ = [
    "HostBatch",
    "TextTrainingBatches",
    "TextCorpus",
    "TextDataConfig",
    "TextEvaluationBatches",
    "ExampleCorpus",
    "ExampleEvaluationBatches",
    "ClassificationDataConfig",
    "ClassificationSplit",
    "ListOpsDataConfig",
    "MaskedTrainingBatches",
    "MaskedEvaluationBatches",
    "Masking",
    "BitextDataConfig",
    "BitextSplit",
    "StreamDecoder",
    "TokenLabelDataConfig",
    "TokenLabelSplit",
    "TokenStream",
    "Tokenizer",
    "TokenizerConfig",
    "ExampleTrainingBatches",
    "bucket_by_rows",
    "bucket_by_tokens",
    "make_text_evaluation_batches",
    "prepare_text",
    "prepare_classification",
    "prepare_listops",
    "prepare_bitext",
    "prepare_token_labels",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
