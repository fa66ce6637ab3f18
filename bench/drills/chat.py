"""Compare chat templates with `transformers`: rendered text, tokens, and the answers' tokens.

    python -m bench.drills.chat [--output FILE]

Templates in the style of published models (written here, from descriptions of their formats) are
rendered for conversations with and without a system message, with line ends, quotes and other
scripts, here and by `apply_chat_template` of a fast tokenizer with the same special tokens. For
templates with `{% generation %}` the mask of the assistant's tokens is compared too.

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

from train.data.chat_template import DEFAULT_TEMPLATE, ChatTemplate, encode_chat
from train.data.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]")

TEMPLATES = {
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

CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
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
    same_text = same_tokens = same_mask = count = 0
    for messages in CONVERSATIONS:
        for prompt in (False, True):
            count += 1
            options = dict(chat_template=source, add_generation_prompt=prompt)
            expected = theirs.apply_chat_template(messages, tokenize=False, **options)
            text = template.render(messages, add_generation_prompt=prompt)
            same_text += text == expected
            tokens = theirs(expected, add_special_tokens=False)["input_ids"]
            same_tokens += ours.encode_with_special_tokens(text)[0].tolist() == tokens
        if "generation %}" not in source:
            continue
        marked = theirs.apply_chat_template(
            messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
        )
        is_completion = encode_chat(ours, template.render_with_spans(messages)).is_completion
        same_mask += bool(np.array_equal(is_completion, np.array(marked["assistant_masks"], bool)))
    masks = f"{same_mask}/{len(CONVERSATIONS)}" if "generation %}" in source else "-"
    passed = same_text == same_tokens == count and masks in ("-", "3/3")
    return f"{name:26} {same_text}/{count}   {same_tokens}/{count}   {masks}" + (
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
