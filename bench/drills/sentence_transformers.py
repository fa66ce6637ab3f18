"""Compare embeddings of texts with sentence-transformers: tiny models, random weights.

    python -m bench.drills.sentence_transformers [--only WORD] [--output FILE]
    python -m bench.drills.sentence_transformers --fixtures        # write the test fixtures

Each model is made of a tiny transformer, a tokenizer trained on a few sentences, a pooling and
sometimes a normalization, and saved by sentence-transformers. Its vectors of texts of many lengths,
some longer than the model reads, are compared with those of the imported run; then the run is
exported, and sentence-transformers opens that folder again.

It needs the package sentence-transformers, and no network.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import sentence_transformers
import tokenizers
import torch
import transformers
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from bench.drills._reference_table import run_drill
from train.interop.huggingface import import_model
from train.interop.huggingface_export import export_run
from train.run import load

FIXTURES = Path(__file__).parents[2] / "tests" / "train" / "sentence_transformers"
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

    name: str
    model: str
    """Start of the names of the classes of transformers."""
    settings: dict[str, Any]
    pooling: str
    normalizes: bool
    max_length: int | None
    lower_case: bool = False
    prompts: dict[str, str] = {}  # noqa: RUF012
    default_prompt: str | None = None
    is_older: bool = True
    """Write the files as earlier versions did: a field for each pooling, and `max_seq_length`."""


VARIANTS = (
    Variant("bert-mean", "Bert", SIZES, "mean", False, 20),
    Variant("bert-cls", "Bert", SIZES, "cls", True, 20, is_older=False),
    Variant("bert-max", "Bert", SIZES, "max", True, None),
    Variant("distilbert-mean", "DistilBert", DISTIL, "mean", True, None, lower_case=True),
    Variant(
        "roberta-mean",
        "Roberta",
        SIZES | {"pad_token_id": 1},
        "mean",
        True,
        24,
        prompts={"query": "query: ", "passage": "passage: "},
    ),
    Variant(
        "qwen3-last",
        "Qwen3",
        SIZES | dict(num_key_value_heads=1, head_dim=8),
        "lasttoken",
        True,
        32,
        prompts={"query": "Instruct: find\nQuery:", "document": ""},
        default_prompt="document",
    ),
    Variant(
        "modernbert-cls",
        "ModernBert",
        SIZES | dict(num_hidden_layers=3, local_attention=6, cls_token_id=2, sep_token_id=3),
        "cls",
        True,
        40,
        is_older=False,
    ),
)
IN_FIXTURES = ("bert-mean", "bert-cls", "distilbert-mean", "roberta-mean", "qwen3-last")
"""Models whose files and vectors are committed, for tests without torch."""


def make_tokenizer(variant: Variant) -> Any:
    """Return a tokenizer of the kind that such models have, trained on the texts."""
    kind = variant.model
    if kind in ("Roberta", "Qwen3"):
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        names = dict(eos_token="<|endoftext|>", pad_token="<|endoftext|>")
        special = ["<|endoftext|>"]
        if kind == "Roberta":
            names = dict(
                bos_token="<s>",
                pad_token="<pad>",
                eos_token="</s>",
                unk_token="<unk>",
                cls_token="<s>",
                sep_token="</s>",
                mask_token="<mask>",
            )
            special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
        trainer: Any = trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        frame = "<s> $A </s>" if kind == "Roberta" else "$A <|endoftext|>"
    else:
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        # Cased, so that `do_lower_case` of sentence-transformers makes a difference.
        backend.normalizer = normalizers.BertNormalizer(lowercase=kind == "Bert")
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        names = {f"{name.strip('[]').lower()}_token": name for name in special}
        trainer = trainers.WordPieceTrainer(
            vocab_size=90, special_tokens=special, show_progress=False
        )
        frame = "[CLS] $A [SEP]"
    backend.train_from_iterator([*TEXTS, *map(str.lower, TEXTS)], trainer)
    ends = [(name, backend.token_to_id(name)) for name in special if name in frame]
    backend.post_processor = processors.TemplateProcessing(single=frame, special_tokens=ends)
    # Padding on the left, as the published files of decoders have it.
    side = "left" if kind == "Qwen3" else "right"
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


def largest_difference(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference of a number."""
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)


def run_variant(variant: Variant) -> tuple[float, float]:
    """Return the largest differences of the vectors as imported and as exported."""
    with tempfile.TemporaryDirectory() as root:
        source, workdir, exported = (Path(root) / name for name in ("source", "run", "exported"))
        write_model(variant, source)
        expected = vectors_of(source, variant)
        import_model(str(source), str(workdir))
        run = load(workdir)
        found = {"plain": run.embed(TEXTS)}
        found |= {name: run.embed(TEXTS, prompt_name=name) for name in variant.prompts}
        export_run(str(workdir), str(exported))
        again = vectors_of(exported, variant)
    return largest_difference(found, expected), largest_difference(again, expected)


def write_fixtures(only: str) -> None:
    """Write the files and vectors of some models for the tests."""
    for variant in VARIANTS:
        if variant.name in IN_FIXTURES and only in variant.name:
            folder = FIXTURES / variant.name
            write_model(variant, folder)
            for name in ("README.md", "generation_config.json"):
                (folder / name).unlink(missing_ok=True)
            np.savez_compressed(
                folder / "reference.npz", texts=np.array(TEXTS), **vectors_of(folder, variant)
            )


def main() -> int:
    """Print the table; return 1 if a model does not pass."""
    versions = [
        f"{each.__name__} {each.__version__}" for each in (sentence_transformers, transformers)
    ]
    head = [
        f"{', '.join(versions)}, CPU, float32",
        f"{'model':16} {'imported':>9} {'exported':>9}",
    ]
    return run_drill(VARIANTS, run_line, head=head, write_fixtures=write_fixtures)


def run_line(variant: Variant) -> tuple[str, bool]:
    """Compare one model; return its line, and if it passed."""
    imported, exported = run_variant(variant)
    return f"{variant.name:16} {imported:9.1e} {exported:9.1e}", max(imported, exported) <= LARGEST


if __name__ == "__main__":
    sys.exit(main())
