"""Fields of config.json that `transformers` 5.23.0 reads, by `model_type`.

Written by `python -m bench.drills.config_fields --write`; not edited by hand.
"""

from typing import Any, NamedTuple


class ConfigFields(NamedTuple):
    """What `transformers` knows of the config.json of one type."""

    defaults: dict[str, Any]
    """Fields with their defaults. None also stands for a default that other fields decide."""
    unread: frozenset[str]
    """Fields that the configuration declares, and that no code reads."""
    aliases: dict[str, str]
    """Other names of fields. A value under the other name wins."""
    classes: frozenset[str]
    """Classes that hold a body of the type."""


# fmt: off
GENERATION = frozenset([
            "assistant_confidence_threshold", "assistant_lookbehind", "bad_words_ids",
            "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
            "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff",
            "eta_cutoff", "exponential_decay_length_penalty", "forced_bos_token_id",
            "forced_eos_token_id", "length_penalty", "max_length", "min_length",
            "no_repeat_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
            "num_beam_groups", "num_beams", "num_return_sequences", "output_scores",
            "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
            "suppress_tokens", "target_lookbehind", "temperature", "top_k", "top_p", "typical_p",
            "use_cache"
        ])
"""Settings of generation, which a config.json of earlier versions may have."""

COMMON = GENERATION | frozenset([
            "_commit_hash", "_name_or_path", "architectures", "attn_implementation",
            "chunk_size_feed_forward", "dtype", "experts_implementation", "id2label",
            "is_encoder_decoder", "label2id", "model_type", "name_or_path", "num_labels",
            "output_attentions", "output_hidden_states", "problem_type", "return_dict",
            "rope_scaling", "rope_theta", "torch_dtype", "transformers_version"
        ])
"""Fields of all configurations, and of generation."""

CONFIG_FIELDS = {
    "gpt2": ConfigFields(
        defaults={
            "activation_function": "gelu_new", "add_cross_attention": False,
            "attention_chunk_size": None, "attn_pdrop": 0.1, "bos_token_id": 50256,
            "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02, "is_causal": True,
            "kv_sharing_modes": None, "layer_norm_epsilon": 1e-05, "layer_types": None,
            "n_embd": 768, "n_head": 12, "n_inner": None, "n_layer": 12, "n_positions": 1024,
            "pad_token_id": None, "per_layer_config": None, "reorder_and_upcast_attn": False,
            "resid_pdrop": 0.1, "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weights": True, "sliding_window": None, "summary_activation": None,
            "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
            "summary_type": "cls_index", "summary_use_proj": True, "tie_word_embeddings": True,
            "vocab_size": 50257
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id",
            "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
            "summary_type", "summary_use_proj"
        ]),
        aliases={
            "hidden_size": "n_embd", "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"
        },
        classes=frozenset([
            "GPT2DoubleHeadsModel", "GPT2ForQuestionAnswering", "GPT2ForSequenceClassification",
            "GPT2ForTokenClassification", "GPT2LMHeadModel", "GPT2Model"
        ]),
    ),
    "llama": ConfigFields(
        defaults={
            "attention_bias": False, "attention_chunk_size": None, "attention_dropout": 0.0,
            "bos_token_id": 1, "eos_token_id": 2, "head_dim": None, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "is_causal": True, "kv_sharing_modes": None, "layer_types": None,
            "max_position_embeddings": 2048, "mlp_bias": False, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": None, "pad_token_id": None,
            "partial_rotary_factor": None, "per_layer_config": None, "pretraining_tp": 1,
            "rms_norm_eps": 1e-06, "rope_parameters": None, "rope_scaling": None,
            "rope_theta": 10000.0, "sliding_window": None, "tie_word_embeddings": False,
            "vocab_size": 32000
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range", "pretraining_tp"
        ]),
        aliases={},
        classes=frozenset([
            "LlamaForCausalLM", "LlamaForQuestionAnswering", "LlamaForSequenceClassification",
            "LlamaForTokenClassification", "LlamaModel"
        ]),
    ),
    "mistral": ConfigFields(
        defaults={
            "attention_chunk_size": None, "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "head_dim": None, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336, "is_causal": True,
            "kv_sharing_modes": None, "layer_types": None, "max_position_embeddings": 131072,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "pad_token_id": None, "partial_rotary_factor": None, "per_layer_config": None,
            "rms_norm_eps": 1e-06, "rope_parameters": None, "rope_scaling": None,
            "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
            "vocab_size": 32000
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range"
        ]),
        aliases={},
        classes=frozenset([
            "MistralForCausalLM", "MistralForQuestionAnswering",
            "MistralForSequenceClassification", "MistralForTokenClassification", "MistralModel"
        ]),
    ),
    "mixtral": ConfigFields(
        defaults={
            "attention_chunk_size": None, "attention_dropout": 0.0, "bos_token_id": 1,
            "eos_token_id": 2, "head_dim": None, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336, "is_causal": True,
            "kv_sharing_modes": None, "layer_types": None, "max_position_embeddings": 131072,
            "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": False,
            "pad_token_id": None, "partial_rotary_factor": None, "per_layer_config": None,
            "rms_norm_eps": 1e-05, "rope_parameters": None, "rope_scaling": None,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0,
            "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range"
        ]),
        aliases={
            "num_experts": "num_local_experts"
        },
        classes=frozenset([
            "MixtralForCausalLM", "MixtralForQuestionAnswering",
            "MixtralForSequenceClassification", "MixtralForTokenClassification", "MixtralModel"
        ]),
    ),
    "qwen2": ConfigFields(
        defaults={
            "attention_chunk_size": None, "attention_dropout": 0.0, "bos_token_id": None,
            "eos_token_id": None, "head_dim": None, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 22016, "is_causal": True,
            "kv_sharing_modes": None, "layer_types": None, "max_position_embeddings": 32768,
            "max_window_layers": 28, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 32, "pad_token_id": None, "partial_rotary_factor": None,
            "per_layer_config": None, "rms_norm_eps": 1e-06, "rope_parameters": None,
            "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 4096,
            "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range"
        ]),
        aliases={},
        classes=frozenset([
            "Qwen2ForCausalLM", "Qwen2ForQuestionAnswering", "Qwen2ForSequenceClassification",
            "Qwen2ForTokenClassification", "Qwen2Model"
        ]),
    ),
    "qwen3": ConfigFields(
        defaults={
            "attention_bias": False, "attention_chunk_size": None, "attention_dropout": 0.0,
            "bos_token_id": None, "eos_token_id": None, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 22016,
            "is_causal": True, "kv_sharing_modes": None, "layer_types": None,
            "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": None,
            "partial_rotary_factor": None, "per_layer_config": None, "rms_norm_eps": 1e-06,
            "rope_parameters": None, "rope_scaling": None, "rope_theta": 10000.0,
            "sliding_window": 4096, "tie_word_embeddings": False, "use_sliding_window": False,
            "vocab_size": 151936
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range"
        ]),
        aliases={},
        classes=frozenset([
            "Qwen3ForCausalLM", "Qwen3ForQuestionAnswering", "Qwen3ForSequenceClassification",
            "Qwen3ForTokenClassification", "Qwen3Model"
        ]),
    ),
    "phi3": ConfigFields(
        defaults={
            "attention_chunk_size": None, "attention_dropout": 0.0, "bos_token_id": 1,
            "embd_pdrop": 0.0, "eos_token_id": 32000, "head_dim": None, "hidden_act": "silu",
            "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
            "is_causal": True, "kv_sharing_modes": None, "layer_types": None,
            "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": None, "original_max_position_embeddings": 4096,
            "pad_token_id": 32000, "partial_rotary_factor": 1.0, "per_layer_config": None,
            "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_parameters": None,
            "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": None,
            "tie_word_embeddings": False, "vocab_size": 32064
        },
        unread=frozenset([
            "bos_token_id", "embd_pdrop", "eos_token_id", "initializer_range"
        ]),
        aliases={},
        classes=frozenset([
            "Phi3ForCausalLM", "Phi3ForSequenceClassification", "Phi3ForTokenClassification",
            "Phi3Model"
        ]),
    ),
    "gpt_oss": ConfigFields(
        defaults={
            "attention_bias": True, "attention_chunk_size": None, "attention_dropout": 0.0,
            "bos_token_id": None, "eos_token_id": None, "head_dim": 64, "hidden_act": "silu",
            "hidden_size": 2880, "initializer_range": 0.02, "intermediate_size": 2880,
            "is_causal": True, "kv_sharing_modes": None, "layer_types": None,
            "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
            "num_hidden_layers": 36, "num_key_value_heads": 8, "num_local_experts": 128,
            "output_router_logits": False, "pad_token_id": None, "partial_rotary_factor": None,
            "per_layer_config": None, "rms_norm_eps": 1e-05, "rope_parameters": None,
            "rope_scaling": None, "rope_theta": 150000.0, "router_aux_loss_coef": 0.001,
            "sliding_window": 128, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
            "tie_word_embeddings": False, "vocab_size": 201088
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "hidden_act", "initializer_range"
        ]),
        aliases={
            "num_experts": "num_local_experts"
        },
        classes=frozenset([
            "GptOssForCausalLM", "GptOssForSequenceClassification", "GptOssForTokenClassification",
            "GptOssModel"
        ]),
    ),
    "gemma": ConfigFields(
        defaults={
            "attention_bias": False, "attention_chunk_size": None, "attention_dropout": 0.0,
            "bos_token_id": 2, "eos_token_id": 1, "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "initializer_range": 0.02,
            "intermediate_size": 24576, "is_causal": True, "kv_sharing_modes": None,
            "layer_types": None, "max_position_embeddings": 8192, "num_attention_heads": 16,
            "num_hidden_layers": 28, "num_key_value_heads": 16, "pad_token_id": 0,
            "partial_rotary_factor": None, "per_layer_config": None, "rms_norm_eps": 1e-06,
            "rope_parameters": None, "rope_scaling": None, "rope_theta": 10000.0,
            "sliding_window": None, "tie_word_embeddings": True,
            "use_bidirectional_attention": None, "vocab_size": 256000
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range"
        ]),
        aliases={},
        classes=frozenset([
            "GemmaForCausalLM", "GemmaForSequenceClassification", "GemmaForTokenClassification",
            "GemmaModel"
        ]),
    ),
    "gemma2": ConfigFields(
        defaults={
            "attention_bias": False, "attention_chunk_size": None, "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0, "bos_token_id": 2, "eos_token_id": 1,
            "final_logit_softcapping": 30.0, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
            "initializer_range": 0.02, "intermediate_size": 9216, "is_causal": True,
            "kv_sharing_modes": None, "layer_types": None, "max_position_embeddings": 8192,
            "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
            "pad_token_id": 0, "partial_rotary_factor": None, "per_layer_config": None,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_parameters": None,
            "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 4096,
            "tie_word_embeddings": True, "use_bidirectional_attention": None, "vocab_size": 256000
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range"
        ]),
        aliases={},
        classes=frozenset([
            "Gemma2ForCausalLM", "Gemma2ForSequenceClassification", "Gemma2ForTokenClassification",
            "Gemma2Model"
        ]),
    ),
    "gemma3_text": ConfigFields(
        defaults={
            "attention_bias": False, "attention_chunk_size": None, "attention_dropout": 0.0,
            "attn_logit_softcapping": None, "bos_token_id": 2, "eos_token_id": 1,
            "final_logit_softcapping": None, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304,
            "initializer_range": 0.02, "intermediate_size": 9216, "is_causal": True,
            "kv_sharing_modes": None, "layer_types": None, "max_position_embeddings": 131072,
            "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
            "pad_token_id": 0, "per_layer_config": None, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000.0, "rope_parameters": None,
            "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 4096,
            "sliding_window_pattern": 6, "tie_word_embeddings": True,
            "use_bidirectional_attention": False, "vocab_size": 262208
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range"
        ]),
        aliases={},
        classes=frozenset([
            "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification", "Gemma3TextModel"
        ]),
    ),
    "gpt_neox": ConfigFields(
        defaults={
            "attention_bias": True, "attention_chunk_size": None, "attention_dropout": 0.0,
            "bos_token_id": 0, "classifier_dropout": 0.1, "eos_token_id": 2, "head_dim": None,
            "hidden_act": "gelu", "hidden_dropout": 0.0, "hidden_size": 6144,
            "initializer_range": 0.02, "intermediate_size": 24576, "is_causal": True,
            "is_decoder": False, "kv_sharing_modes": None, "layer_norm_eps": 1e-05,
            "layer_types": None, "max_position_embeddings": 2048, "num_attention_heads": 64,
            "num_hidden_layers": 44, "pad_token_id": None, "per_layer_config": None,
            "rope_parameters": None, "rope_scaling": None, "rotary_emb_base": 10000.0,
            "rotary_pct": 0.25, "sliding_window": None, "tie_word_embeddings": False,
            "use_parallel_residual": True, "vocab_size": 50432
        },
        unread=frozenset([
            "bos_token_id", "classifier_dropout", "eos_token_id", "initializer_range",
            "is_decoder", "pad_token_id"
        ]),
        aliases={},
        classes=frozenset([
            "GPTNeoXForCausalLM", "GPTNeoXForQuestionAnswering",
            "GPTNeoXForSequenceClassification", "GPTNeoXForTokenClassification", "GPTNeoXModel"
        ]),
    ),
    "bloom": ConfigFields(
        defaults={
            "apply_residual_connection_post_layernorm": False, "attention_chunk_size": None,
            "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
            "hidden_size": 64, "initializer_range": 0.02, "is_causal": True,
            "kv_sharing_modes": None, "layer_norm_epsilon": 1e-05, "layer_types": None,
            "n_embed": None, "n_head": 8, "n_layer": 2, "output_hidden_states": False,
            "pad_token_id": None, "per_layer_config": None, "pretraining_tp": 1,
            "return_dict": True, "sliding_window": None, "slow_but_exact": False,
            "tie_word_embeddings": True, "use_cache": True, "vocab_size": 250880
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range", "pad_token_id"
        ]),
        aliases={
            "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"
        },
        classes=frozenset([
            "BloomForCausalLM", "BloomForQuestionAnswering", "BloomForSequenceClassification",
            "BloomForTokenClassification", "BloomModel"
        ]),
    ),
    "opt": ConfigFields(
        defaults={
            "_remove_final_layer_norm": False, "activation_function": "relu",
            "attention_chunk_size": None, "attention_dropout": 0.0, "bos_token_id": 2,
            "do_layer_norm_before": True, "dropout": 0.1, "enable_bias": True, "eos_token_id": 2,
            "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "is_causal": True,
            "kv_sharing_modes": None, "layer_norm_elementwise_affine": True, "layer_types": None,
            "layerdrop": 0.0, "max_position_embeddings": 2048, "num_attention_heads": 12,
            "num_hidden_layers": 12, "pad_token_id": 1, "per_layer_config": None,
            "sliding_window": None, "tie_word_embeddings": True, "vocab_size": 50272,
            "word_embed_proj_dim": None
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "init_std"
        ]),
        aliases={},
        classes=frozenset([
            "OPTDecoder", "OPTForCausalLM", "OPTForQuestionAnswering",
            "OPTForSequenceClassification", "OPTModel"
        ]),
    ),
    "bert": ConfigFields(
        defaults={
            "add_cross_attention": False, "attention_chunk_size": None,
            "attention_probs_dropout_prob": 0.1, "bos_token_id": None,
            "chunk_size_feed_forward": 0, "classifier_dropout": None, "eos_token_id": None,
            "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
            "initializer_range": 0.02, "intermediate_size": 3072, "is_causal": True,
            "is_decoder": False, "is_encoder_decoder": False, "kv_sharing_modes": None,
            "layer_norm_eps": 1e-12, "layer_types": None, "max_position_embeddings": 512,
            "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0,
            "per_layer_config": None, "problem_type": None, "sliding_window": None,
            "tie_word_embeddings": True, "type_vocab_size": 2, "use_cache": True,
            "vocab_size": 30522
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range"
        ]),
        aliases={},
        classes=frozenset([
            "BertForMaskedLM", "BertForMultipleChoice", "BertForNextSentencePrediction",
            "BertForPreTraining", "BertForQuestionAnswering", "BertForSequenceClassification",
            "BertForTokenClassification", "BertLMHeadModel", "BertModel"
        ]),
    ),
    "roberta": ConfigFields(
        defaults={
            "add_cross_attention": False, "attention_chunk_size": None,
            "attention_probs_dropout_prob": 0.1, "bos_token_id": 0, "chunk_size_feed_forward": 0,
            "classifier_dropout": None, "eos_token_id": 2, "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
            "intermediate_size": 3072, "is_causal": True, "is_decoder": False,
            "is_encoder_decoder": False, "kv_sharing_modes": None, "layer_norm_eps": 1e-12,
            "layer_types": None, "max_position_embeddings": 512, "num_attention_heads": 12,
            "num_hidden_layers": 12, "pad_token_id": 1, "per_layer_config": None,
            "problem_type": None, "sliding_window": None, "tie_word_embeddings": True,
            "type_vocab_size": 2, "use_cache": True, "vocab_size": 50265
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range"
        ]),
        aliases={},
        classes=frozenset([
            "RobertaForCausalLM", "RobertaForMaskedLM", "RobertaForMultipleChoice",
            "RobertaForQuestionAnswering", "RobertaForSequenceClassification",
            "RobertaForTokenClassification", "RobertaModel"
        ]),
    ),
    "distilbert": ConfigFields(
        defaults={
            "activation": "gelu", "attention_dropout": 0.1, "bos_token_id": None,
            "chunk_size_feed_forward": 0, "dim": 768, "dropout": 0.1, "eos_token_id": None,
            "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
            "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "per_layer_config": None,
            "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False,
            "tie_word_embeddings": True, "vocab_size": 30522
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range", "qa_dropout",
            "seq_classif_dropout"
        ]),
        aliases={
            "hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"
        },
        classes=frozenset([
            "DistilBertForMaskedLM", "DistilBertForMultipleChoice",
            "DistilBertForQuestionAnswering", "DistilBertForSequenceClassification",
            "DistilBertForTokenClassification", "DistilBertModel"
        ]),
    ),
    "modernbert": ConfigFields(
        defaults={
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281,
            "classifier_activation": "gelu", "classifier_bias": False, "classifier_dropout": 0.0,
            "classifier_pooling": "cls", "cls_token_id": 50281, "decoder_bias": True,
            "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282,
            "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "head_dim": None,
            "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0,
            "initializer_range": 0.02, "intermediate_size": 1152, "layer_types": None,
            "local_attention": 128, "local_rope_theta": 10000.0, "max_position_embeddings": 8192,
            "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False, "norm_eps": 1e-05,
            "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283,
            "per_layer_config": None, "rope_parameters": None, "rope_scaling": None,
            "sep_token_id": 50282, "sliding_window": None, "sparse_pred_ignore_index": -100,
            "sparse_prediction": False, "tie_word_embeddings": True, "vocab_size": 50368
        },
        unread=frozenset([
            "bos_token_id", "classifier_dropout", "classifier_pooling", "cls_token_id",
            "eos_token_id", "initializer_cutoff_factor", "initializer_range", "sep_token_id"
        ]),
        aliases={},
        classes=frozenset([
            "ModernBertForMaskedLM", "ModernBertForMultipleChoice",
            "ModernBertForQuestionAnswering", "ModernBertForSequenceClassification",
            "ModernBertForTokenClassification", "ModernBertModel"
        ]),
    ),
    "longformer": ConfigFields(
        defaults={
            "attention_probs_dropout_prob": 0.1, "attention_window": 512, "bos_token_id": 0,
            "chunk_size_feed_forward": 0, "eos_token_id": 2, "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
            "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
            "num_attention_heads": 12, "num_hidden_layers": 12, "onnx_export": False,
            "output_hidden_states": False, "pad_token_id": 1, "per_layer_config": None,
            "problem_type": None, "return_dict": True, "sep_token_id": 2,
            "tie_word_embeddings": True, "type_vocab_size": 2, "vocab_size": 30522
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range", "sep_token_id"
        ]),
        aliases={},
        classes=frozenset([
            "LongformerForMaskedLM", "LongformerForMultipleChoice",
            "LongformerForQuestionAnswering", "LongformerForSequenceClassification",
            "LongformerForTokenClassification", "LongformerModel"
        ]),
    ),
    "big_bird": ConfigFields(
        defaults={
            "add_cross_attention": False, "attention_chunk_size": None,
            "attention_probs_dropout_prob": 0.1, "attention_type": "block_sparse",
            "block_size": 64, "bos_token_id": 1, "chunk_size_feed_forward": 0,
            "classifier_dropout": None, "eos_token_id": 2, "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
            "intermediate_size": 3072, "is_causal": True, "is_decoder": False,
            "kv_sharing_modes": None, "layer_norm_eps": 1e-12, "layer_types": None,
            "max_position_embeddings": 4096, "num_attention_heads": 12, "num_hidden_layers": 12,
            "num_random_blocks": 3, "pad_token_id": 0, "per_layer_config": None,
            "rescale_embeddings": False, "sep_token_id": 66, "sliding_window": None,
            "tie_word_embeddings": True, "type_vocab_size": 2, "use_bias": True,
            "vocab_size": 50358
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "initializer_range", "sep_token_id"
        ]),
        aliases={},
        classes=frozenset([
            "BigBirdForCausalLM", "BigBirdForMaskedLM", "BigBirdForMultipleChoice",
            "BigBirdForPreTraining", "BigBirdForQuestionAnswering",
            "BigBirdForSequenceClassification", "BigBirdForTokenClassification", "BigBirdModel"
        ]),
    ),
    "t5": ConfigFields(
        defaults={
            "attention_chunk_size": None, "classifier_dropout": 0.0, "d_ff": 2048, "d_kv": 64,
            "d_model": 512, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "relu",
            "initializer_factor": 1.0, "is_causal": True, "is_decoder": False,
            "is_encoder_decoder": True, "kv_sharing_modes": None, "layer_norm_epsilon": 1e-06,
            "layer_types": None, "num_decoder_layers": None, "num_heads": 8, "num_layers": 6,
            "pad_token_id": 0, "per_layer_config": None, "relative_attention_max_distance": 128,
            "relative_attention_num_buckets": 32, "sliding_window": None,
            "tie_word_embeddings": None, "vocab_size": 32128
        },
        unread=frozenset([
            "classifier_dropout", "eos_token_id", "initializer_factor"
        ]),
        aliases={
            "head_dim": "d_kv", "hidden_size": "d_model", "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers"
        },
        classes=frozenset([
            "T5EncoderModel", "T5ForConditionalGeneration", "T5ForQuestionAnswering",
            "T5ForSequenceClassification", "T5ForTokenClassification", "T5Model", "T5Stack"
        ]),
    ),
    "bart": ConfigFields(
        defaults={
            "activation_dropout": 0.0, "activation_function": "gelu", "attention_chunk_size": None,
            "attention_dropout": 0.0, "bos_token_id": 0, "classifier_dropout": 0.0,
            "d_model": 1024, "decoder_attention_heads": 16, "decoder_ffn_dim": 4096,
            "decoder_layerdrop": 0.0, "decoder_layers": 12, "decoder_start_token_id": 2,
            "dropout": 0.1, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
            "encoder_layerdrop": 0.0, "encoder_layers": 12, "eos_token_id": 2, "id2label": None,
            "init_std": 0.02, "is_causal": True, "is_decoder": False, "is_encoder_decoder": True,
            "kv_sharing_modes": None, "layer_types": None, "max_position_embeddings": 1024,
            "num_labels": 3, "pad_token_id": 1, "per_layer_config": None, "scale_embedding": False,
            "sliding_window": None, "tie_word_embeddings": True, "vocab_size": 50265
        },
        unread=frozenset([
            "bos_token_id", "classifier_dropout", "eos_token_id", "init_std", "is_decoder"
        ]),
        aliases={
            "hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads",
            "num_hidden_layers": "encoder_layers"
        },
        classes=frozenset([
            "BartDecoder", "BartDecoderWrapper", "BartEncoder", "BartForCausalLM",
            "BartForConditionalGeneration", "BartForQuestionAnswering",
            "BartForSequenceClassification", "BartModel", "PretrainedBartModel"
        ]),
    ),
    "marian": ConfigFields(
        defaults={
            "activation_dropout": 0.0, "activation_function": "gelu", "attention_chunk_size": None,
            "attention_dropout": 0.0, "bos_token_id": None, "d_model": 1024,
            "decoder_attention_heads": 16, "decoder_ffn_dim": 4096, "decoder_layerdrop": 0.0,
            "decoder_layers": 12, "decoder_start_token_id": 58100, "decoder_vocab_size": None,
            "dropout": 0.1, "encoder_attention_heads": 16, "encoder_ffn_dim": 4096,
            "encoder_layerdrop": 0.0, "encoder_layers": 12, "eos_token_id": 0, "init_std": 0.02,
            "is_causal": True, "is_decoder": False, "is_encoder_decoder": True,
            "kv_sharing_modes": None, "layer_types": None, "max_position_embeddings": 1024,
            "pad_token_id": 58100, "per_layer_config": None, "scale_embedding": False,
            "share_encoder_decoder_embeddings": True, "sliding_window": None,
            "tie_word_embeddings": True, "vocab_size": 58101
        },
        unread=frozenset([
            "bos_token_id", "eos_token_id", "init_std", "is_decoder"
        ]),
        aliases={
            "hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads",
            "num_hidden_layers": "encoder_layers"
        },
        classes=frozenset([
            "MarianDecoder", "MarianDecoderWrapper", "MarianEncoder", "MarianForCausalLM",
            "MarianMTModel", "MarianModel"
        ]),
    ),
}
