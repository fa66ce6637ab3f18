"""Races against other implementations, and profiles of our own programs."""

from bench.entries import Entry

_TORCH = "a Python with torch"
_HF = "a Python with torch and transformers"

ENTRIES = (
    Entry(
        "step",
        "How fast is a training step, beside nanoGPT, Hugging Face or its own matrix products?",
        10,
        "race.training:step",
        "nanoGPT, or a Python with torch and transformers; none for `--against products`",
    ),
    Entry(
        "shakespeare",
        "How long does a whole run take beside nanoGPT's, and what is its loss?",
        12,
        "race.training:shakespeare",
        "tiny Shakespeare, nanoGPT, " + _TORCH,
    ),
    Entry(
        "start",
        "How long is it from the start of Python to the end of the first step, beside nanoGPT?",
        3,
        "race.training:start",
        "tiny Shakespeare, nanoGPT, " + _TORCH,
    ),
    Entry(
        "data",
        "How fast is a text prepared, beside Hugging Face's tokenizers?",
        1,
        "race.data:data",
        "a text, " + _HF,
    ),
    Entry(
        "decode",
        "How fast is decoding, beside Hugging Face's generate?",
        5,
        "race.generation:decode",
        _HF,
    ),
    Entry(
        "server",
        "How fast does the server answer 1, 8 and 32 clients, beside generate of whole batches?",
        10,
        "race.generation:server",
        _HF,
    ),
    Entry(
        "small_weights",
        "What do weights in 16, 8 and 4 bits save, and what do they cost?",
        5,
        "race.generation:small_weights",
        "a run of a language model",
    ),
    Entry(
        "attention",
        "How fast is softmax attention by backend, and beside PyTorch's?",
        5,
        "race.attention:attention",
        _TORCH,
    ),
    Entry(
        "attention_costs",
        "How do time and memory of every variant of attention grow with the length?",
        45,
        "race.attention:attention_costs",
    ),
    Entry(
        "long_attention",
        "How fast is Longformer, and how much memory does BigBird take, beside Hugging Face's?",
        5,
        "race.long_attention:long_attention",
        _HF,
    ),
    Entry(
        "window_forms",
        "What do four forms of attention within a window cost? Longformer's figure",
        10,
        "race.long_attention:window_forms",
    ),
    Entry(
        "mixer_costs",
        "How many operations, sequential steps and bytes do mixers need?",
        0,
        "race.mixer_costs:mixer_costs",
    ),
    Entry(
        "hf_import",
        "How much memory and time does reading a Hugging Face model take, beside transformers?",
        3,
        "race.hf_import:hf_import",
        _HF,
    ),
    Entry(
        "precision",
        "What do bfloat16 and float16 save, and what do they cost?",
        10,
        "race.precision:precision",
    ),
    Entry(
        "attention_profile",
        "Where does the time of blockwise attention go on a CPU?",
        0,
        "race.profiles:attention_profile",
    ),
    Entry(
        "activations",
        "How long do activations and their gradients take in JAX's forms and in those for GPUs?",
        1,
        "race.profiles:activations",
    ),
    Entry(
        "compile_time",
        "How long does the compiler take for deep models, and for initial weights?",
        3,
        "race.profiles:compile_time",
    ),
    Entry(
        "on_a_gpu",
        "How fast is everything on a GPU? All measurements in one call",
        10,
        "race.gpu:on_a_gpu",
        "a GPU",
    ),
    Entry(
        "gpu_program",
        "Which kernels does a step have on a GPU, and how many bytes do they move?",
        2,
        "race.gpu:gpu_program",
        "jax[cuda13], no GPU",
    ),
    Entry(
        "release_check",
        "Does the built package train in an empty environment?",
        3,
        "race.release_check:release_check",
        "build, twine, the network",
    ),
    Entry(
        "slow_tests",
        "Which files, tests and compiled programs do the tests spend their time in?",
        10,
        "race.slow_tests:slow_tests",
    ),
)
