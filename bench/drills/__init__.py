"""Drills: faults on purpose, and comparisons with other libraries case by case."""

from bench.entries import Entry

FAULTS = (
    Entry(
        "resume",
        "Is a run that is killed 200 times and restarted equal to one that is not, bit for bit?",
        180,
        "drills.resume:drill",
    ),
    Entry(
        "damage",
        "Is a checkpoint with damaged files noticed, and the previous one restored?",
        10,
        "drills.damage:drill",
    ),
    Entry(
        "takeover",
        "Is a second process in a run's folder refused, and a killed one replaced at once?",
        15,
        "drills.takeover:drill",
    ),
    Entry(
        "goodput",
        "What does a kill every minute cost?",
        5,
        "drills.goodput:drill",
    ),
    Entry(
        "devices",
        "Does any run on eight CPU devices of two busy cores abort or hang?",
        30,
        "drills.devices:drill",
    ),
    Entry(
        "spikes",
        "Are faults of data, gradients and weights noticed within two steps? What do they cost?",
        15,
        "drills.spikes:drill",
    ),
    Entry(
        "fuzz",
        "Does each broken file, argument, number and path end in success or in a one-line error?",
        60,
        "drills.fuzz:drill",
    ),
    Entry(
        "hostile_requests",
        "Does `serve` survive large and hostile requests, and clients that leave?",
        3,
        "drills.server:drill",
    ),
    Entry(
        "plan",
        "How far is the memory that `plan` estimates from what compilers reserve?",
        90,
        "drills.plan:drill",
        "libtpu or JAX's CUDA plugin",
    ),
    Entry(
        "plan_time",
        "How far is the step time that `plan` estimates from the real one?",
        5,
        "drills.plan_time:drill",
    ),
    Entry(
        "planted_bugs",
        "Do the tests notice each of 44 planted bugs?",
        8,
        "drills.planted_bugs:drill",
    ),
    Entry(
        "mutations",
        "Which share of small faults made by machine do the nearest tests notice?",
        300,
        "drills.mutations:drill",
    ),
    Entry(
        "docs_commands",
        "Does every command and Python block of README and docs run?",
        60,
        "drills.docs_commands:drill",
    ),
    Entry(
        "notebooks",
        "Does every notebook run from top to bottom without a warning?",
        20,
        "drills.notebooks:drill",
    ),
)

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
        "drills.config_fields:drill",
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
        "drills.sentence_transformers:drill",
        "the extra hf, sentence-transformers",
    ),
    Entry(
        "peft",
        "Are LoRA adapters those of PEFT, there and back?",
        50,
        "drills.peft:drill",
        "the extra hf",
    ),
    Entry(
        "lm_eval",
        "Does lm-evaluation-harness give the same answers here, through the server, and by its hf?",
        4,
        "drills.lm_eval:drill",
        "the extras hf and lm-eval, its api, accelerate",
    ),
    Entry(
        "circle",
        "Does fine-tuning give the same losses in transformers and here, and come back?",
        3,
        "drills.circle:drill",
        "the extra hf, runs",
    ),
    Entry(
        "packed_models",
        "What do AutoGPTQ, AutoAWQ and transformers make of packed weights? (the tests' files)",
        1,
        "drills.packed_models:drill",
        "torch, transformers, the sources of AutoGPTQ and AutoAWQ",
    ),
    Entry(
        "splash",
        "What memory does the TPU's attention kernel need, compiled without a TPU?",
        1,
        "drills.splash:drill",
        "libtpu",
    ),
)
"""Comparisons with other libraries, and what the tests take from them."""

ENTRIES = (*FAULTS, *COMPARISONS)
