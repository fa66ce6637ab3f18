"""What `train.interop.lm_eval` uses of lm-evaluation-harness 0.4.13, for tests without it."""

import types
from collections.abc import Callable, Iterator
from typing import Any

Pair = tuple[list[int], list[int]]


class CacheHook:
    def add_partial(self, kind: str, request: Any, result: Any) -> None:
        pass


class TemplateLM:
    def __init__(self) -> None:
        self.cache_hook = CacheHook()

    def loglikelihood(self: Any, requests: list[Any], disable_tqdm: bool = False) -> Any:
        encoded = []
        for request in requests:
            context, continuation = request.args
            if context:
                spaces = len(context) - len(context.rstrip())
                kept = context[: len(context) - spaces]
                before = self.tok_encode(kept)
                after = self.tok_encode(context + continuation)[len(before) :]
            else:
                before = [self.prefix_token_id]
                after = self.tok_encode(continuation, add_special_tokens=False)
            encoded.append((request.args, before, after))
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)


def register_model(name: str) -> Callable[[type], type]:
    return lambda model: model


def handle_stop_sequences(until: list[str], eos: str) -> list[str]:
    return [*until, eos]


def normalize_gen_kwargs(settings: dict[str, Any], default: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"until": [], "max_gen_toks": default, "temperature": 0.0}
    given = defaults | settings
    return {"do_sample": given["temperature"] > 0} | given


def postprocess_generated_text(text: str, stop: list[str], think_end_token: None) -> str:
    for each in stop:
        text = text.split(each)[0]
    return text


def get_rolling_token_windows(
    token_list: list[int], prefix_token: int, max_seq_len: int, context_len: int
) -> Iterator[Pair]:
    assert context_len == 1
    for start in range(0, len(token_list), max_seq_len):
        end = min(start + max_seq_len, len(token_list))
        padded = [prefix_token, *token_list]
        first = max(0, end - max_seq_len) if start else 0
        yield padded[first:end], token_list[start:end]


def make_disjoint_window(pair: Pair) -> Pair:
    inputs, predicted = pair
    return inputs[: len(inputs) - (len(predicted) - 1)], predicted


def modules() -> dict[str, types.ModuleType]:
    """Return the modules of the package by name."""
    content: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.api.registry": {"register_model": register_model},
        "lm_eval.models": {},
        "lm_eval.models.utils": {
            "handle_stop_sequences": handle_stop_sequences,
            "normalize_gen_kwargs": normalize_gen_kwargs,
            "postprocess_generated_text": postprocess_generated_text,
        },
        "lm_eval.utils": {
            "get_rolling_token_windows": get_rolling_token_windows,
            "make_disjoint_window": make_disjoint_window,
        },
        "lm_eval.__main__": {"cli_evaluate": lambda: None},
    }
    made = {}
    for name, values in content.items():
        made[name] = types.ModuleType(name)
        vars(made[name]).update(values, __path__=[])
    return made
