"""`import` and `export`: a model folder becomes a run and round-trips unchanged."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, processors

import train
from tests.train.support import NO_DETECTOR, command, lines_of
from tests.train.support import light_compiler as light_compiler
from train.assembly import make_task
from train.data.data_config import TokenizerConfig
from train.data.text_labels import ClassificationDataConfig
from train.engines.lora import LoRAConfig
from train.errors import UserError
from train.interop.huggingface import import_model
from train.interop.huggingface_export import export_run
from train.interop.lora_export import base_params
from train.run import load
from train.tasks.classification import Classification
from train.tasks.text_completion import encode_prompt
from transformer import LanguageModel
from transformer.generation.beam_search import BeamSearchConfig
from transformer.generation.translate import translate
from transformer.interop.pretrained import read_model
from transformer.layers.low_rank import merge_weights

FIXTURES = Path(__file__).parents[1] / "transformer" / "interop" / "fixtures"
FIXTURE = FIXTURES / "gpt2-tied"


def make_source(folder: Path, tokens: int = 51, fixture: Path = FIXTURE) -> Path:
    """Copy a tiny model, GPT-2, and give it a tokenizer of this many words."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(fixture / name, folder)
    words = ["<|endoftext|>", *(f"w{i}" for i in range(tokens - 1))]
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, "w0")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def files_of(folder: Path, *names: str) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names}


def test_model_round_trips_through_a_run(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", tokens=49)  # fewer words than embedding rows
    import_model(str(source), str(tmp_path / "run"), data_path="/some/text")
    [saved] = lines_of(tmp_path / "run" / "logbook.jsonl")
    assert (saved["event"], saved["step"]) == ("saved", 0)
    run = load(str(tmp_path / "run"))
    assert run.experiment.data.path == "/some/text"
    reference = np.load(FIXTURE / "reference.npz")
    forward = jax.jit(lambda params, tokens: run.model.apply({"params": params}, tokens).logits)
    logits = forward(run.params, reference["tokens"])
    assert logits is not None
    assert np.abs(np.asarray(logits) - reference["logits"]).max() < 1e-4
    assert run.generate("w3 w4", max_new_tokens=3)
    export_run(str(tmp_path / "run"), str(tmp_path / "out"))
    names = ("model.safetensors", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json")
    assert files_of(tmp_path / "out", *names) == files_of(source, *names)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    before = json.loads((source / "config.json").read_text())
    shared = written.keys() & before.keys() - {"n_inner"}  # null there, the resulting width here
    assert len(shared) > 14
    assert {name: written[name] for name in shared} == {name: before[name] for name in shared}
    count = sum(leaf.size for leaf in jax.tree.leaves(run.params))
    card = huggingface_hub.ModelCard.load(tmp_path / "out" / "README.md")
    assert f"A `gpt2` model of {count:,} parameters" in card.text
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["linen-transformer"],
    }


def test_the_text_part_of_a_multimodal_model_is_a_run(tmp_path: Path) -> None:
    """Its files say the text family, so that `export` writes that one again."""
    fixture = FIXTURES.parent / "multimodal" / "qwen2_vl"
    source = make_source(tmp_path / "source", fixture=fixture)
    import_model(str(source), str(tmp_path / "run"))
    run = load(str(tmp_path / "run"))
    assert run.folder.model_type == "qwen2"
    assert run.generate("w3 w4", max_new_tokens=3)
    assert export_run(str(tmp_path / "run"), str(tmp_path / "out")) == "qwen2"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["Qwen2ForCausalLM"]
    assert not written.keys() & {"text_config", "vision_config", "image_token_id"}
    _, params = read_model(tmp_path / "out")
    assert jax.tree.all(jax.tree.map(np.array_equal, params, run.params))


def assert_equal_trees(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)  # also refuses another structure


def test_packed_weights_stay_packed_in_a_run_and_under_lora(tmp_path: Path) -> None:
    fixture = FIXTURES.parent / "packed" / "gptq-act"
    source = make_source(tmp_path / "source", fixture=fixture)
    import_model(str(source), str(tmp_path / "run"))
    run, (_, packed) = load(str(tmp_path / "run")), read_model(source)
    assert_equal_trees(run.params, packed)
    assert run.generate("w3 w4", max_new_tokens=3)
    lora = LoRAConfig(2, quantize="int4")
    experiment = dataclasses.replace(run.experiment, lora=lora, steps=2, recovery=NO_DETECTOR)
    data = dataclasses.replace(experiment.text_data, sequence_length=8)
    experiment = dataclasses.replace(experiment, data=data)
    texts = [" ".join(f"w{(i + j) % 50}" for j in range(40)) for i in range(40)]
    adapted = train.fit(
        experiment, str(tmp_path / "lora"), data=texts, init_from=str(tmp_path / "run"), quiet=True
    )
    assert_equal_trees(base_params(adapted), packed)
    export_run(str(tmp_path / "run"), str(tmp_path / "out"))
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert_equal_trees(read_model(tmp_path / "out")[1], merge_weights(packed))


def test_failed_import_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    source, run = make_source(tmp_path / "source", tokens=60), tmp_path / "run"
    with pytest.raises(UserError, match="tokenizer has 60 tokens and the model 51"):
        import_model(str(source), str(run))
    for name, words in (
        ("tokenizer.model", "is not a complete protocol buffer; fetch it again"),
        ("source.spm", "is a SentencePiece model of one side of a translation"),
        ("notes.txt", "has no tokenizer"),
    ):
        (source / "tokenizer.json").rename(source / name)
        with pytest.raises(UserError, match=words):
            import_model(str(source), str(run))
        (source / name).rename(source / "tokenizer.json")
    (source / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match=r"model.safetensors: cannot be read"):
        import_model(str(source), str(run))
    for missing in (str(tmp_path / "missing"), str(source / "config.json"), "missing", "./a/b"):
        with pytest.raises(UserError, match="is not a folder"):
            import_model(missing, str(run))
    assert not run.exists()


def test_import_that_fails_late_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise UserError("no room")

    source = make_source(tmp_path / "source")
    (tmp_path / "empty").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr("train.interop.huggingface.write_run_files", fail)
        for name in ("empty", "new"):
            with pytest.raises(UserError, match="no room"):
                import_model(str(source), str(tmp_path / name))
    assert not list((tmp_path / "empty").iterdir())
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match="is not empty; give a new folder"):
        import_model(str(source), str(source))


@pytest.mark.parametrize("vocabulary", ["encoder.json", "vocab.json", "vocab.txt"])
def test_older_tokenizer_files_round_trip(vocabulary: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    (source / "tokenizer.json").unlink()
    if vocabulary == "vocab.txt":
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b"]
        (source / vocabulary).write_text("\n".join(words))
        ids = [5, 7]
    else:
        words = ["a", "b", "ab", "<|endoftext|>"]
        (source / vocabulary).write_text(json.dumps({word: i for i, word in enumerate(words)}))
        (source / "merges.txt").write_text("#version: 0.2\na b\n")
        ids = [2]
    (source / "added_tokens.json").write_text(json.dumps({"<extra>": len(words)}))
    (source / "special_tokens_map.json").write_text(json.dumps({"eos_token": words[3]}))
    import_model(str(source), str(tmp_path / "run"))
    run = load(str(tmp_path / "run"))
    assert run.tokenizer is not None
    assert run.tokenizer.encode("ab").tolist() == ids
    export_run(str(tmp_path / "run"), str(tmp_path / "out"))
    kept = [vocabulary, "added_tokens.json", "special_tokens_map.json", "chat_template.jinja"]
    kept += ["merges.txt"] if vocabulary != "vocab.txt" else []
    assert files_of(tmp_path / "out", *kept) == files_of(source, *kept)


def test_export_names_every_token_that_ends_a_text(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = make_source(tmp_path / "source")
    backend = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    backend.add_special_tokens(["w7", "<image>"])  # one more than the table has rows
    backend.save(str(source / "tokenizer.json"))
    (source / "chat_template.jinja").write_text(
        "{% for each in messages %}{{ each.content + ' w7 ' }}{% endfor %}"
    )
    generation = {"eos_token_id": [0, 3], "temperature": 0.7}
    (source / "generation_config.json").write_text(json.dumps(generation))
    import_model(str(source), str(tmp_path / "run"))
    assert "its tokenizer has 1 token more than the model's table has rows" in caplog.text
    run = load(str(tmp_path / "run"))
    assert run.tokenizer is not None
    assert (run.tokenizer.vocab_size, run.tokenizer.end_token_ids) == (51, (0, 3, 8))
    export_run(str(tmp_path / "run"), str(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written == {"eos_token_id": [0, 3, 8], "temperature": 0.7}


def test_settings_of_generation_in_config_json_survive(tmp_path: Path) -> None:
    """`transformers` reads them there where there is no generation_config.json."""
    source = make_source(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    beams = {"num_beams": 4, "bad_words_ids": [[2]]}
    (source / "config.json").write_text(json.dumps(config | beams))
    import_model(str(source), str(tmp_path / "run"))
    export_run(str(tmp_path / "run"), str(tmp_path / "out"))
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {name: written[name] for name in beams} == beams


def test_flags_are_checked_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    for arguments, words in (
        (["import", "x"], "--workdir"),
        (["export", "x"], "--output"),
        (["export", "x", "--output", "file"], "output file: exists and is not empty"),
        (["export", "x", "--output", "a", "--max-shard-megabytes", "0"], "megabytes 0: give 1"),
    ):
        done = command(capsys, *arguments)
        assert done.status
        assert words in done.error


TEMPLATES = {
    "llama-grouped": "<s> $A",
    "bert-classifier": "[CLS] $A [SEP]",
    "bert-mlm": "[CLS] $A [SEP]",
    "roberta-mlm": "<s> $A </s>",
    "distilbert-tagger": "[CLS] $A [SEP]",
    "t5-gated": "$A </s>",
    "bart-scaled": "<s> $A </s>",
}
"""What the tokenizer of each kind of model puts around a text."""


@pytest.mark.parametrize("fixture", TEMPLATES)
def test_imported_models_read_what_their_tokenizer_writes(fixture: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / fixture, source)
    is_bert = "[CLS]" in TEMPLATES[fixture]
    special = ["[UNK]", *(["[CLS]", "[SEP]", "[MASK]"] if is_bert else ["<pad>", "<s>", "</s>"])]
    special += [] if is_bert else ["<mask>"]
    words = {name: i for i, name in enumerate([*special, "one", "two"])}
    backend = tokenizers.Tokenizer(models.WordLevel(words, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    names = [name for name in TEMPLATES[fixture].split() if name != "$A"]
    backend.post_processor = processors.TemplateProcessing(
        single=TEMPLATES[fixture], special_tokens=[(name, words[name]) for name in names]
    )
    backend.save(str(source / "tokenizer.json"))
    config = json.loads((source / "config.json").read_text())
    translates = fixture in ("t5-gated", "bart-scaled")
    if translates:
        config["decoder_start_token_id"] = words["<pad>"]
        (source / "config.json").write_text(json.dumps(config))
    import_model(str(source), str(tmp_path / "run"))
    run = load(str(tmp_path / "run"))
    mask = " [MASK]" if is_bert else " <mask>"
    text = f"one{mask * ('mlm' in fixture)} two"
    read = make_task(run.experiment).model_inputs(run, text, "two" if translates else None)
    assert list(read.sources or read.tokens) == backend.encode(text).ids
    if isinstance(run.model, LanguageModel):
        assert encode_prompt(run, text).tolist() == backend.encode(text).ids
    if translates:
        written = backend.encode("two").ids
        assert read.arguments["tokens"][0].tolist() == [words["<pad>"], *written[:-1]]


def test_labels_of_a_fine_tuned_run_replace_those_of_its_source(tmp_path: Path) -> None:
    """The run has other labels than the classifier that it began with."""
    source = tmp_path / "source"
    shutil.copytree(FIXTURES / "bert-classifier", source)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(46))]
    (source / "vocab.txt").write_text("\n".join(words))
    import_model(str(source), str(tmp_path / "imported"))
    (tmp_path / "train.tsv").write_text("label\ttext\n" + "no\tw1\nyes\tw2\n" * 20)
    experiment = dataclasses.replace(
        load(str(tmp_path / "imported")).experiment,
        task=Classification(),
        data=ClassificationDataConfig(
            path=str(tmp_path / "train.tsv"),
            max_length=8,
            tokenizer=TokenizerConfig("file", path=str(source / "vocab.txt")),
        ),
        batch_size=4,
        steps=1,
        recovery=NO_DETECTOR,
    )
    run_folder, out = str(tmp_path / "run"), tmp_path / "out"
    train.fit(experiment, run_folder, init_from=str(tmp_path / "imported"), quiet=True)
    export_run(run_folder, str(out))
    written = json.loads((out / "config.json").read_text())
    assert written["id2label"] == {"0": "no", "1": "yes"}
    assert written["label2id"] == {"no": 0, "yes": 1}
    model, _ = read_model(out)
    assert model.labels == ("no", "yes")


def test_evaluation_of_an_import_without_data_names_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, workdir = tmp_path / "source", str(tmp_path / "run")
    make_source(source, tokens=51)
    assert command(capsys, "import", str(source), "--workdir", workdir).status == 0
    failed = command(capsys, "evaluate", workdir)
    assert failed.status == 1
    assert "run: was imported without data; import it again with --data PATH" in failed.error


def make_mbart(folder: Path, fixture: str, template: str) -> list[str]:
    """Copy a tiny mBART, give it a tokenizer with tokens of languages, and return its words."""
    shutil.copytree(FIXTURES / fixture, folder)
    special = ["<s>", "<pad>", "</s>", "<unk>", "en_XX", "de_DE"]
    words = [*special, *(f"w{i}" for i in range(45))]
    vocabulary = {word: i for i, word in enumerate(words)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[("</s>", 2), ("en_XX", 4)]
    )
    backend.save(str(folder / "tokenizer.json"))
    return words


def test_a_classifier_of_bart_predicts_trains_and_is_exported(tmp_path: Path) -> None:
    source = tmp_path / "source"
    words = make_mbart(source, "mbart-classifier", "$A </s> en_XX")
    import_model(str(source), str(tmp_path / "imported"))
    run = load(str(tmp_path / "imported"))
    tokens = [[words.index(each) for each in ("w3", "w4", "w3", "</s>", "en_XX")]]
    logits = run.model.apply({"params": run.params}, np.array(tokens)).logits
    assert logits is not None
    assert run.generate("w3 w4 w3") == f"LABEL_{np.argmax(logits)}"
    (tmp_path / "train.tsv").write_text(
        "label\ttext\n" + "LABEL_0\tw1 w2\nLABEL_1\tw2\nLABEL_2\tw3\n" * 9
    )
    path = str(tmp_path / "train.tsv")
    data = dataclasses.replace(run.experiment.data, path=path, max_length=8)  # type: ignore[call-arg]
    experiment = dataclasses.replace(
        run.experiment, data=data, batch_size=4, steps=2, recovery=NO_DETECTOR
    )
    train.fit(experiment, str(tmp_path / "run"), init_from=str(tmp_path / "imported"), quiet=True)
    assert export_run(str(tmp_path / "run"), str(tmp_path / "out")) == "mbart"
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["architectures"] == ["MBartForSequenceClassification"]
    assert written["eos_token_id"] == 2
    pretrained, _ = read_model(tmp_path / "out")
    assert pretrained.end_token == 2


def test_a_translation_begins_with_the_token_of_its_language(tmp_path: Path) -> None:
    source = tmp_path / "source"
    words = make_mbart(source, "mbart-untied", "en_XX $A </s>")
    import_model(str(source), str(tmp_path / "run"))
    run = load(str(tmp_path / "run"))
    model: Any = run.model
    for language, first in (("", None), ("de_DE", 5), ("en_XX", 4)):
        [tokens] = translate(
            model,
            run.params,
            [[4, 9, 10, 2]],
            start_token=2,
            stop_token=2,
            first_token=first,
            beam_search_config=BeamSearchConfig(5, 0.6),
        ).tokens
        assert tokens[:1] == ([first] if first else tokens[:1])
        answer = run.generate("w3 w4", target_language=language)
        assert answer == " ".join(words[token] for token in tokens if token > 5)
    with pytest.raises(UserError, match="target_language fr_XX: is not a language"):
        run.generate("w3 w4", target_language="fr_XX")
    task = dataclasses.replace(run.experiment.task, target_language="de_DE")  # type: ignore[call-arg]
    tuned = dataclasses.replace(run.experiment, task=task)
    frame = make_task(tuned).target_frame(run.tokenizer)  # type: ignore[attr-defined]
    assert (frame.start, frame.forced, frame.before.tolist()) == (2, 5, [5])
