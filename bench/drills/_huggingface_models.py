"""Tiny models of `transformers` with random weights, and their inputs: huggingface_models.yaml."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
import yaml

Array = np.ndarray[Any, Any]

END = 2
"""Token at which `Variant.ends` are."""


class Variant(NamedTuple):
    """One model: a class of `transformers`, the settings of its config, and as the table says."""

    config_class: str
    model_class: str
    settings: dict[str, Any]
    unused: list[str]
    own_head: bool
    ends: list[int]

    @property
    def is_seq2seq(self) -> bool:
        """True if the model reads a source."""
        return self.model_class.endswith(("ConditionalGeneration", "MTModel"))

    @property
    def generates(self) -> bool:
        """True for models that generate."""
        return self.is_seq2seq or self.model_class.endswith(("CausalLM", "LMHeadModel"))

    def make_model(self) -> Any:
        """Return a model with random weights, including biases and gains."""
        torch.manual_seed(0)
        # transformers adds to the dictionaries of rotary positions.
        config = getattr(transformers, self.config_class)(**copy.deepcopy(self.settings))
        config._attn_implementation = "eager"
        model = getattr(transformers, self.model_class)(config).eval()
        with torch.no_grad():
            for parameter in filter(lambda each: each.requires_grad, model.parameters()):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.2)
            if self.own_head:
                head = model.get_output_embeddings()
                head.weight = torch.nn.Parameter(head.weight + torch.randn_like(head.weight) * 0.2)
            if self.model_class == "MarianMTModel":
                model.final_logits_bias.add_(torch.randn_like(model.final_logits_bias) * 0.2)
        return model

    def open_model(self, folder: str | Path) -> Any:
        """Return the model in a folder, as transformers reads it."""
        model_class = getattr(transformers, self.model_class)
        return model_class.from_pretrained(folder, attn_implementation="eager").eval()

    def draw_inputs(self) -> tuple[tuple[Array, ...], dict[str, Any]]:
        """Return random inputs, [source [B, S],] tokens [B, T], and the same for transformers."""
        draw = np.random.RandomState(0)
        source, tokens = (draw.randint(3, 51, (2, length)) for length in (11, 14))
        arrays = (source, tokens) if self.is_seq2seq else (tokens,)
        if self.ends:
            tokens[:, self.ends] = END
        names = ("input_ids", "decoder_input_ids")
        tensors = {name: torch.tensor(each) for name, each in zip(names, arrays, strict=False)}
        if self.config_class in ("LongformerConfig", "LEDConfig"):
            # The first token is global, as the imported configs say.
            is_first = torch.arange(arrays[0].shape[1]) == 0
            tensors["global_attention_mask"] = is_first.expand(2, -1).int()
        return arrays, tensors


def _read_variant(
    model: str,
    head: str = "ForConditionalGeneration",
    config: str = "",
    unused: list[str] | None = None,
    own_head: bool = False,
    ends: list[int] | None = None,
    **settings: Any,
) -> Variant:
    return Variant(
        config or f"{model}Config", model + head, settings, unused or [], own_head, ends or []
    )


def read_variants() -> tuple[dict[str, Variant], dict[str, Variant]]:
    """Return the models of text, `family-case`, and those that also see."""
    path = Path(__file__).with_name("huggingface_models.yaml")
    table = yaml.safe_load(path.read_text("utf-8"))
    models = {
        f"{family}-{case}": _read_variant(**cases["base"] | changes)
        for family, cases in table["models"].items()
        for case, changes in cases.items()
        if case != "base"
    }
    return models, {name: _read_variant(**each) for name, each in table["multimodal"].items()}


VARIANTS, MULTIMODAL = read_variants()


def logits_of(output: Any) -> Any:
    """Return the logits of an output of transformers; those of tokens where there are others."""
    if "start_logits" in output:
        return torch.stack([output["start_logits"], output["end_logits"]], dim=-1)
    return output["prediction_logits" if "prediction_logits" in output else "logits"]


def difference(actual: Any, reference: Array) -> float:
    """Return max |actual - reference| / max(1, max |reference|)."""
    gap = np.abs(np.asarray(actual) - reference).max()
    return float(gap / max(1, np.abs(reference).max()))
