"""Compare chat templates with `transformers`: rendered text, tokens, and the answers' tokens.

    python -m bench.drills.chat [--output FILE]

Templates in the style of published models (written here, from descriptions of their formats) are
rendered for conversations with and without a system message, with line ends, quotes and other
scripts, with tools, calls of them, reasoning and variables, here and by `apply_chat_template` of a
fast tokenizer with the same special tokens. For templates with `{% generation %}` the mask of the
assistant's tokens is compared too; for "tools, reasoning" it is that of the same template with
these blocks.

It needs transformers (the extra `hf`) and no network.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from train.data.chat_template import DEFAULT_TEMPLATE, NO_VARIABLES, ChatTemplate, encode_chat
from train.data.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]")

TOOLS = (
    "{%- set last = namespace(user=0) -%}"
    "{%- for message in messages if message.role == 'user' -%}"
    "{%- set last.user = messages.index(message) -%}{%- endfor -%}"
    "{%- if today -%}Today is {{ today }}. {% endif -%}"
    "{%- if tools -%}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor -%}"
    "<|im_end|>\n{% endif -%}"
    "{%- for message in messages -%}"
    "<|im_start|>{{ message.role + ((' ' + message.name) if message.name else '') }}\n"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{%- if loop.index0 > last.user and (loop.last or message.reasoning_content) -%}"
    "<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif -%}"
    "{{ message.content }}"
    "{%- for call in message.tool_calls -%}"
    "<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}</tool_call>"
    "{%- endfor -%}{{ '<|im_end|>\n' }}{% endgeneration %}"
    "{%- else -%}{{ message.content + '<|im_end|>\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"
)
"""Reasoning is written after the last question alone, and in the last turn an empty one too."""

TEMPLATES = {
    "tools, reasoning, marked": TOOLS,
    "tools, reasoning": TOOLS.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
    "default": DEFAULT_TEMPLATE,
    "chatml": (
        "{% for message in messages %}\n"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}\n"
    ),
    "chatml, marked": (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{{ '<|im_start|>assistant\\n' }}{% generation %}{{ message.content + '<|im_end|>' }}"
        "{% endgeneration %}{{ '\\n' }}{% else %}"
        "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "instruct tags": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] | trim + ' [/INST]' }}"
        "{% elif message['role'] == 'system' %}{{ message['content'] + '\\n\\n' }}"
        "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
    ),
    "namespace, loop controls": (
        "{%- set ns = namespace(turns=0) -%}\n"
        "{%- for message in messages -%}\n"
        "    {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}\n"
        "    {%- set ns.turns = ns.turns + 1 -%}\n"
        "    {{- loop.index0 ~ ':' ~ ns.turns ~ ' ' ~ message | tojson -}}\n"
        "{%- endfor -%}\n"
    ),
}

CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "  Two lines\nof <b>text</b> & 'quotes' "},
        {"role": "assistant", "content": "Grüße, 世界 🙂\n"},
    ],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "First answer."},
        {"role": "user", "content": "And two?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "{{ messages }} {% raw %}"},
        {"role": "assistant", "content": "Second answer, with <|im_end|> in it."},
    ],
)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "zwölf"}}}
WITH_TOOLS: tuple[list[dict[str, Any]], ...] = (
    [
        {"role": "user", "content": "2 + 12?", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "14", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 14.", "reasoning": "The tool said so."},
    ],
    [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1", "reasoning_content": "Counting."},
        {"role": "user", "content": "And two?"},
        {"role": "assistant", "content": "2", "thinking": "More\ncounting."},
    ],
)
"""Conversations for templates that write their fields."""

VARIABLES: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "add", "description": "a < b"}}],
    "today": "1 May",
}


def make_tokenizer(folder: Path) -> Tokenizer:
    """Write a byte-level BPE tokenizer of a few merges; return it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [each["content"] for messages in CONVERSATIONS for each in messages]
    backend.train_from_iterator(texts * 4, trainer)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}'
    )
    return Tokenizer.load(str(folder))


def compare(name: str, source: str, ours: Tokenizer, theirs: Any) -> str:
    """Return a line of the table."""
    template = ChatTemplate.of_tokenizer(ours, source)
    chats = [(messages, NO_VARIABLES) for messages in CONVERSATIONS]
    if "tools" in name:
        chats += [(messages, VARIABLES) for messages in WITH_TOOLS]
    marked_source = TOOLS if name == "tools, reasoning" else source
    has_masks = "generation %}" in marked_source
    same_text = same_tokens = same_mask = 0
    for messages, variables in chats:
        for prompt in (False, True):
            expected = theirs.apply_chat_template(
                messages,
                chat_template=source,
                tokenize=False,
                add_generation_prompt=prompt,
                **variables,
            )
            text = template.render(messages, add_generation_prompt=prompt, variables=variables)
            same_text += text == expected
            tokens = theirs(expected, add_special_tokens=False)["input_ids"]
            same_tokens += ours.encode_with_special_tokens(text)[0].tolist() == tokens
        if has_masks:
            marked = theirs.apply_chat_template(
                messages,
                chat_template=marked_source,
                return_dict=True,
                return_assistant_tokens_mask=True,
                **variables,
            )
            chat = template.render_with_spans(messages, variables=variables)
            is_completion = encode_chat(ours, chat).is_completion
            same_mask += np.array_equal(is_completion, np.array(marked["assistant_masks"], bool))
    count = len(chats)
    masks = f"{same_mask}/{count}" if has_masks else "-"
    passed = same_text == same_tokens == 2 * count and (same_mask == count or not has_masks)
    return f"{name:26} {same_text}/{2 * count:<4} {same_tokens}/{2 * count:<4} {masks}" + (
        "" if passed else "  FAILED"
    )


def main() -> int:
    """Print the table; return 1 if a template does not pass."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as name:
        ours = make_tokenizer(Path(name))
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(name)
        lines = [
            f"transformers {transformers.__version__}",
            f"{'template':26} text  tokens answers",
        ]
        lines += [compare(each, source, ours, theirs) for each, source in TEMPLATES.items()]
    print("\n".join(lines))
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")
    return int(any("FAILED" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
