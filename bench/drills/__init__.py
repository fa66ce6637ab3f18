"""Drills: faults on purpose, and comparisons with other libraries case by case."""

from bench.entries import Entry

FAULTS: tuple[Entry, ...] = ()

COMPARISONS = (
    Entry(
        "huggingface",
        "Do tiny models of every family compute what transformers computes, and go back?",
        60,
        "drills.huggingface:compare_models",
        "the extra hf",
    ),
    Entry(
        "huggingface_multimodal",
        "Are the text parts of models that also see read as transformers reads them?",
        1,
        "drills.huggingface:compare_multimodal",
        "the extra hf",
    ),
    Entry(
        "huggingface_defaults",
        "Has each field of a config.json that is absent, or null, the default of transformers?",
        30,
        "drills.huggingface:compare_defaults",
        "the extra hf",
    ),
    Entry(
        "config_fields",
        "Are the fields of config.json those that the code of transformers reads?",
        1,
        "drills.config_fields:main",
        "the extra hf",
    ),
    Entry(
        "tokenizer_files",
        "Are tokenizers read from the files beside a model as AutoTokenizer reads them?",
        0,
        "drills.tokenizer_files:compare_folders",
        "the extra hf, protobuf",
    ),
    Entry(
        "sentencepiece_models",
        "Do SentencePiece models of every kind give the tokens of their own package?",
        1,
        "drills.tokenizer_files:compare_sentencepiece",
        "the extra hf, WikiText-2, Multi30k",
    ),
    Entry(
        "chat_templates",
        "Are conversations rendered as by apply_chat_template?",
        0,
        "drills.tokenizer_files:compare_templates",
        "the extra hf",
    ),
    Entry(
        "sentence_transformers",
        "Are vectors of texts those of sentence-transformers, there and back?",
        1,
        "drills.sentence_transformers:main",
        "the extra hf, sentence-transformers",
    ),
    Entry(
        "peft",
        "Are LoRA adapters those of PEFT, there and back?",
        50,
        "drills.peft:main",
        "the extra hf",
    ),
    Entry(
        "lm_eval",
        "Does lm-evaluation-harness give the same answers here, through the server, and by its hf?",
        4,
        "drills.lm_eval:main",
        "the extras hf and lm-eval, its api, accelerate",
    ),
    Entry(
        "circle",
        "Does fine-tuning give the same losses in transformers and here, and come back?",
        3,
        "drills.circle:main",
        "the extra hf, runs",
    ),
    Entry(
        "packed_models",
        "What do AutoGPTQ, AutoAWQ and transformers make of packed weights? (the tests' files)",
        1,
        "drills.packed_models:main",
        "torch, transformers, the sources of AutoGPTQ and AutoAWQ",
    ),
    Entry(
        "splash",
        "What memory does the TPU's attention kernel need, compiled without a TPU?",
        1,
        "drills.splash:main",
        "libtpu",
    ),
)
"""Comparisons with other libraries, and what the tests take from them."""

ENTRIES = (*FAULTS, *COMPARISONS)
