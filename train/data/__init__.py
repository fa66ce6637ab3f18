"""Text in, batches of tokens out.

`DataConfig` says what to read; `prepare` makes a `Corpus` of it (a `Tokenizer` and a
`TokenStream` for each split); `Batches` and `evaluation_batches` cut that into windows.

The names below are imported when they are first asked for: `train.data.config` has to be had in
milliseconds by a command line that may only be asked for help.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.data.batches import Batches
    from train.data.config import DataConfig, TokenizerConfig
    from train.data.corpus import Corpus, prepare
    from train.data.evaluation import EvaluationBatches, evaluation_batches
    from train.data.streams import TokenStream
    from train.data.tokenizer import StreamDecoder, Tokenizer
    from train.data.tokenizer_training import train_tokenizer
    from train.data.windows import Batch

_HOMES = {
    "Batch": "windows",
    "Batches": "batches",
    "Corpus": "corpus",
    "DataConfig": "config",
    "EvaluationBatches": "evaluation",
    "StreamDecoder": "tokenizer",
    "TokenStream": "streams",
    "Tokenizer": "tokenizer",
    "TokenizerConfig": "config",
    "evaluation_batches": "evaluation",
    "prepare": "corpus",
    "train_tokenizer": "tokenizer_training",
}

__all__ = [
    "Batch",
    "Batches",
    "Corpus",
    "DataConfig",
    "EvaluationBatches",
    "StreamDecoder",
    "TokenStream",
    "Tokenizer",
    "TokenizerConfig",
    "evaluation_batches",
    "prepare",
    "train_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
