"""A trained run as a value, with what a notebook asks of it; `load` reads it from its folder."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from train.assembly import make_engine, make_task, with_broken_kernels, with_python_data
from train.checkpoint.manager import CheckpointManager
from train.data.held_data import PythonData
from train.data.python_data import is_by_split
from train.engines.lora import LoRAConfig
from train.errors import EmptyPathError, UsageError, UserError, as_usage_errors
from train.evaluation.eval_weights import load_eval_weights
from train.evaluation.evaluator import evaluate_split
from train.experiment import Experiment
from train.parallel.mesh import MeshConfig
from train.run_folder.base_weights import check_base, load_base
from train.run_folder.folder import RunFolder
from train.run_folder.provenance import check_provenance, collect_provenance
from train.run_folder.run_config import read_experiment, read_labels, read_tokenizer
from train.run_folder.sentence_transformers import read_embedding_config
from train.runtime.local_hardware import local_hardware
from train.runtime.oom import LARGER_DEVICES_REMEDY, explain_oom
from train.runtime.stages import stage
from train.tasks.task import SampleOptions, TextCallback, TrainedModel
from train.tasks.text_embeddings import choose_prompt, embed_texts, usual_config
from train.tasks.text_scores import score_texts
from train.tasks.vocabulary import check_vocab_size
from train.telemetry.event_log import EventLog
from train.telemetry.loss_plot import draw_losses, event_steps
from train.telemetry.metrics_log import read_metrics
from transformer.generation.log_likelihood import LogLikelihood
from transformer.generation.sampling import SamplingConfig
from transformer.quantization import Quantization
from transformer.text_embeddings import EmbeddingPooling

if TYPE_CHECKING:  # of an optional package
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Run(TrainedModel):
    """Result of `fit` or `load`: a model with trained weights and its tokenizer.

    The weights are those for evaluation: newest, best, averaged or EMA, as the settings say.
    """

    experiment: Experiment
    """Resolved settings: with the vocabulary size and the number of labels."""
    folder: RunFolder
    """Folder of the run."""
    step: int
    """Step of the weights."""
    final_metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    """Held-out metrics at the end of `fit`. Empty for a loaded run."""
    data: PythonData | None = None
    """Data that `fit` was given from Python. None for data of files, and for a loaded run."""

    def __repr__(self) -> str:
        task, metrics = type(self.experiment.task).__name__, self.final_metrics
        shown = "".join(f", {name} {value:.4g}" for name, value in metrics.items())
        return f"<Run {self.experiment.name}: {task}, step {self.step}{shown}; {self.folder.path}>"

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 200,
        temperature: float = 0.8,
        top_k: int = 0,
        top_p: float = 1.0,
        num_beams: int = 0,
        seed: int = 0,
        source_language: str = "",
        target_language: str = "",
        on_text: TextCallback | None = None,
    ) -> str | list[str]:
        """Return the model's answer to a prompt, or to each of several.

        The answer is a continuation without the prompt, a translation, a class, tags, or the text
        with its masks filled, depending on the task. Options that do not concern it are ignored.

        Args:
          prompts: A text, or several, which run as one batch.
          max_new_tokens: Upper limit of the length of a continuation.
          temperature: Divisor of the logits; 0 always takes the most likely token.
          top_k: Sample among this many most likely tokens; 0: all.
          top_p: Sample among the most likely tokens that together reach this probability.
          num_beams: Width of beam search in translation. 0: as in the run's settings.
          seed: Seed of sampling.
          source_language: Code of a translation's source language, such as en_XX, where the
            tokenizer has tokens for languages. Empty: as in the run's settings.
          target_language: Code of the language to translate into, likewise.
          on_text: Called with pieces of the answer to a single prompt as they are generated.
            Joined, they are the answer.

        Raises:
          UserError: A prompt or an option is not valid for the model.
        """
        with as_usage_errors():
            sampling = SamplingConfig(temperature, top_k, top_p)
        options = SampleOptions(
            max_new_tokens,
            sampling,
            num_beams,
            seed,
            source_language=source_language,
            target_language=target_language,
            on_text=on_text,
        )
        texts = _texts("prompts", prompts)
        answers = make_task(self.experiment).sample(self, texts, options)
        return answers[0] if isinstance(prompts, str) else answers

    def score(
        self, texts: str | Sequence[str], *, context: str | Sequence[str] | None = None
    ) -> LogLikelihood | list[LogLikelihood]:
        """Return the log-likelihood of a text, or of each of several, in nats.

        Each has `total`, and `num_tokens`, the number of tokens that it sums over.

        Args:
          texts: A text, or several.
          context: What precedes the texts (of a translation model, the source): one for all, or
            one for each. None: nothing does, and the first token of a text is not scored. An empty
            one is the beginning of a document.

        Raises:
          UserError: The model does not predict the next token, or cannot read a text.
        """
        several = _texts("texts", texts)
        contexts = None if context is None else _texts("context", context)
        if isinstance(context, str):
            contexts = [context] * len(several)
        scores = score_texts(make_task(self.experiment), self, several, contexts)
        return scores[0] if isinstance(texts, str) else scores

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: EmbeddingPooling | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
    ) -> np.ndarray:  # [D] or [N, D] float32
        """Return the vector of a text, or of each of several.

        What is not given is that of the model's files, if it was imported from a folder of
        sentence-transformers. Otherwise an encoder has the mean of the hidden states, and a decoder
        that of the last token, both normalized, without a prompt.

        Args:
          texts: A text, or several.
          pooling: `mean` of the tokens, `first` or `last` token, or `max` of the tokens.
          normalize: Scale the vectors to length 1, so that their products are cosines.
          prompt: Text to put before each.
          prompt_name: The same by its name in the model's files.

        Raises:
          UserError: The model has no one stack of layers over tokens, there is no such prompt, or a
            text cannot be read.
        """
        several = _texts("texts", texts)
        published = self.folder.pretrained.exists()
        config = read_embedding_config(self.folder.pretrained) if published else None
        config = config or usual_config(self.model.config)
        before = choose_prompt(config, prompt, prompt_name)
        if pooling is not None:
            config = dataclasses.replace(config, pooling=pooling)
        if normalize is not None:
            config = dataclasses.replace(config, normalize=normalize)
        vectors = embed_texts(self, several, config, prompt=before, is_published=published)
        return vectors[0] if isinstance(texts, str) else vectors

    def evaluate(self, split: str = "validation", *, data: Any = None) -> dict[str, float]:
        """Return the metrics over the whole of a split, by name.

        Args:
          split: `train`, `validation`, or `test` if the data have one.
          data: Examples to evaluate in place of the run's own, as for `train.fit`: a list (for an
            `ArrayTask`, a dict of arrays), or a dict of those by split.

        Raises:
          UserError: There is no such split, or the data are missing or do not suit the task.
        """
        if data is None:
            return self._evaluate(self.experiment, split)
        if is_by_split(self.experiment.data, data):
            if split not in data:
                raise UserError(f"split {split!r}: data has only {', '.join(data)}; choose one")
            data = data[split]
        if not isinstance(data, Iterable):
            raise UserError(f"data of type {type(data).__name__}: give a list of examples")
        data = data if hasattr(data, "__len__") else list(data)
        splits = {"train": data, "validation": data, split: data}
        experiment, held = with_python_data(self.experiment, splits)
        metrics = self._evaluate(experiment, split)
        del held  # kept until here: settings only name the data
        return metrics

    def _evaluate(self, experiment: Experiment, split: str) -> dict[str, float]:
        task = make_task(experiment)
        try:
            corpus = task.prepare_corpus(self.tokenizer, self.labels)
        except EmptyPathError as error:
            raise UserError(
                f"{self.folder.path}: was imported without data; import it again with --data PATH, "
                "or in Python give some: train.load(W).evaluate(data=[...])"
            ) from error
        # The weights of a LoRA run are merged: its model is an ordinary one.
        plain = dataclasses.replace(experiment, lora=LoRAConfig())
        engine = make_engine(plain, self.model.hardware)
        if experiment.lora.rank and task.needs_base_weights:
            engine.frozen = load_base(self.folder, engine)
        with explain_oom(lambda: [LARGER_DEVICES_REMEDY]):
            return evaluate_split(plain, engine, self.params, corpus, split, whole=True)

    def metrics(self, split: str | None = None) -> list[dict[str, Any]]:
        """Return the metrics logged so far, a dict for each line of metrics.jsonl.

        Each has `step`, `split` and the metrics of that line by name: `pandas.DataFrame` takes the
        list as it is.

        Args:
          split: Only the lines of `train`, `validation` or `test`. None: all.

        Raises:
          UserError: The file cannot be read, or there is no such split.
        """
        splits = ("train", "validation", "test")
        if split is not None and split not in splits:
            raise UserError(f"split {split!r}: is not known; choose from {', '.join(splits)}")
        lines = read_metrics(self.folder.metrics)
        return [line for line in lines if split in (None, line["split"])]

    def plot(self) -> "Figure":
        """Return a figure of the losses and the scores by step, which a notebook shows.

        Raises:
          UserError: Matplotlib is not installed, or no loss is logged yet.
        """
        events = event_steps(EventLog(self.folder.event_log).read())
        try:
            figure = draw_losses(self.metrics(), events=events)
        except ImportError as error:
            raise UserError(
                f"plot: needs matplotlib, which is not installed ({error}); pip install matplotlib"
            ) from error
        if figure is None:
            raise UserError(f"{self.folder.metrics}: has no losses to plot; train some steps first")
        return figure


def _texts(name: str, value: str | Iterable[str]) -> list[str]:
    """Return one text, or several, as a list."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable):
        raise UsageError(f"{name} {value!r}: give a string or a list of strings")
    for text in value:
        if not isinstance(text, str):
            raise UsageError(f"{name}: one is a {type(text).__name__}; give strings")
    return list(value)


def load(
    workdir: str | os.PathLike[str],
    *,
    step: int | None = None,
    average_checkpoints: int | None = None,
    merged: bool = True,
    quantize: Quantization = "none",
) -> Run:
    """Read a run from its folder, for evaluation or generation on the local devices.

    Args:
      workdir: Folder of the run, local or remote.
      step: Step of the checkpoint to read. By default the newest, or the best or an average if
        the run's settings say so.
      average_checkpoints: Read the mean of the weights of this many checkpoints: that of `step`
        (or the newest) and those before it.
      merged: Add the low-rank updates of a LoRA run to its matrices. False: `run.params` is the
        trainable tree alone, as `transformer.lora` describes it. A quantized base keeps the updates
        beside it in any case.
      quantize: Hold the matrices of the layers in few bits: `int8`, or `int4` by groups of 64
        inputs (`transformer.quantization`). `none`: as they are stored.

    Returns:
      The run.

    Raises:
      UserError: there is no run or no such checkpoint, or it does not belong to the run.
    """
    if quantize not in get_args(Quantization):
        known = ", ".join(get_args(Quantization))
        raise UsageError(f"quantize {quantize!r}: is not known; give one of {known}")
    folder = RunFolder.open_existing(workdir)
    hardware = local_hardware()
    saved = read_experiment(folder)
    experiment = for_local_devices(saved)
    tokenizer, labels = read_tokenizer(folder, saved), read_labels(folder)
    if tokenizer is not None:
        check_vocab_size(experiment.model, tokenizer, str(folder.tokenizer), padded=True)
    engine = make_engine(experiment, with_broken_kernels(hardware, experiment))
    verify = experiment.checkpoint.verify
    provenance = collect_provenance(saved, tokenizer, labels)

    def check(step: int, metadata: dict[str, Any]) -> None:
        check_provenance(metadata, step, folder, provenance)
        if engine.lora is not None:
            check_base(folder, metadata, step)

    if engine.lora is not None:
        engine.frozen = engine.lora.freeze(load_base(folder, engine))
    with (
        stage("reading the weights"),
        CheckpointManager(folder.checkpoints, verify=verify) as checkpoints,
    ):
        params, steps = load_eval_weights(
            checkpoints,
            engine,
            experiment,
            step=step,
            average_checkpoints=average_checkpoints,
            check=check,
            merged=merged,
            quantize=quantize,
        )
    return Run(
        experiment=experiment,
        folder=folder,
        model=engine.model,
        params=params,
        tokenizer=tokenizer,
        labels=labels,
        step=steps[-1],
    )


def for_local_devices(experiment: Experiment) -> Experiment:
    """Return the experiment with the mesh and compilation of this machine's devices.

    A run is often evaluated on another machine than it was trained on.
    """
    model = experiment.model
    # Nothing is differentiated here, and a CPU has no second memory to offload to.
    if model.remat == "offload":
        model = dataclasses.replace(model, remat="none")
    return dataclasses.replace(
        experiment,
        model=model,
        mesh=MeshConfig(),
        compile="jit",
        grad_accum_steps=1,
    )
