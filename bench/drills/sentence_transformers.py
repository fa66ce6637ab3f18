"""Compare embeddings of texts with sentence-transformers: tiny models, random weights.

    python -m bench sentence_transformers [--only WORD]
    python -m bench sentence_transformers --fixtures        # write the test fixtures

Each model is made of a tiny transformer, a tokenizer trained on a few sentences, a pooling and
sometimes a normalization, and saved by sentence-transformers. Its vectors of texts of many lengths,
some longer than the model reads, are compared with those of the imported run; then the run is
exported, and sentence-transformers opens that folder again.

It needs the package sentence-transformers, and no network.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bench.drills._reference_table import (
    TESTS,
    Options,
    compare_cases,
    fixture_folders,
    train_byte_level,
    versions,
)
from train.interop.huggingface import import_model
from train.interop.huggingface_export import export_run
from train.run import load

FIXTURES = TESTS / "train" / "sentence_transformers"
LARGEST = 1e-5
"""Largest difference of a number that passes."""

TEXTS = (
    "the cat sat",
    "A dog barks at the moon.",
    "  spaces around it ",
    "MANY Capitals",
    "one",
    "a long text: " + "the dog and the cat sat on the mat and looked at the moon. " * 6,
)

SIZES = dict(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=66,
)
DISTIL = dict(dim=16, hidden_dim=24, n_layers=2, n_heads=2, max_position_embeddings=66)


class Variant(NamedTuple):
    """One model."""

    model: str
    """Start of the names of the classes of transformers."""
    settings: dict[str, Any]
    pooling: str
    normalizes: bool
    max_length: int | None
    lower_case: bool = False
    prompts: Mapping[str, str] = {}
    default_prompt: str | None = None
    is_older: bool = True
    """Write the files as earlier versions did: a field for each pooling, and `max_seq_length`."""


QUERIES = {"query": "query: ", "passage": "passage: "}
INSTRUCTIONS = {"query": "Instruct: find\nQuery:", "document": ""}
ROBERTA = SIZES | {"pad_token_id": 1}
QWEN3 = SIZES | {"num_key_value_heads": 1, "head_dim": 8}
MODERNBERT = SIZES | dict(num_hidden_layers=3, local_attention=6, cls_token_id=2, sep_token_id=3)
VARIANTS = {
    "bert-mean": Variant("Bert", SIZES, "mean", False, 20),
    "bert-cls": Variant("Bert", SIZES, "cls", True, 20, is_older=False),
    "bert-max": Variant("Bert", SIZES, "max", True, None),
    "distilbert-mean": Variant("DistilBert", DISTIL, "mean", True, None, lower_case=True),
    "roberta-mean": Variant("Roberta", ROBERTA, "mean", True, 24, prompts=QUERIES),
    "qwen3-last": Variant(
        "Qwen3", QWEN3, "lasttoken", True, 32, prompts=INSTRUCTIONS, default_prompt="document"
    ),
    "modernbert-cls": Variant("ModernBert", MODERNBERT, "cls", True, 40, is_older=False),
}


def make_tokenizer(variant: Variant) -> Any:
    """Return a tokenizer of the kind that such models have, trained on the texts."""
    texts = [*TEXTS, *map(str.lower, TEXTS)]
    if variant.model == "Qwen3":
        special, frame = ["<|endoftext|>"], "$A <|endoftext|>"
        names = dict(eos_token="<|endoftext|>", pad_token="<|endoftext|>")
        backend = train_byte_level(texts, 300, special)
    elif variant.model == "Roberta":
        special, frame = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], "<s> $A </s>"
        roles = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
        names = dict(zip(roles, special, strict=True))
        names |= dict(cls_token="<s>", sep_token="</s>")
        backend = train_byte_level(texts, 300, special)
    else:
        special, frame = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], "[CLS] $A [SEP]"
        names = {f"{name.strip('[]').lower()}_token": name for name in special}
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        # Cased, so that `do_lower_case` of sentence-transformers makes a difference.
        backend.normalizer = normalizers.BertNormalizer(lowercase=variant.model == "Bert")
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=90, special_tokens=special, show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
    ends = [(name, backend.token_to_id(name)) for name in special if name in frame]
    backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ends)
    # Padding on the left, as the published files of decoders have it.
    side = "left" if variant.model == "Qwen3" else "right"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, model_max_length=60, padding_side=side, **names
    )


def write_model(variant: Variant, folder: Path) -> None:
    """Write a model as a folder of sentence-transformers."""
    torch.manual_seed(0)
    tokenizer = make_tokenizer(variant)
    config_class = getattr(transformers, f"{variant.model}Config")
    settings = variant.settings | {"vocab_size": len(tokenizer)}
    if "pad_token_id" not in settings:
        settings["pad_token_id"] = tokenizer.pad_token_id
    body = getattr(transformers, f"{variant.model}Model")(config_class(**settings))
    with torch.no_grad():
        for parameter in body.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    with tempfile.TemporaryDirectory() as plain:
        body.save_pretrained(plain)
        tokenizer.save_pretrained(plain)
        modules: list[Any] = [Transformer(plain, max_seq_length=variant.max_length)]
        modules.append(Pooling(16, pooling_mode=variant.pooling))
        modules += [Normalize()] if variant.normalizes else []
        whole = SentenceTransformer(
            modules=modules,
            prompts=variant.prompts,
            default_prompt_name=variant.default_prompt,
            device="cpu",
        )
        whole.save(str(folder), create_model_card=False)
    if variant.is_older:
        names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
        pooling: dict[str, Any] = {
            f"pooling_mode_{name}": name.startswith(variant.pooling) for name in names
        }
        pooling["pooling_mode_mean_sqrt_len_tokens"] = False
        pooling |= {"word_embedding_dimension": 16}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling, indent=2))
        texts = {"max_seq_length": variant.max_length, "do_lower_case": variant.lower_case}
        (folder / "sentence_bert_config.json").write_text(json.dumps(texts, indent=2))


def vectors_of(folder: Path, variant: Variant) -> dict[str, Any]:
    """Return the vectors of sentence-transformers, with each prompt and without a name for one."""
    model = SentenceTransformer(str(folder), device="cpu")
    vectors = {"plain": model.encode(list(TEXTS), batch_size=4)}
    for name in variant.prompts:
        vectors[name] = model.encode(list(TEXTS), batch_size=4, prompt_name=name)
    return vectors


def compare_vectors(name: str, variant: Variant) -> tuple[str, bool]:
    """Compare the vectors of one model as imported and as exported; return its line."""
    with tempfile.TemporaryDirectory() as root:
        source, workdir, exported = (Path(root) / each for each in ("source", "run", "exported"))
        write_model(variant, source)
        expected = vectors_of(source, variant)
        import_model(str(source), str(workdir))
        run = load(workdir)
        found = {"plain": run.embed(TEXTS)}
        found |= {prompt: run.embed(TEXTS, prompt_name=prompt) for prompt in variant.prompts}
        export_run(str(workdir), str(exported))
        again = vectors_of(exported, variant)
    differences = [
        max(float(np.abs(vectors[prompt] - expected[prompt]).max()) for prompt in expected)
        for vectors in (found, again)
    ]
    return f"{name:16} {differences[0]:9.1e} {differences[1]:9.1e}", max(differences) <= LARGEST


def write_fixtures(variants: dict[str, Variant]) -> None:
    """Write the files and vectors of some models for the tests."""
    for folder, variant in fixture_folders(FIXTURES, variants):
        write_model(variant, folder)
        for name in ("README.md", "generation_config.json"):
            (folder / name).unlink(missing_ok=True)
        vectors = vectors_of(folder, variant)
        np.savez_compressed(folder / "reference.npz", texts=np.array(TEXTS), **vectors)


def drill(options: Options) -> int:
    """Print the table; return 1 if a model does not pass."""
    return compare_cases(
        options,
        VARIANTS,
        compare_vectors,
        head=[
            f"{versions('sentence_transformers', 'transformers')}, CPU, float32",
            f"{'model':16} {'imported':>9} {'exported':>9}",
        ],
        write_fixtures=write_fixtures,
    )
