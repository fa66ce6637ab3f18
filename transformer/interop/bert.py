"""Encoders with norms after the sublayers: BERT, RoBERTa, DistilBERT and what has their layout.

XLM-RoBERTa and CamemBERT are RoBERTa by other names. MPNet (Song et al. 2020) is RoBERTa with T5's
relative bias, one table for all layers. ELECTRA (Clark et al. 2020) and ALBERT (Lan et al. 2020)
have embeddings narrower than the model; all layers of ALBERT share one set of weights.

BigBird is read with full attention alone. Its sparse attention draws random blocks by NumPy's
generator while a model runs, another pattern than that of the mixer `bigbird`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

from transformer.attention.full import AttentionConfig
from transformer.attention.position_bias import T5RelativeBias
from transformer.attention.variants.longformer import LongformerConfig
from transformer.interop.family import (
    ACTIVATION,
    ACTIVATION_NAMES,
    COMMON,
    D_FF,
    Architecture,
    Family,
    Setting,
    all_blocks,
    linear,
    norm,
    self_attention,
    sizes,
    with_blocks,
    with_settings,
)
from transformer.interop.fields import Fields
from transformer.interop.weight_map import TABLE, AsIs, Weight
from transformer.layers.activations import MaskedHeadActivation
from transformer.layers.norms import NormConfig
from transformer.layers.position_embedding import LearnedPositions
from transformer.models.block import BlockConfig
from transformer.models.config import PoolerConfig, TransformerConfig

HEAD_ACTIVATIONS = {
    name: ours for name, ours in ACTIVATION_NAMES.items() if ours in get_args(MaskedHeadActivation)
}
"""Activations of layers that a masked-token head can have too."""

NORM = NormConfig(epsilon=1e-12)

BASE = TransformerConfig(
    layer_pattern=(BlockConfig(norm=NORM, norm_placement="post"),),
    position_embedding=LearnedPositions(),
    embedding_norm=NORM,
    causal=False,
    final_norm=None,
)

SETTINGS = (
    *COMMON,
    *sizes("hidden_size", "num_hidden_layers", "num_attention_heads"),
    Setting("intermediate_size", D_FF, is_size=True),
    Setting("layer_norm_eps", ("embedding_norm.epsilon", "layer_pattern.norm.epsilon")),
    Setting("type_vocab_size", "num_token_types"),
    Setting("hidden_dropout_prob", ("layer_pattern.residual_dropout", "embedding_dropout")),
    Setting("attention_probs_dropout_prob", "layer_pattern.mixer.dropout"),
)

BERT_SETTINGS = (
    *SETTINGS,
    Setting("max_position_embeddings", "position_embedding.max_length", is_size=True),
    Setting("hidden_act", (ACTIVATION, "masked_head.activation"), choices=HEAD_ACTIVATIONS),
)

ROBERTA_SETTINGS = (
    *SETTINGS,
    # Two rows come before that of position 0. The head has GELU whatever the layers have.
    Setting("max_position_embeddings", "position_embedding.max_length", is_size=True, offset=2),
    Setting("hidden_act", ACTIVATION, choices=HEAD_ACTIVATIONS),
)

EXPECTED = {"position_embedding_type": ("absolute",), "is_causal": (False,)}


def _write_bert(config: TransformerConfig) -> dict[str, Any]:
    if not config.num_token_types:
        # Their model adds a row of the table whatever its size: an empty one fails at run time.
        raise ValueError("model.num_token_types 0 (it has 1 or more)")
    return {}


def embeddings(root: str) -> tuple[Weight, ...]:
    """Return the rules of embeddings, below `root`."""
    return (
        Weight(f"{root}.embeddings.word_embeddings.weight", "embedding", TABLE),
        Weight(f"{root}.embeddings.position_embeddings.weight", "positions", TABLE),
        Weight(f"{root}.embeddings.token_type_embeddings.weight", "types", TABLE),
        *norm(f"{root}.embeddings.LayerNorm", "embedding_norm"),
    )


def feed_forward(layer: str) -> tuple[Weight, ...]:
    """Return the rules of a feed-forward, below `layer`."""
    return (
        *linear(f"{layer}.intermediate.dense", "layers/feed_forward/up"),
        *linear(f"{layer}.output.dense", "layers/feed_forward/down"),
        *norm(f"{layer}.output.LayerNorm", "layers/feed_forward_norm"),
    )


def bert_body(root: str) -> tuple[Weight, ...]:
    """Return the rules of embeddings and layers, below `root`."""
    layer = f"{root}.encoder.layer.{{layer}}"
    names = ("self.query", "self.key", "self.value", "output.dense")
    return (
        *embeddings(root),
        *self_attention(f"{layer}.attention", "layers/mixer", names),
        *norm(f"{layer}.attention.output.LayerNorm", "layers/mixer_norm"),
        *feed_forward(layer),
    )


def masked_head(dense: str, norm_name: str, root: str) -> tuple[Weight, ...]:
    """Return the rules of a masked-token head, tied or not."""
    return (
        *linear(dense, "head"),
        *norm(norm_name, "head_norm"),
        # Two names of one bias: files with an untied output matrix have both.
        Weight(f"{root}.bias", "head_output_bias"),
        Weight(f"{root}.decoder.bias", "head_output_bias", beside="output"),
        Weight(f"{root}.decoder.weight", "output"),
    )


BERT_HEAD = masked_head(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions"
)
ROBERTA_HEAD = masked_head("lm_head.dense", "lm_head.layer_norm", "lm_head")

TANH: Callable[[Any], PoolerConfig] = lambda _: PoolerConfig()  # noqa: E731

POOLED_HEAD = (*linear("classifier.dense", "pooler"), *linear("classifier.out_proj", "head"))
TAGGER_HEAD = linear("classifier", "head")


def token_classes(name: str) -> tuple[Architecture, Architecture]:
    """Return the classes with a linear layer for each token."""
    answers = linear("qa_outputs", "head")
    return (
        Architecture(f"{name}ForTokenClassification", "tagger", TAGGER_HEAD),
        Architecture(f"{name}ForQuestionAnswering", "question_answering", answers),
    )


BERT = Family(
    "bert",
    (
        Architecture("BertForMaskedLM", "masked_lm", BERT_HEAD),
        Architecture(
            "BertForSequenceClassification",
            "classifier",
            (*linear("bert.pooler.dense", "pooler"), *linear("classifier", "head")),
            pooler=TANH,
        ),
        *token_classes("Bert"),
    ),
    base=BASE,
    settings=BERT_SETTINGS,
    weights=bert_body("bert"),
    expected=EXPECTED,
    write_rest=_write_bert,
    prefix="bert.",
    # Buffers, and the heads of pretraining that these classes leave out.
    ignored=("*.position_ids", "cls.seq_relationship.*", "bert.pooler.*"),
)


def _roberta_classes(name: str) -> tuple[Architecture, ...]:
    return (
        Architecture(f"{name}ForMaskedLM", "masked_lm", ROBERTA_HEAD),
        Architecture(f"{name}ForSequenceClassification", "classifier", POOLED_HEAD, pooler=TANH),
        *token_classes(name),
    )


ROBERTA = Family(
    "roberta",
    _roberta_classes("Roberta"),
    base=with_settings(BASE, {"position_embedding.offset": 2}),
    settings=ROBERTA_SETTINGS,
    weights=bert_body("roberta"),
    expected=EXPECTED | {"pad_token_id": (1,)},
    constants={"pad_token_id": 1},
    write_rest=_write_bert,
    prefix="roberta.",
    ignored=("*.position_ids", "roberta.pooler.*"),
)

XLM_ROBERTA = dataclasses.replace(
    ROBERTA, model_type="xlm-roberta", architectures=_roberta_classes("XLMRoberta")
)
CAMEMBERT = dataclasses.replace(
    ROBERTA, model_type="camembert", architectures=_roberta_classes("Camembert")
)

# ELECTRA: the embeddings are narrower than the model.


def _read_electra(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    width = fields.size("embedding_size")
    return with_settings(config, {"embedding_dim": 0 if width == config.d_model else width})


def _write_electra(config: TransformerConfig) -> dict[str, Any]:
    return _write_bert(config) | {"embedding_size": config.embedding_width}


ELECTRA_HEAD = (
    *linear("generator_predictions.dense", "head"),
    *norm("generator_predictions.LayerNorm", "head_norm"),
    Weight("generator_lm_head.weight", "output"),
    Weight("generator_lm_head.bias", "head_output_bias"),
)

ELECTRA = dataclasses.replace(
    BERT,
    model_type="electra",
    architectures=(
        Architecture("ElectraForMaskedLM", "masked_lm", ELECTRA_HEAD),
        Architecture(
            "ElectraForSequenceClassification",
            "classifier",
            POOLED_HEAD,
            pooler=lambda _: PoolerConfig("gelu"),
        ),
        *token_classes("Electra"),
    ),
    # The head has GELU whatever the layers have.
    settings=(
        *(each for each in BERT_SETTINGS if each.theirs != "hidden_act"),
        Setting("hidden_act", ACTIVATION, choices=HEAD_ACTIVATIONS),
    ),
    weights=(
        *bert_body("electra"),
        *linear("electra.embeddings_project", "embedding_projection"),
    ),
    read_rest=_read_electra,
    write_rest=_write_electra,
    prefix="electra.",
    ignored=("*.position_ids",),
)

# ALBERT: narrow embeddings, and one layer that is applied several times.

ALBERT_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.{layer}"

ALBERT = dataclasses.replace(
    BERT,
    model_type="albert",
    architectures=(
        Architecture(
            "AlbertForMaskedLM",
            "masked_lm",
            masked_head("predictions.dense", "predictions.LayerNorm", "predictions"),
        ),
        Architecture(
            "AlbertForSequenceClassification",
            "classifier",
            (*linear("albert.pooler", "pooler"), *linear("classifier", "head")),
            pooler=TANH,
        ),
        *token_classes("Albert"),
    ),
    base=with_settings(BASE, {"share_layers": True}),
    settings=(*BERT_SETTINGS, Setting("embedding_size", "embedding_dim", is_size=True)),
    weights=(
        *embeddings("albert"),
        *linear("albert.encoder.embedding_hidden_mapping_in", "embedding_projection"),
        *self_attention(
            f"{ALBERT_LAYER}.attention", "layers/mixer", ("query", "key", "value", "dense")
        ),
        *norm(f"{ALBERT_LAYER}.attention.LayerNorm", "layers/mixer_norm"),
        *linear(f"{ALBERT_LAYER}.ffn", "layers/feed_forward/up"),
        *linear(f"{ALBERT_LAYER}.ffn_output", "layers/feed_forward/down"),
        *norm(f"{ALBERT_LAYER}.full_layer_layer_norm", "layers/feed_forward_norm"),
    ),
    expected=EXPECTED | {"num_hidden_groups": (1,), "inner_group_num": (1,)},
    constants={"num_hidden_groups": 1, "inner_group_num": 1},
    prefix="albert.",
    ignored=("*.position_ids", "albert.pooler.*", "sop_classifier.*", "predictions.*"),
)

# MPNet.

MPNET_LAYER = "mpnet.encoder.layer.{layer}"

MPNET_BUCKETS = 32
"""Buckets of relative positions: the code of transformers has this number, whatever a config
says."""

MPNET = dataclasses.replace(
    ROBERTA,
    model_type="mpnet",
    architectures=_roberta_classes("MPNet"),
    base=with_settings(
        ROBERTA.base,
        {
            "layer_pattern.mixer.position": T5RelativeBias(
                MPNET_BUCKETS, bidirectional=True, shared=True
            )
        },
    ),
    settings=tuple(each for each in ROBERTA_SETTINGS if each.theirs != "type_vocab_size"),
    weights=(
        *embeddings("mpnet"),
        Weight("mpnet.encoder.relative_attention_bias.weight", "position_bias", AsIs()),
        *self_attention(f"{MPNET_LAYER}.attention.attn", "layers/mixer", ("q", "k", "v", "o")),
        *norm(f"{MPNET_LAYER}.attention.LayerNorm", "layers/mixer_norm"),
        *feed_forward(MPNET_LAYER),
    ),
    expected={**ROBERTA.expected, "relative_attention_num_buckets": (MPNET_BUCKETS,)},
    constants={"pad_token_id": 1, "relative_attention_num_buckets": MPNET_BUCKETS},
    write_rest=None,
    prefix="mpnet.",
    ignored=("*.position_ids", "mpnet.pooler.*"),
)

DISTIL = "distilbert.transformer.layer.{layer}"

DISTILBERT = Family(
    "distilbert",
    (
        Architecture(
            "DistilBertForMaskedLM",
            "masked_lm",
            (
                *linear("vocab_transform", "head"),
                *norm("vocab_layer_norm", "head_norm"),
                Weight("vocab_projector.bias", "head_output_bias"),
                Weight("vocab_projector.weight", "output"),
            ),
        ),
        Architecture(
            "DistilBertForSequenceClassification",
            "classifier",
            (*linear("pre_classifier", "pooler"), *linear("classifier", "head")),
            pooler=lambda _: PoolerConfig("relu"),
        ),
        *token_classes("DistilBert"),
    ),
    base=BASE,
    settings=(
        *COMMON,
        *sizes("dim", "n_layers", "n_heads"),
        Setting("hidden_dim", D_FF, is_size=True),
        Setting("activation", (ACTIVATION, "masked_head.activation"), choices=HEAD_ACTIVATIONS),
        Setting("max_position_embeddings", "position_embedding.max_length", is_size=True),
        Setting("dropout", ("layer_pattern.residual_dropout", "embedding_dropout")),
        Setting("attention_dropout", "layer_pattern.mixer.dropout"),
    ),
    weights=(
        Weight("distilbert.embeddings.word_embeddings.weight", "embedding", TABLE),
        Weight("distilbert.embeddings.position_embeddings.weight", "positions", TABLE),
        *norm("distilbert.embeddings.LayerNorm", "embedding_norm"),
        *self_attention(
            f"{DISTIL}.attention", "layers/mixer", ("q_lin", "k_lin", "v_lin", "out_lin")
        ),
        *norm(f"{DISTIL}.sa_layer_norm", "layers/mixer_norm"),
        *linear(f"{DISTIL}.ffn.lin1", "layers/feed_forward/up"),
        *linear(f"{DISTIL}.ffn.lin2", "layers/feed_forward/down"),
        *norm(f"{DISTIL}.output_layer_norm", "layers/feed_forward_norm"),
    ),
    expected={"is_causal": (False,)},
    prefix="distilbert.",
    ignored=("*.position_ids",),
)


# Long inputs.


def read_one_sided_windows(fields: Fields, depth: int) -> list[int]:
    """Return the keys on each side of a query, for each layer."""
    windows = fields.take("attention_window", ())
    windows = [windows] * depth if isinstance(windows, int) else windows
    is_even = isinstance(windows, Sequence) and all(
        isinstance(window, int) and window > 0 and window % 2 == 0 for window in windows
    )
    if not is_even or len(windows) != depth:
        raise fields.unsupported("attention_window", f"{depth} even numbers, one for each layer")
    return [window // 2 for window in windows]


def _read_longformer(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    windows = read_one_sided_windows(fields, config.num_layers)
    [block] = config.layer_pattern
    return with_blocks(
        config, [with_settings(block, {"mixer.one_sided_window": window}) for window in windows]
    )


def _write_longformer(config: TransformerConfig) -> dict[str, Any]:
    mixers: list[Any] = [block.mixer for block in all_blocks(config)]
    return {"attention_window": [2 * mixer.one_sided_window for mixer in mixers]}


def global_projections(theirs: str, ours: str) -> tuple[Weight, ...]:
    """Return the rules of the projections of global tokens."""
    return tuple(
        rule
        for name in ("query", "key", "value")
        for rule in linear(f"{theirs}.{name}_global", f"{ours}/{name}_global")
    )


LONGFORMER = dataclasses.replace(
    ROBERTA,
    model_type="longformer",
    # Without the last, question answering: all tokens of the question are global there.
    architectures=_roberta_classes("Longformer")[:-1],
    # transformers takes the global tokens as an argument: for classification the first one.
    base=with_settings(
        ROBERTA.base, {"layer_pattern.mixer": LongformerConfig(num_global_tokens=1)}
    ),
    weights=(
        *bert_body("longformer"),
        *global_projections("longformer.encoder.layer.{layer}.attention.self", "layers/mixer"),
    ),
    read_rest=_read_longformer,
    write_rest=lambda config: _write_bert(config) | _write_longformer(config),
    prefix="longformer.",
    ignored=("*.position_ids", "longformer.pooler.*"),
)


def _read_big_bird(fields: Fields, config: TransformerConfig) -> TransformerConfig:
    if fields.take("attention_type") != "original_full":
        raise fields.unsupported(
            "attention_type",
            "'original_full', which has the same weights: set it in config.json. The random "
            "blocks of block_sparse are drawn by NumPy while transformers runs the model",
        )
    return config


BIG_BIRD = dataclasses.replace(
    BERT,
    model_type="big_bird",
    architectures=(
        Architecture("BigBirdForMaskedLM", "masked_lm", BERT_HEAD),
        Architecture("BigBirdForTokenClassification", "tagger", TAGGER_HEAD),
    ),
    base=with_settings(BASE, {"layer_pattern.mixer": AttentionConfig(output_bias=True)}),
    settings=(
        *BERT_SETTINGS,
        Setting("use_bias", "layer_pattern.mixer.bias"),
        Setting("rescale_embeddings", "scale_embeddings"),
    ),
    constants={"attention_type": "original_full"},
    read_rest=_read_big_bird,
)
