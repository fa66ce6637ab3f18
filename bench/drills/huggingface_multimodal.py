"""Compare the text part of multimodal models with `transformers`: tiny models, random weights.

    python -m bench.drills.huggingface_multimodal [--only WORD] [--output FILE]
    python -m bench.drills.huggingface_multimodal --fixtures          # write the test fixtures

Each model is created by transformers and saved with both layouts of its tensors, that of the files
on the hub and that of transformers 5; both are read here. The table has the largest difference of
the logits of text (relative to max(1, largest reference)), and that of the exported text model,
opened there, from the multimodal one.

It needs torch and transformers (the extra `hf`) and no network.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import transformers

from bench.drills._huggingface_models import GEMMA2, LLAMA, VOCAB, Variant
from bench.drills._reference_table import run_drill
from bench.drills.huggingface import LOGITS, difference, make_model
from transformer.interop.pretrained import read_model, write_model

FIXTURES = Path(__file__).parents[2] / "tests" / "transformer" / "interop" / "multimodal"
IN_FIXTURES = ("gemma3", "qwen2_vl")
"""Models whose files and outputs are committed, for tests without torch."""

TOWER = dict(
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    image_size=28,
    patch_size=14,
)
QWEN_TOWER = dict(
    depth=1,
    hidden_size=8,
    intermediate_size=12,
    num_heads=2,
    out_hidden_size=LLAMA["hidden_size"],
    patch_size=4,
)


def _mrope(*sections: int, **settings: Any) -> dict[str, Any]:
    rope = dict(rope_type="default", rope_theta=500.0, mrope_section=list(sections), **settings)
    return {"rope_parameters": rope}


VARIANTS = (
    Variant(
        "gemma3",
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        dict(
            text_config=GEMMA2
            | dict(
                layer_types=["sliding_attention", "full_attention", "full_attention"],
                rope_parameters=dict(
                    full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                    sliding_attention=dict(rope_type="default", rope_theta=1e4),
                ),
            ),
            vision_config=TOWER,
            mm_tokens_per_image=4,
        ),
    ),
    Variant(
        "llava",
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        dict(
            text_config=LLAMA | dict(model_type="llama"),
            vision_config=TOWER | dict(model_type="clip_vision_model"),
        ),
    ),
    Variant(
        "llava-qwen2",
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        dict(
            text_config=LLAMA | dict(model_type="qwen2", tie_word_embeddings=True),
            vision_config=TOWER | dict(model_type="clip_vision_model"),
        ),
    ),
    Variant(
        "mistral3",
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        dict(
            text_config=LLAMA | dict(model_type="mistral", head_dim=10, sliding_window=None),
            vision_config=TOWER | dict(model_type="pixtral", head_dim=4),
            tie_word_embeddings=False,
        ),
    ),
    Variant(
        "mistral3-tied",
        "Mistral3Config",
        "Mistral3ForConditionalGeneration",
        dict(
            text_config=LLAMA | dict(model_type="mistral", sliding_window=5),
            vision_config=TOWER | dict(model_type="pixtral", head_dim=4),
        ),
    ),
    Variant(
        "qwen2_vl",
        "Qwen2VLConfig",
        "Qwen2VLForConditionalGeneration",
        dict(
            text_config=LLAMA | _mrope(1, 1, 1),
            vision_config=dict(
                depth=1, embed_dim=8, hidden_size=24, num_heads=2, mlp_ratio=2, patch_size=4
            ),
        ),
    ),
    Variant(
        "qwen2_5_vl",
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        dict(
            text_config=LLAMA
            | _mrope(1, 1, 1)
            | dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
            vision_config=QWEN_TOWER | dict(fullatt_block_indexes=[0]),
            tie_word_embeddings=True,
        ),
    ),
    Variant(
        "qwen3_vl",
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        dict(
            text_config=LLAMA | dict(head_dim=10) | _mrope(2, 2, 1, mrope_interleaved=True),
            vision_config=QWEN_TOWER
            | dict(deepstack_visual_indexes=[0], num_position_embeddings=16),
        ),
    ),
)


def draw_tokens() -> np.ndarray[Any, Any]:
    """Return random tokens [B, T]."""
    return np.random.RandomState(0).randint(3, VOCAB, (2, 14))


def logits_of(model: Any) -> np.ndarray[Any, Any]:
    """Return the logits of text under a model of transformers."""
    with torch.no_grad():
        logits: np.ndarray[Any, Any] = model(input_ids=torch.tensor(draw_tokens())).logits.numpy()
    return logits


def run_variant(variant: Variant) -> tuple[float, float, tuple[str, ...]]:
    """Return the differences of logits as read here and as exported, and the notes."""
    theirs = make_model(variant)
    expected = logits_of(theirs)
    read = []
    for of_hub in (True, False):
        with tempfile.TemporaryDirectory() as source:
            theirs.save_pretrained(source, save_original_format=of_hub)
            read.append(read_model(source))
    outputs = [
        pretrained.make_model().apply({"params": params}, draw_tokens())
        for pretrained, params in read
    ]
    differences = [difference(output.logits, expected) for output in outputs]
    pretrained, params = read[0]
    with tempfile.TemporaryDirectory() as target:
        write_model(target, pretrained.make_model(), params, family=pretrained.family.model_type)
        text_class = getattr(transformers, pretrained.architecture.name)
        reopened = text_class.from_pretrained(target, attn_implementation="eager").eval()
        return max(differences), difference(logits_of(reopened), expected), pretrained.notes


def write_fixtures(only: str) -> None:
    """Write the files and outputs of some models for the tests."""
    for variant in VARIANTS:
        if variant.name in IN_FIXTURES and only in variant.name:
            folder = FIXTURES / variant.name
            folder.mkdir(parents=True, exist_ok=True)
            model = make_model(variant)
            model.save_pretrained(folder)
            (folder / "generation_config.json").unlink(missing_ok=True)
            np.savez_compressed(
                folder / "reference.npz", tokens=draw_tokens(), logits=logits_of(model)
            )


def main() -> int:
    """Print the table; return 1 if a model does not pass."""
    versions = (
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    )
    head = [
        f"{versions}, jax {jax.__version__}, CPU, float32",
        f"{'model':14} {'logits':>8} {'exported':>8}  read as",
    ]
    return run_drill(VARIANTS, run_line, head=head, write_fixtures=write_fixtures)


def run_line(variant: Variant) -> tuple[str, bool]:
    """Compare one model; return its line, and if it passed."""
    read, exported, notes = run_variant(variant)
    line = f"{variant.name:14} {read:8.1e} {exported:8.1e}  {' / '.join(notes)}"
    return line, max(read, exported) <= LOGITS


if __name__ == "__main__":
    sys.exit(main())
