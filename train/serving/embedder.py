"""Answers to requests for vectors of texts."""

import threading
from collections.abc import Callable

import numpy as np

from train.run import Run
from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom
from train.serving.requests import (
    MAX_CHARACTERS_PER_TOKEN,
    EmbeddingRequest,
    RequestError,
    as_request_errors,
    check_length,
    value_errors_as_request_errors,
)
from train.tasks.text_embeddings import choose_prompt, encode_texts, usual_config
from transformer.generation.batches import batches_of_tokens, check_fits
from transformer.models.encoder_decoder import EncoderDecoder
from transformer.models.feature_classifier import FeatureClassifier
from transformer.models.language_model import LanguageModel
from transformer.text_embeddings import embed_sequences
from transformer.validation import check_token_sequence


def is_text_encoder(run: Run) -> bool:
    """Return True for a run that is served for vectors: one stack of layers over tokens.

    A language model is one if its files say how it makes vectors. Others generate text.
    """
    if isinstance(run.model, LanguageModel):
        return run.embedding_config() is not None
    return run.tokenizer is not None and not isinstance(
        run.model, EncoderDecoder | FeatureClassifier
    )


class Embedder:
    """Computes the vectors that requests ask for, as `embed` does, one batch at a time.

    Args:
      run: A run that `is_text_encoder` accepts.
      max_prompt_tokens: Most tokens of a text.
    """

    def __init__(self, run: Run, max_prompt_tokens: int):
        self.max_prompt_tokens = max_prompt_tokens
        self._run = run
        self._config = run.embedding_config() or usual_config(run.model.config)
        self._prompt = choose_prompt(self._config)
        self._computing = threading.Lock()

    def close(self) -> bool:
        """Let no computation begin any more; return False if one is going on."""
        return self._computing.acquire(timeout=0.1)

    def encode(self, request: EmbeddingRequest) -> list[np.ndarray]:  # each [t] int32
        """Return the tokens of each text: token ids as they are, a string as `embed` reads it.

        Raises:
          RequestError: One cannot be tokenized or read by the model, or vectors of another length
            are asked for.
        """
        width = self._run.model.config.d_model
        if request.dimensions not in (None, width):
            raise RequestError(
                f"dimensions {request.dimensions}: the model's vectors have {width} numbers; leave "
                "it out",
                "dimensions",
            )
        return list(map(self._encode, request.inputs))

    def _encode(self, text: str | tuple[int, ...]) -> np.ndarray:
        config = self._run.model.config
        if isinstance(text, str):
            # Before it is tokenized.
            check_length("input", len(text) // MAX_CHARACTERS_PER_TOKEN, self.max_prompt_tokens)
            with as_request_errors("input"):
                [row] = encode_texts(
                    self._run,
                    [text],
                    self._config,
                    prompt=self._prompt,
                    is_published=self._run.folder.pretrained.exists(),
                )
        else:
            row = np.array(text, np.int64)
        check_length("input", len(row), self.max_prompt_tokens)
        with value_errors_as_request_errors():
            check_token_sequence("input", row, config.vocab_size)
            check_fits("input", row, config)
        return row

    def embed(
        self, rows: list[np.ndarray], check_client: Callable[[], None]
    ) -> np.ndarray:  # [N, D] float32
        """Return the vector of each row. `check_client` is called before each batch."""
        vectors = np.zeros((len(rows), self._run.model.config.d_model), np.float32)
        for batch, _ in batches_of_tokens([len(row) for row in rows], None):
            check_client()
            with self._computing, explain_oom(lambda: [LARGER_DEVICES_REMEDY]):
                vectors[batch] = embed_sequences(
                    self._run.model,
                    self._run.params,
                    [rows[index] for index in batch],
                    pooling=self._config.pooling,
                    normalize=self._config.normalize,
                )
        return vectors
