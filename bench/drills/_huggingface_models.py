"""Tiny models of `transformers` with random weights: the families, three shapes or more of each.

Shapes differ in head width (including odd multiples), head grouping and tying; other variants cover
each field that changes what a family computes. Values are settings of a config class.
"""

from typing import Any, NamedTuple

VOCAB = 51
END = 2
"""Token at which `Variant.ends` are."""


class Variant(NamedTuple):
    """One model: a class of `transformers`, and the settings of its config."""

    name: str
    config_class: str
    model_class: str
    settings: dict[str, Any]
    unused: tuple[str, ...] = ()
    """Tensors of the files that have no effect, and need not come back."""
    own_head: bool = False
    """Give the model an output matrix of its own, beside a config that ties it to the embedding."""
    ends: tuple[int, ...] = ()
    """Positions of the inputs that have the end token."""

    @property
    def is_seq2seq(self) -> bool:
        """True if the model reads a source."""
        return self.model_class.endswith(("ConditionalGeneration", "MTModel"))

    @property
    def generates(self) -> bool:
        """True for models that generate."""
        return self.is_seq2seq or self.model_class.endswith(("CausalLM", "LMHeadModel"))


LLAMA = dict(
    vocab_size=VOCAB,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
GPT2 = dict(
    vocab_size=VOCAB,
    n_embd=20,
    n_layer=2,
    n_head=4,
    n_positions=96,
    bos_token_id=None,
    eos_token_id=None,
)
NEOX = {"num_attention_heads": 3} | {
    name: value
    for name, value in LLAMA.items()
    if name not in ("num_key_value_heads", "num_attention_heads")
}
BERT = NEOX | dict(max_position_embeddings=64, pad_token_id=0)
ROBERTA = BERT | dict(pad_token_id=1, type_vocab_size=1)
MPNET = {name: value for name, value in ROBERTA.items() if name != "type_vocab_size"}
DISTILBERT = dict(
    vocab_size=VOCAB,
    dim=24,
    n_layers=2,
    n_heads=4,
    hidden_dim=40,
    max_position_embeddings=64,
    pad_token_id=0,
)
ELECTRA = BERT | dict(embedding_size=10)
T5 = dict(vocab_size=VOCAB, d_model=20, d_kv=6, d_ff=36, num_layers=2, num_heads=3)
BART = dict(
    vocab_size=VOCAB,
    d_model=20,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=2,
    encoder_ffn_dim=36,
    decoder_ffn_dim=28,
    max_position_embeddings=96,
)
PRE_NORM = dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=2)
LED = {name: value for name, value in BART.items() if name != "max_position_embeddings"} | dict(
    max_encoder_position_embeddings=64, max_decoder_position_embeddings=96, attention_window=4
)
OPT = dict(
    vocab_size=VOCAB,
    hidden_size=20,
    word_embed_proj_dim=20,
    ffn_dim=36,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=96,
)
BLOOM = dict(vocab_size=VOCAB, hidden_size=20, n_layer=2, n_head=4)
GPTJ = GPT2 | dict(rotary_dim=2)
FALCON = dict(vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=4)
NEO = dict(
    vocab_size=VOCAB,
    hidden_size=20,
    num_layers=2,
    num_heads=4,
    max_position_embeddings=96,
    window_size=5,
    attention_types=[[["global", "local"], 1]],
)
MPT = dict(vocab_size=VOCAB, d_model=20, n_layers=2, n_heads=4, max_seq_len=96)


def _decoders(
    family: str, name: str, base: dict[str, Any], **cases: dict[str, Any]
) -> list[Variant]:
    return [
        Variant(f"{family}-{case}", f"{name}Config", f"{name}ForCausalLM", base | settings)
        for case, settings in cases.items()
    ]


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **settings}}


LOCAL = {"sliding_window": 5}
LONG_ROPE = dict(
    rope_type="longrope",
    rope_theta=500.0,
    short_factor=[1.0, 1.25, 2.0],
    long_factor=[1.5, 2.0, 7.0],
)
SMOLLM3 = LLAMA | dict(num_hidden_layers=3)
GRANITE = dict(
    embedding_multiplier=6.0,
    residual_multiplier=0.22,
    attention_multiplier=0.3,
    logits_scaling=7.0,
)
OLMO3 = LLAMA | dict(sliding_window=5, num_hidden_layers=5)
QWEN_MOE = LLAMA | dict(num_experts=5, num_experts_per_tok=3, moe_intermediate_size=12)
GPT_OSS = LLAMA | dict(head_dim=6, num_local_experts=3, num_experts_per_tok=2, sliding_window=5)
MODERNBERT = NEOX | dict(
    num_hidden_layers=4,
    num_attention_heads=4,
    local_attention=6,
    pad_token_id=0,
    cls_token_id=None,
    sep_token_id=None,
)
LONGFORMER = BERT | dict(
    pad_token_id=1, sep_token_id=2, attention_window=4, type_vocab_size=1, hidden_size=24
)
BIG_BIRD = BERT | dict(attention_type="original_full", sep_token_id=2)
MARIAN = BART | dict(
    activation_function="swish",
    scale_embedding=True,
    pad_token_id=1,
    decoder_start_token_id=1,
    eos_token_id=0,
    forced_eos_token_id=0,
)
GEMMA = LLAMA | {"head_dim": 6, "tie_word_embeddings": True}
GEMMA2 = GEMMA | LOCAL | {"query_pre_attn_scalar": 9, "num_hidden_layers": 3}

VARIANTS = (
    Variant("gpt2-tied", "GPT2Config", "GPT2LMHeadModel", GPT2),
    Variant(
        "gpt2-untied",
        "GPT2Config",
        "GPT2LMHeadModel",
        GPT2 | dict(tie_word_embeddings=False, n_layer=3),
    ),
    Variant(
        "gpt2-odd-head",
        "GPT2Config",
        "GPT2LMHeadModel",
        GPT2 | dict(n_embd=21, n_head=3, n_inner=37, activation_function="relu"),
    ),
    *_decoders(
        "llama",
        "Llama",
        LLAMA,
        grouped={},
        tied=dict(tie_word_embeddings=True, num_key_value_heads=4),
        multiquery=dict(num_key_value_heads=1, num_hidden_layers=3, head_dim=10),
        biases=dict(attention_bias=True, mlp_bias=True),
        linear=_rope("linear", factor=3.0),
        llama3=_rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
        yarn=_rope("yarn", factor=4.0, original_max_position_embeddings=16),
        trained=_rope("yarn", factor=2.5, attention_factor=1.2, beta_fast=20.0, beta_slow=2.0),
    ),
    Variant(
        "llama-own-head",
        "LlamaConfig",
        "LlamaForCausalLM",
        LLAMA | dict(tie_word_embeddings=True),
        own_head=True,
    ),
    *_decoders(
        "mistral",
        "Mistral",
        LLAMA,
        window=LOCAL,
        full=dict(sliding_window=None),
        tied=LOCAL | dict(tie_word_embeddings=True, head_dim=10),
    ),
    *_decoders(
        "mixtral",
        "Mixtral",
        LLAMA,
        experts=dict(num_local_experts=3),
        top1=dict(num_local_experts=4, num_experts_per_tok=3, num_key_value_heads=1),
        tied=dict(num_local_experts=3, tie_word_embeddings=True, sliding_window=5),
    ),
    *_decoders(
        "qwen2",
        "Qwen2",
        LLAMA,
        biases={},
        tied=dict(tie_word_embeddings=True, num_key_value_heads=1),
        window=dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
        kinds=dict(
            use_sliding_window=True,
            sliding_window=5,
            layer_types=["sliding_attention", "full_attention"],
        ),
    ),
    *_decoders(
        "qwen3",
        "Qwen3",
        LLAMA,
        qknorm=dict(head_dim=6),
        tied=dict(head_dim=10, tie_word_embeddings=True),
        biases=dict(head_dim=6, attention_bias=True, num_key_value_heads=4),
    ),
    *_decoders(
        "phi3",
        "Phi3",
        LLAMA,
        fused={},
        tied=dict(tie_word_embeddings=True, num_key_value_heads=4),
        partial=dict(
            rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=0.67),
            num_key_value_heads=1,
            sliding_window=6,
        ),
    ),
    *_decoders(
        "phi3",
        "Phi3",
        LLAMA,
        short=dict(
            rope_parameters=LONG_ROPE | dict(original_max_position_embeddings=128),
            max_position_embeddings=256,
            original_max_position_embeddings=128,
        ),
        long=dict(
            rope_parameters=LONG_ROPE | dict(original_max_position_embeddings=8),
            original_max_position_embeddings=8,
            num_key_value_heads=1,
        ),
        longfactor=dict(
            rope_parameters=LONG_ROPE
            | dict(original_max_position_embeddings=8, attention_factor=1.3, long_factor=[2.0, 3.0])
            | dict(short_factor=[1.0, 1.5], partial_rotary_factor=0.67),
            original_max_position_embeddings=8,
            tie_word_embeddings=True,
        ),
    ),
    *_decoders(
        "gptoss",
        "GptOss",
        GPT_OSS,
        yarn={},
        clamped=dict(
            num_local_experts=5,
            num_experts_per_tok=3,
            swiglu_limit=0.5,
            swiglu_alpha=1.1,
            num_key_value_heads=1,
            num_hidden_layers=3,
            **_rope("default"),
        ),
        tied=dict(
            tie_word_embeddings=True,
            attention_bias=False,
            head_dim=10,
            layer_types=["full_attention", "sliding_attention"],
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16, truncate=False),
        ),
        full=dict(layer_types=["full_attention"] * 2),
    ),
    *_decoders(
        "gemma",
        "Gemma",
        GEMMA,
        scaled={},
        multiquery=dict(num_key_value_heads=1, head_dim=10),
        untied=dict(tie_word_embeddings=False),
    ),
    *_decoders(
        "gemma2",
        "Gemma2",
        GEMMA2,
        capped={},
        tight=dict(attn_logit_softcapping=2.0, final_logit_softcapping=1.5),
        wide=dict(head_dim=10, num_key_value_heads=1, attn_logit_softcapping=None),
        full=dict(layer_types=["full_attention"] * 3, final_logit_softcapping=None),
    ),
    Variant(
        "gemma3-local",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA2 | dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2),
    ),
    Variant(
        "gemma3-default",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA2 | dict(num_hidden_layers=7, num_key_value_heads=1),
    ),
    Variant(
        "gemma3-full",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA2 | dict(layer_types=["full_attention"] * 3, attention_bias=True),
    ),
    Variant(
        "gemma3-linear",
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        GEMMA2
        | dict(
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            head_dim=10,
            rope_parameters=dict(
                full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
    ),
    *_decoders(
        "starcoder2",
        "Starcoder2",
        LLAMA,
        window=LOCAL,
        untied=dict(tie_word_embeddings=False, use_bias=False, num_key_value_heads=1),
        relu=dict(hidden_act="relu", num_attention_heads=3, num_key_value_heads=3, norm_epsilon=0.1)
        | _rope("linear", factor=3.0),
    ),
    *_decoders(
        "smollm3",
        "SmolLM3",
        SMOLLM3,
        interval=dict(no_rope_layer_interval=2),
        window=dict(
            no_rope_layers=[0, 1, 1, 0],
            use_sliding_window=True,
            sliding_window=5,
            tie_word_embeddings=False,
            attention_bias=True,
        ),
        kinds=dict(
            no_rope_layers=[1, 0, 1, 1],
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            sliding_window=5,
            num_attention_heads=3,
            num_key_value_heads=1,
            mlp_bias=True,
        )
        | _rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    *_decoders(
        "granite",
        "Granite",
        LLAMA,
        factors=GRANITE,
        tied=dict(tie_word_embeddings=True, num_key_value_heads=4, attention_multiplier=0.0625),
        biases=GRANITE
        | dict(attention_bias=True, mlp_bias=True, head_dim=10, num_key_value_heads=1),
    ),
    *_decoders(
        "olmo2",
        "Olmo2",
        LLAMA,
        joint={},
        tied=dict(tie_word_embeddings=True, num_attention_heads=3, num_key_value_heads=3),
        biases=dict(attention_bias=True, num_key_value_heads=1, num_hidden_layers=3, head_dim=10)
        | _rope("linear", factor=3.0),
    ),
    *_decoders(
        "olmo3",
        "Olmo3",
        OLMO3,
        window={},
        yarn=dict(
            num_attention_heads=3,
            num_key_value_heads=1,
            layer_types=["full_attention", *["sliding_attention"] * 4],
            rope_parameters=dict(
                full_attention=dict(
                    rope_type="yarn",
                    rope_theta=500.0,
                    factor=4.0,
                    original_max_position_embeddings=16,
                ),
                sliding_attention=dict(rope_type="default", rope_theta=1e4),
            ),
        ),
        full=dict(
            layer_types=["full_attention"] * 5, tie_word_embeddings=True, attention_bias=True
        ),
    ),
    *_decoders(
        "nemotron",
        "Nemotron",
        LLAMA,
        partial=dict(head_dim=12, num_attention_heads=3, num_key_value_heads=1),
        tied=dict(tie_word_embeddings=True, hidden_act="gelu", head_dim=8),
        biases=dict(attention_bias=True, mlp_bias=True, num_hidden_layers=3)
        | _rope("default", partial_rotary_factor=1.0),
    ),
    *_decoders(
        "stablelm",
        "StableLm",
        LLAMA | {"num_attention_heads": 3, "num_key_value_heads": 3},
        partial={},
        norms=dict(qk_layernorm=True, num_attention_heads=6, num_key_value_heads=2)
        | _rope("default", partial_rotary_factor=0.5),
        parallel=dict(use_parallel_residual=True, num_hidden_layers=3),
        tied=dict(tie_word_embeddings=True, use_qkv_bias=True, layer_norm_eps=0.1)
        | _rope("default", partial_rotary_factor=1.0),
    ),
    *_decoders(
        "qwen3moe",
        "Qwen3Moe",
        QWEN_MOE,
        experts=dict(head_dim=6),
        plain=dict(
            mlp_only_layers=[0], num_hidden_layers=3, norm_topk_prob=True, num_key_value_heads=1
        ),
        window=dict(
            use_sliding_window=True,
            sliding_window=5,
            decoder_sparse_step=2,
            num_hidden_layers=4,
            attention_bias=True,
            tie_word_embeddings=True,
            head_dim=10,
        ),
    ),
    *_decoders(
        "qwen2moe",
        "Qwen2Moe",
        QWEN_MOE | {"shared_expert_intermediate_size": 18},
        shared={},
        plain=dict(
            mlp_only_layers=[1],
            num_hidden_layers=3,
            norm_topk_prob=True,
            qkv_bias=False,
            num_attention_heads=3,
            num_key_value_heads=1,
        ),
        window=dict(
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=3,
            num_hidden_layers=4,
            num_experts_per_tok=1,
            tie_word_embeddings=True,
        ),
    ),
    *_decoders(
        "exaone4",
        "Exaone4",
        LLAMA,
        window=dict(num_hidden_layers=3, sliding_window=5, sliding_window_pattern=2),
        full=dict(sliding_window=None, layer_types=["full_attention"] * 2, head_dim=10),
        tied=dict(
            tie_word_embeddings=True,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=1,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        ),
    ),
    *_decoders(
        "neox",
        "GPTNeoX",
        NEOX,
        parallel={},
        serial=dict(use_parallel_residual=False, num_hidden_layers=3),
        full=dict(
            hidden_act="gelu_new",
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters=dict(rope_type="default", rope_theta=500.0, partial_rotary_factor=1.0),
        ),
        linear=_rope("linear", factor=3.0, partial_rotary_factor=0.5),
        yarn=_rope(
            "yarn", factor=4.0, original_max_position_embeddings=16, partial_rotary_factor=0.75
        ),
    ),
    *_decoders(
        "bloom",
        "Bloom",
        BLOOM,
        alibi={},
        heads6=dict(hidden_size=30, n_head=6),
        untied=dict(tie_word_embeddings=False, n_layer=3),
    ),
    *_decoders(
        "opt",
        "OPT",
        OPT,
        tied={},
        untied=dict(tie_word_embeddings=False),
        gelu=dict(activation_function="gelu", enable_bias=False, num_attention_heads=5),
    ),
    *_decoders(
        "gptj",
        "GPTJ",
        GPTJ,
        partial={},
        tied=dict(tie_word_embeddings=True, n_embd=33, n_head=3, rotary_dim=6, n_layer=3),
        full=dict(n_embd=24, rotary_dim=6, n_inner=37, activation_function="relu"),
    ),
    *_decoders(
        "phi",
        "Phi",
        LLAMA,
        partial=dict(num_key_value_heads=None, hidden_size=32),
        normed=dict(qk_layernorm=True, tie_word_embeddings=True, hidden_size=48),
        multiquery=dict(
            num_key_value_heads=1,
            hidden_size=33,
            num_attention_heads=3,
            num_hidden_layers=3,
            hidden_act="relu",
            **_rope("linear", factor=3.0, partial_rotary_factor=0.4),
        ),
        full=dict(**_rope("default", partial_rotary_factor=1.0)),
    ),
    *_decoders(
        "falcon",
        "Falcon",
        FALCON,
        multiquery={},
        grouped=dict(
            new_decoder_architecture=True,
            num_kv_heads=2,
            bias=True,
            tie_word_embeddings=False,
            ffn_hidden_size=37,
        ),
        onenorm=dict(
            new_decoder_architecture=True,
            num_kv_heads=3,
            num_ln_in_parallel_attn=1,
            num_attention_heads=6,
            hidden_size=60,
            num_hidden_layers=3,
            **_rope("linear", factor=3.0),
        ),
        heads=dict(multi_query=False, bias=True, activation="gelu_new"),
        all=dict(new_decoder_architecture=True, num_ln_in_parallel_attn=1, num_kv_heads=1),
    ),
    *_decoders(
        "cohere",
        "Cohere",
        LLAMA,
        grouped={},
        normed=dict(use_qk_norm=True, attention_bias=True, logit_scale=0.7, hidden_size=40),
        untied=dict(
            tie_word_embeddings=False,
            num_key_value_heads=1,
            use_qk_norm=True,
            layer_norm_eps=1e-2,
            num_hidden_layers=3,
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16),
        ),
    ),
    *_decoders(
        "cohere2",
        "Cohere2",
        LLAMA | LOCAL,
        default=dict(num_hidden_layers=5),
        kinds=dict(
            layer_types=["full_attention", "sliding_attention"],
            attention_bias=True,
            logit_scale=0.7,
            hidden_size=40,
            **_rope("linear", factor=3.0),
        ),
        full=dict(
            layer_types=["full_attention"] * 2,
            tie_word_embeddings=False,
            num_key_value_heads=1,
        ),
    ),
    *_decoders(
        "gpt-neo",
        "GPTNeo",
        NEO,
        local={},
        untied=dict(
            tie_word_embeddings=False,
            num_layers=3,
            hidden_size=21,
            num_heads=3,
            attention_types=[[["local"], 2], [["global"], 1]],
            intermediate_size=37,
        ),
        full=dict(attention_types=[[["global"], 2]], activation_function="relu"),
    ),
    *_decoders(
        "mpt",
        "Mpt",
        MPT,
        alibi={},
        clipped=dict(
            attn_config=dict(clip_qkv=0.8),
            n_heads=6,
            d_model=30,
            tie_word_embeddings=False,
        ),
        odd=dict(d_model=21, n_heads=3, n_layers=3, layer_norm_epsilon=1e-2),
    ),
    *_decoders(
        "glm4",
        "Glm4",
        LLAMA | {"head_dim": 8},
        partial={},
        tied=dict(
            tie_word_embeddings=True,
            attention_bias=False,
            head_dim=12,
            num_key_value_heads=1,
            num_hidden_layers=3,
            hidden_act="gelu",
            **_rope("yarn", factor=4.0, original_max_position_embeddings=16),
        ),
        full=dict(
            head_dim=10, num_key_value_heads=4, **_rope("default", partial_rotary_factor=1.0)
        ),
    ),
    *(
        Variant(
            f"{family}-classifier",
            f"{config_name}Config",
            f"{name}ForSequenceClassification",
            base | dict(num_labels=3, pad_token_id=0),
        )
        for family, config_name, name, base in (
            ("gpt2", "GPT2", "GPT2", GPT2),
            ("llama", "Llama", "Llama", LLAMA),
            ("mistral", "Mistral", "Mistral", LLAMA | LOCAL),
            ("mixtral", "Mixtral", "Mixtral", LLAMA | dict(num_local_experts=3)),
            ("qwen2", "Qwen2", "Qwen2", LLAMA | dict(tie_word_embeddings=True)),
            ("qwen3", "Qwen3", "Qwen3", LLAMA | dict(head_dim=6)),
            ("phi3", "Phi3", "Phi3", LLAMA),
            ("gptoss", "GptOss", "GptOss", GPT_OSS),
            ("gemma", "Gemma", "Gemma", GEMMA),
            ("gemma2", "Gemma2", "Gemma2", GEMMA2),
            ("gemma3", "Gemma3Text", "Gemma3Text", GEMMA2),
            ("neox", "GPTNeoX", "GPTNeoX", NEOX),
            ("bloom", "Bloom", "Bloom", BLOOM),
            ("opt", "OPT", "OPT", OPT),
            ("starcoder2", "Starcoder2", "Starcoder2", LLAMA | LOCAL),
            ("smollm3", "SmolLM3", "SmolLM3", SMOLLM3),
            ("olmo2", "Olmo2", "Olmo2", LLAMA),
            ("olmo3", "Olmo3", "Olmo3", OLMO3),
            ("nemotron", "Nemotron", "Nemotron", LLAMA | dict(head_dim=12)),
            (
                "stablelm",
                "StableLm",
                "StableLm",
                LLAMA | dict(num_attention_heads=3, num_key_value_heads=3),
            ),
            ("qwen3moe", "Qwen3Moe", "Qwen3Moe", QWEN_MOE),
            ("qwen2moe", "Qwen2Moe", "Qwen2Moe", QWEN_MOE),
            ("exaone4", "Exaone4", "Exaone4", LLAMA | LOCAL),
            ("gptj", "GPTJ", "GPTJ", GPTJ),
            ("phi", "Phi", "Phi", LLAMA | dict(hidden_size=32)),
            ("falcon", "Falcon", "Falcon", FALCON),
            ("gptneo", "GPTNeo", "GPTNeo", NEO),
            ("mpt", "Mpt", "Mpt", MPT),
            ("glm4", "Glm4", "Glm4", LLAMA | dict(head_dim=8)),
        )
    ),
    *(
        Variant(f"{family}-answers", f"{name}Config", f"{name}ForQuestionAnswering", base)
        for family, name, base in (
            ("bert", "Bert", BERT),
            ("roberta", "Roberta", ROBERTA),
            ("xlm-roberta", "XLMRoberta", ROBERTA),
            ("camembert", "Camembert", ROBERTA),
            ("mpnet", "MPNet", MPNET),
            ("electra", "Electra", ELECTRA),
            ("distilbert", "DistilBert", DISTILBERT),
            ("modernbert", "ModernBert", MODERNBERT),
        )
    ),
    *(
        Variant(f"bert-{case}", "BertConfig", f"BertFor{kind}", BERT | settings)
        for case, kind, settings in (
            ("mlm", "MaskedLM", {}),
            (
                "odd-head",
                "MaskedLM",
                dict(hidden_size=21, num_attention_heads=3, num_hidden_layers=3),
            ),
            ("types", "MaskedLM", dict(type_vocab_size=3, hidden_act="gelu_new")),
            ("classifier", "SequenceClassification", dict(num_labels=3)),
            ("tagger", "TokenClassification", dict(num_labels=5)),
        )
    ),
    *(
        Variant(
            f"roberta-{case}",
            "RobertaConfig",
            f"RobertaFor{kind}",
            ROBERTA | settings,
        )
        for case, kind, settings in (
            ("mlm", "MaskedLM", {}),
            ("odd-head", "MaskedLM", dict(hidden_size=21, num_attention_heads=3)),
            ("classifier", "SequenceClassification", dict(num_labels=3)),
        )
    ),
    *(
        Variant(f"{family}-{case}", f"{name}Config", f"{name}For{kind}", ROBERTA | settings)
        for family, name in (("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert"))
        for case, kind, settings in (
            ("mlm", "MaskedLM", {}),
            ("odd-head", "MaskedLM", dict(hidden_size=21, hidden_act="relu", num_hidden_layers=3)),
            ("classifier", "SequenceClassification", dict(num_labels=3, type_vocab_size=2)),
        )
    ),
    *(
        Variant(f"mpnet-{case}", "MPNetConfig", f"MPNetFor{kind}", MPNET | settings)
        for case, kind, settings in (
            ("mlm", "MaskedLM", {}),
            ("odd-head", "MaskedLM", dict(hidden_size=21, hidden_act="relu", num_hidden_layers=3)),
            ("classifier", "SequenceClassification", dict(num_labels=3)),
            ("tagger", "TokenClassification", dict(num_labels=5, layer_norm_eps=1e-2)),
        )
    ),
    *(
        Variant(f"albert-{case}", "AlbertConfig", f"AlbertFor{kind}", ELECTRA | settings, unused)
        for case, kind, unused, settings in (
            ("mlm", "MaskedLM", (), dict(num_hidden_layers=3)),
            (
                "wide",
                "MaskedLM",
                (),
                dict(hidden_size=21, num_attention_heads=3, embedding_size=34),
            ),
            ("equal", "MaskedLM", (), dict(embedding_size=24, hidden_act="relu")),
            ("untied", "MaskedLM", ("predictions.bias",), dict(tie_word_embeddings=False)),
            ("tagger", "TokenClassification", (), dict(num_labels=5)),
            ("classifier", "SequenceClassification", (), dict(num_labels=3)),
            ("answers", "QuestionAnswering", (), {}),
        )
    ),
    *(
        Variant(f"electra-{case}", "ElectraConfig", f"ElectraFor{kind}", ELECTRA | settings)
        for case, kind, settings in (
            ("mlm", "MaskedLM", {}),
            ("wide", "MaskedLM", dict(hidden_size=21, num_attention_heads=3, embedding_size=34)),
            ("equal", "MaskedLM", dict(embedding_size=24, hidden_act="relu", type_vocab_size=3)),
            ("untied", "MaskedLM", dict(tie_word_embeddings=False)),
            ("tagger", "TokenClassification", dict(num_labels=5)),
            ("classifier", "SequenceClassification", dict(num_labels=3, hidden_act="relu")),
        )
    ),
    Variant(
        "mpnet-untied",
        "MPNetConfig",
        "MPNetForMaskedLM",
        MPNET | dict(tie_word_embeddings=False),
        ("lm_head.bias",),
    ),
    Variant(
        "bert-untied",
        "BertConfig",
        "BertForMaskedLM",
        BERT | dict(tie_word_embeddings=False, hidden_act="relu"),
        ("cls.predictions.bias",),
    ),
    Variant(
        "bert-own-head",
        "BertConfig",
        "BertForMaskedLM",
        BERT,
        ("cls.predictions.bias", "cls.predictions.decoder.bias"),
        own_head=True,
    ),
    Variant(
        "roberta-untied",
        "RobertaConfig",
        "RobertaForMaskedLM",
        BERT | dict(pad_token_id=1, tie_word_embeddings=False),
        ("lm_head.bias",),
    ),
    *(
        Variant(
            f"modernbert-{case}", "ModernBertConfig", "ModernBertForMaskedLM", MODERNBERT | settings
        )
        for case, settings in (
            ("local", {}),
            (
                "biases",
                dict(
                    num_attention_heads=2,
                    num_hidden_layers=7,
                    norm_bias=True,
                    attention_bias=True,
                    mlp_bias=True,
                    classifier_bias=True,
                    classifier_activation="silu",
                    hidden_activation="gelu_new",
                ),
            ),
            (
                "untied",
                dict(
                    hidden_size=18,
                    num_attention_heads=3,
                    num_hidden_layers=3,
                    tie_word_embeddings=False,
                    decoder_bias=False,
                    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                    rope_parameters=dict(
                        full_attention=dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                        sliding_attention=dict(rope_type="default", rope_theta=500.0),
                    ),
                ),
            ),
        )
    ),
    *(
        Variant(
            f"modernbert-{case}", "ModernBertConfig", f"ModernBertFor{kind}", MODERNBERT | settings
        )
        for case, kind, settings in (
            ("classifier", "SequenceClassification", dict(num_labels=3)),
            (
                "mean",
                "SequenceClassification",
                dict(
                    num_labels=3,
                    classifier_pooling="mean",
                    classifier_bias=True,
                    classifier_activation="silu",
                    norm_bias=True,
                ),
            ),
            ("tagger", "TokenClassification", dict(num_labels=5, classifier_activation="relu")),
        )
    ),
    *(
        Variant(
            f"longformer-{case}", "LongformerConfig", f"LongformerFor{kind}", LONGFORMER | settings
        )
        for case, kind, settings in (
            ("mlm", "MaskedLM", {}),
            (
                "odd-head",
                "MaskedLM",
                dict(
                    hidden_size=21,
                    num_attention_heads=3,
                    attention_window=[8, 4, 8],
                    num_hidden_layers=3,
                    type_vocab_size=2,
                ),
            ),
            ("classifier", "SequenceClassification", dict(num_labels=3)),
            ("tagger", "TokenClassification", dict(num_labels=5, attention_window=[8, 4])),
        )
    ),
    *(
        Variant(f"bigbird-{case}", "BigBirdConfig", f"BigBirdFor{kind}", BIG_BIRD | settings)
        for case, kind, settings in (
            ("mlm", "MaskedLM", {}),
            (
                "odd-head",
                "MaskedLM",
                dict(hidden_size=21, num_attention_heads=3, rescale_embeddings=True),
            ),
            ("biases", "MaskedLM", dict(use_bias=False, hidden_act="relu", num_hidden_layers=3)),
            ("pretraining", "PreTraining", {}),
            ("tagger", "TokenClassification", dict(num_labels=5)),
        )
    ),
    *(
        Variant(
            f"distilbert-{case}",
            "DistilBertConfig",
            f"DistilBertFor{kind}",
            DISTILBERT | settings,
        )
        for case, kind, settings in (
            ("mlm", "MaskedLM", {}),
            ("odd-head", "MaskedLM", dict(dim=21, n_heads=3, n_layers=3)),
            ("tagger", "TokenClassification", dict(num_labels=5)),
            ("classifier", "SequenceClassification", dict(num_labels=3, activation="relu")),
        )
    ),
    *(
        Variant(f"t5-{case}", "T5Config", "T5ForConditionalGeneration", T5 | settings)
        for case, settings in (
            ("relu", {}),
            (
                "silu",
                dict(
                    feed_forward_proj="gated-silu",
                    relative_attention_num_buckets=8,
                    relative_attention_max_distance=12,
                ),
            ),
        )
    ),
    Variant("t5-own-head", "T5Config", "T5ForConditionalGeneration", T5, own_head=True),
    Variant(
        "t5-gated",  # v1.1, as transformers 5 saves it: tied, with an output matrix of its own
        "T5Config",
        "T5ForConditionalGeneration",
        T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=3),
        own_head=True,
    ),
    *(
        Variant(
            f"{family}-{case}",
            f"{name}Config",
            f"{name}ForConditionalGeneration",
            T5 | settings,
            own_head=own_head,
        )
        for family, name in (("mt5", "MT5"), ("umt5", "UMT5"))
        for case, own_head, settings in (
            # As the published files: an output matrix of its own.
            ("gated", True, dict(num_decoder_layers=3, tie_word_embeddings=False)),
            ("tied", False, dict(relative_attention_num_buckets=8)),
            (
                "relu",
                False,
                dict(
                    feed_forward_proj="relu",
                    d_model=21,
                    num_heads=5,
                    relative_attention_max_distance=20,
                ),
            ),
        )
    ),
    Variant(
        "marian-untied",
        "MarianConfig",
        "MarianMTModel",
        MARIAN | dict(tie_word_embeddings=False),
        ("model.shared.weight",),
    ),
    Variant(
        "bart-scaled",
        "BartConfig",
        "BartForConditionalGeneration",
        BART | dict(tie_word_embeddings=False, scale_embedding=True, encoder_layers=3),
        ("model.shared.weight",),
    ),
    Variant(
        "bart-own-head",
        "BartConfig",
        "BartForConditionalGeneration",
        BART,
        ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
        own_head=True,
    ),
    *(
        Variant(f"marian-{case}", "MarianConfig", "MarianMTModel", MARIAN | settings)
        for case, settings in (
            ("shared", {}),
            (
                "separate",
                dict(
                    share_encoder_decoder_embeddings=False,
                    tie_word_embeddings=False,
                    vocab_size=64,
                    decoder_vocab_size=VOCAB,
                    encoder_layers=3,
                ),
            ),
            (
                "odd-width",
                dict(
                    share_encoder_decoder_embeddings=False,
                    d_model=21,
                    encoder_attention_heads=3,
                    decoder_attention_heads=7,
                    decoder_vocab_size=VOCAB,
                    scale_embedding=False,
                    activation_function="relu",
                ),
            ),
        )
    ),
    *(
        Variant(
            f"{family}-{case}",
            f"{name}Config",
            f"{name}ForConditionalGeneration",
            BART | PRE_NORM | settings,
            unused,
        )
        for family, name in (("mbart", "MBart"), ("m2m", "M2M100"), ("pegasus", "Pegasus"))
        for case, unused, settings in (
            ("plain", (), {}),
            (
                "odd-width",
                (),
                dict(
                    d_model=21,
                    encoder_attention_heads=3,
                    decoder_attention_heads=7,
                    activation_function="gelu_new",
                    scale_embedding=family != "m2m",
                ),
            ),
            (
                "untied",
                ("model.shared.weight",),
                dict(tie_word_embeddings=False, encoder_layers=3, activation_function="relu"),
            ),
        )
    ),
    *(
        Variant(f"led-{case}", "LEDConfig", "LEDForConditionalGeneration", LED | settings, unused)
        for case, unused, settings in (
            ("plain", (), {}),
            (
                "odd-width",
                (),
                dict(
                    d_model=21,
                    encoder_attention_heads=3,
                    decoder_attention_heads=7,
                    encoder_layers=3,
                    attention_window=[4, 8, 4],
                    activation_function="relu",
                ),
            ),
            (
                "untied",
                ("led.shared.weight",),
                dict(tie_word_embeddings=False, attention_window=[6, 4]),
            ),
        )
    ),
    *(
        Variant(f"bart-{case}", "BartConfig", "BartForConditionalGeneration", BART | settings)
        for case, settings in (
            ("plain", {}),
            ("relu", dict(activation_function="relu", d_model=18, encoder_attention_heads=3)),
        )
    ),
    *(
        Variant(
            f"{family}-{case}",
            f"{name}Config",
            f"{name}ForSequenceClassification",
            BART | dict(num_labels=3) | settings,
            ("model.shared.weight",) if case.endswith("untied") else (),
            ends=ends,
        )
        for family, name, case, ends, settings in (
            ("bart", "Bart", "classifier", (5, -1), {}),
            ("bart", "Bart", "classifier-untied", (-1,), dict(tie_word_embeddings=False)),
            # A language's token follows the last end token.
            ("mbart", "MBart", "classifier", (4, -2), dict(d_model=18, encoder_attention_heads=3)),
        )
    ),
)
