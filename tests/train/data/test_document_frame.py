"""Documents between the tokens that a published tokenizer puts around a text: <s> text </s>."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tokenizers

from tests.train.data.conftest import MakeStream
from tests.transformer.formulas import random_params_like
from train.data.batches import TextEvaluationBatches
from train.data.corpus import TokenArrays, prepare_token_arrays
from train.data.data_config import SourceConfig, StreamingConfig, TextDataConfig, TokenizerConfig
from train.data.streaming import StreamedText, StreamReader
from train.data.text_files import Document
from train.data.token_file import DocumentFrame, TokenStream, Windows, read_stream, write_stream
from train.data.tokenizer import Tokenizer
from transformer import AttentionConfig, BlockConfig, Hardware, LanguageModel, TransformerConfig
from transformer.generation.log_likelihood import log_likelihoods

S, END, A, B, C = range(5)
DOCUMENTS = ("a b", "c", "a a a")
STREAM = [END, S, A, B, END, S, C, END, S, A, A, A, END]
STARTS = [1, 5, 8]


def make_tokenizer(before: str = "<s>") -> Tokenizer:
    """Return a tokenizer of three words that puts a token before and one after every text."""
    vocabulary = {"<s>": S, "</s>": END, "a": A, "b": B, "c": C}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{before} $A </s>", special_tokens=[("<s>", S), ("</s>", END)]
    )
    return Tokenizer(backend)


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    named = [Document(str(number), text) for number, text in enumerate(DOCUMENTS)]
    return read_stream(tmp_path, "train", write_stream(tmp_path, "train", named, make_tokenizer()))


def test_files_have_the_frame(stream: TokenStream) -> None:
    assert stream.tokens.tolist() == STREAM
    assert stream.document_starts.tolist() == STARTS
    assert stream.first == (S,)
    assert (stream.num_targets, stream.num_scored_targets) == (12, 9)


@pytest.mark.parametrize("framed", [False, True])
def test_token_arrays_have_the_frame_once(tmp_path: Path, framed: bool) -> None:
    own = [[A, B], [C], [A, A, A]]
    arrays = [np.array([S, *each, END] if framed else each) for each in own]
    config = TextDataConfig(tokenizer=TokenizerConfig("file", path="given"))
    splits: dict[str, TokenArrays] = {"train": arrays, "validation": arrays[:1]}
    corpus = prepare_token_arrays(config, splits, make_tokenizer())
    found = corpus.split("train")
    assert found.tokens.tolist() == STREAM
    assert found.document_starts.tolist() == STARTS
    assert found.first == (S,)


def test_streamed_documents_have_the_frame(tmp_path: Path, stream: TokenStream) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    source = SourceConfig(path=str(file), validation_path="other")
    streaming = StreamingConfig(enabled=True, validation_documents=1)
    reader = StreamReader(
        StreamedText.find("data", "text", source, streaming),
        make_tokenizer(),
        files=[0],
        seeds=(0,),
        shuffle_window=1,
        sequence_length=3,
        document_masking=True,
        max_epochs=0,
    )
    # A stream has no separator before its first document; from there on both are equal.
    expected = Windows(stream, 3, document_masking=True).cut(1 + 3 * np.arange(3))
    for name, array in reader.windows(3).items():
        assert np.array_equal(array, expected[name]), name


def test_documents_begin_with_the_frame_and_do_not_predict_it(stream: TokenStream) -> None:
    batch = Windows(stream, 8, document_masking=True).cut(np.array([0, 6, 10]))
    assert batch["tokens"].tolist() == [
        [END, S, A, B, END, S, C, END],
        [C, END, S, A, A, A, END, S],
        [A, A, END, S, A, B, END, S],  # around the end of the stream
    ]
    assert batch["segments"].tolist() == [
        [1, 2, 2, 2, 2, 3, 3, 3],
        [1, 1, 2, 2, 2, 2, 2, 3],
        [1, 1, 1, 2, 2, 2, 2, 3],
    ]
    assert batch["positions"].tolist() == [
        [0, 0, 1, 2, 3, 0, 1, 2],
        [0, 1, 0, 1, 2, 3, 4, 0],
        [0, 1, 2, 0, 1, 2, 3, 0],
    ]
    assert batch["weights"].tolist() == [
        [0, 1, 1, 1, 0, 1, 1, 0],
        [1, 0, 1, 1, 1, 1, 0, 1],
        [1, 1, 0, 1, 1, 1, 0, 1],
    ]


@pytest.mark.parametrize("stride", [0, 2])
def test_an_evaluation_counts_every_target_but_the_frame(stream: TokenStream, stride: int) -> None:
    batches = TextEvaluationBatches(
        stream, batch_size=2, sequence_length=4, document_masking=True, stride=stride
    )
    assert sum(batch["weights"].sum() for batch in batches) == stream.num_scored_targets


def test_a_start_token_that_separates_documents_is_not_repeated(make_stream: MakeStream) -> None:
    frame = DocumentFrame.of(make_tokenizer("</s>"))
    assert frame == DocumentFrame(END)
    assert frame.piece(np.array([A, B])).tolist() == [END, A, B]
    batch = Windows(make_stream([1, 2], [3]), 4, document_masking=True).cut(np.array([0]))
    assert batch["weights"].tolist() == [[1, 1, 1, 1]]


def test_loss_is_that_of_the_texts_one_by_one(stream: TokenStream) -> None:
    """A model's loss on the stream is its loss on <s> text </s>, whatever the windows."""
    block = BlockConfig(AttentionConfig(num_heads=2))
    config = TransformerConfig(vocab_size=5, d_model=16, num_layers=1, layer_pattern=(block,))
    model = LanguageModel(config, Hardware())
    shapes = jax.eval_shape(model.init, jax.random.key(0), np.zeros((1, 4), np.int32))
    params = random_params_like(shapes["params"])
    [batch] = TextEvaluationBatches(stream, batch_size=1, sequence_length=12, document_masking=True)
    places = {name: batch[name] for name in ("segments", "positions")}
    logits = jax.jit(lambda *inputs: model.apply(*inputs, **places).logits)(
        {"params": params}, batch["tokens"]
    )
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    scores = np.take_along_axis(log_probs, batch["targets"][..., None], axis=-1)[..., 0]
    rows = [np.array([S, A, B, END]), np.array([S, C, END]), np.array([S, A, A, A, END])]
    alone = log_likelihoods(model, params, rows, context_lengths=[1, 1, 1])
    total = sum(each.total for each in alone)
    np.testing.assert_allclose((scores * batch["weights"]).sum(), total, rtol=1e-5)
