"""`EmbeddingModel`: texts to vectors, scores and labels. From encoders and causal models alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.llm.encoding.causal import Answers, CausalEmbedder
from pace.llm.encoding.embedder import LOGITS, Embedder, Pooling, TextTokens, wait_for
from pace.llm.encoding.instructions import FAMILY, answer_ids, pair_prompt
from pace.llm.encoding.open import SANE_LENGTH, Parts, open_parts
from pace.llm.encoding.pooling import Finish
from pace.llm.encoding.texts import TextEncoder
from pace.llm.loading.options import LoadOptions
from pace.llm.models.encoders.encoder import labels_of
from pace.naming import shown

Texts = str | Sequence[str]
Pairs = Sequence[tuple[str, str]]


class EmbeddingModel:
    """A checkpoint or GGUF file of an encoder or a causal model, for vectors and scores of whole texts.

    Thread-safe: calls of several threads share steps. The rows of a text have the same bits in any batch. `close`, or a
    `with` block, frees the weights.
    """

    name: str
    """The path or Hub id that it was loaded from."""
    tokenizer: Any
    """None if the checkpoint has none; then only the methods that take tokens work."""
    embedder: Embedder
    pooling: Pooling
    """What `submit_rows` asks of the embedder."""
    dimensions: int
    """Floats of a vector without `dimensions=`."""
    matryoshka_dimensions: tuple[int, ...]
    """The values of `dimensions=` that the checkpoint was trained for. Empty if its config does not say: then 1 to
    `dimensions` are taken."""
    prompts: dict[str, str]
    """Name -> text that `embed` puts before each text."""
    default_prompt_name: str | None
    similarity_fn_name: str = "cosine"
    """How the checkpoint's vectors are compared: "cosine", "dot", "euclidean" or "manhattan"."""
    tasks: tuple[str, ...] = ()
    """Tasks that the checkpoint has adapters for; empty for most models."""
    default_task: str | None = None
    """The task of texts for which neither a task nor a prompt with its name is given."""
    num_labels: int
    """Labels of its classifier; 0 without one."""
    id2label: dict[int, str]
    """Names of the labels; empty without a classifier."""
    max_length: int
    """Maximum number of tokens of a text or pair, special tokens included."""
    can_rank: bool
    """True if `rank` and `score` work: a classifier with one label, or a causal model that answers yes or no."""

    def __init__(
        self,
        model_name_or_path: str | Path,
        tokenizer_name_or_path: str | Path | None = None,
        dtype: torch.dtype | str = "auto",
        quantization: Any = None,
        backend: Any = "native",
        num_threads: int | None = None,
        max_seq_len: int | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        progress: bool = True,
        pin_threads: bool | None = None,
        load_in_4bit: bool = False,
        load_in_8bit: bool = False,
        weights_cache: str | Path | bool | None = None,
        kv_cache_bytes: int | str | None = None,
        kv_cache_dtype: torch.dtype | str = "auto",
        prefix_cache_bytes: int | str = "auto",
        adapter: str | Path | None = None,
        merge: bool = False,
        **other_names: Any,
    ) -> None:
        """Loads a local directory, a GGUF file or a Hub id. The arguments are those of `LLMModel`; those about keys,
        values and prefixes count for causal models. An `adapter` needs `merge=True`.

        `dtype`: "auto" keeps weights as the checkpoint's config has them, in float32 if it does not say.
        `max_seq_len`: maximum number of tokens of a text; None for the checkpoint's.

        Raises: the errors of `LLMModel`, and NotImplementedError for a module or setting of sentence-transformers that
        pace does not implement, by name."""
        given = {name: value for name, value in locals().items() if name not in ("self", "other_names")}
        keeps_dtype = isinstance(dtype, str) and dtype == "auto"
        if keeps_dtype:
            given["dtype"] = LoadOptions.dtype
        options = LoadOptions.read(given, other_names)
        keeps_dtype = keeps_dtype and "torch_dtype" not in other_names
        self._hold(str(model_name_or_path), open_parts(options, keeps_dtype), options.max_seq_len)

    @classmethod
    def _open(cls, options: LoadOptions, keeps_dtype: bool) -> EmbeddingModel:
        """Loads a model for the command line and the server."""
        return cls._of(str(options.model_name_or_path), open_parts(options, keeps_dtype), options.max_seq_len)

    @classmethod
    def _of(cls, name: str, parts: Parts, max_length: int | None = None) -> EmbeddingModel:
        """Makes a model of loaded parts. `max_length`: the maximum that the caller chose; None for the checkpoint's."""
        model = cls.__new__(cls)
        model._hold(name, parts, max_length)
        return model

    def _hold(self, name: str, parts: Parts, max_length: int | None) -> None:
        settings, tokenizer, embedder = parts.settings, parts.tokenizer, parts.embedder
        self.name, self.tokenizer, self.embedder, self.pooling = name, tokenizer, embedder, parts.pooling
        size = embedder.hidden_size * len(parts.pooling)
        self._finish = Finish(parts.ops, size, parts.layers, settings.truncate_dim)
        self.dimensions = self._finish.default_size
        self.matryoshka_dimensions = _read_dimensions(parts.config, self._finish.size)
        self.prompts = {**embedder.instructions, **settings.prompts}
        self.default_prompt_name = settings.default_prompt_name
        self.similarity_fn_name = settings.similarity
        self.tasks, self.default_task = tuple(embedder.instructions), settings.default_task
        if self.default_task is not None and self.default_task not in self.tasks:
            raise ValueError(f"default_task = {shown(self.default_task)} is none of the tasks {self.tasks}")
        self.num_labels = embedder.num_labels
        self.id2label = dict(enumerate(labels_of(dict(parts.config)))) if self.num_labels else {}
        self._is_multi_label = parts.config.get("problem_type") == "multi_label_classification"
        length = max_length or settings.max_length or getattr(tokenizer, "model_max_length", SANE_LENGTH)
        self.max_length = min(embedder.max_length, length)
        self._texts: TextEncoder | None = None
        if tokenizer is not None:
            self._texts = TextEncoder(tokenizer, self.max_length, embedder.num_types > 1, settings.lower_case)
        self._answers: Answers | None = None
        self._cannot_rank = self._find_answers(parts)
        self.can_rank = not self._cannot_rank
        self._prompt = pair_prompt(tokenizer, self.max_length, settings, self._answers is not None)
        self._pair_prompt = settings.pair_prompt

    def _find_answers(self, parts: Parts) -> str:
        """Sets the tokens whose logits are scores, for a causal model. Returns why this model cannot rank, or ""."""
        if self.num_labels == 1:
            return ""
        if self.num_labels:
            return f"its classifier has {self.num_labels} labels, and a score needs one; classify gives all"
        if not isinstance(self.embedder, CausalEmbedder):
            return "it has no classifier; embed gives vectors, whose products compare texts"
        kind, settings = type(parts.model).__name__, parts.settings
        knows_how = settings.has_plain_pairs or settings.pair_template is not None
        if not kind.startswith(FAMILY) and not (settings.answers and knows_how):
            return f"{kind} has no classifier, and only {FAMILY} models are asked for yes or no"
        if parts.model.lm_head is None:
            return "its checkpoint has neither a classifier nor an LM head"
        self._answers = settings.answers
        if self._answers is None and parts.tokenizer is not None:
            try:
                self._answers = answer_ids(parts.tokenizer)
            except ValueError as error:
                return str(error)
        return "" if self._answers else "without a tokenizer, the ids of yes and no are not known"

    # -- texts in ------------------------------------------------------------------------------------------------------

    def embed(
        self,
        texts: Texts,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalise: bool | None = None,
        truncate: bool = True,
        task: str | None = None,
    ) -> Tensor:
        """Returns the vectors of one text or several, float32 `[N, D]`.

        `prompt`: a name in `prompts`, whose text is put before each text. None for that of the task, or else for
        `default_prompt_name`.
        `task`: a name in `tasks`, whose adapter the model has for these texts. None for the task that the prompt is
        named after, or else for the checkpoint's default.
        `dimensions`: keeps the first D numbers: one of `matryoshka_dimensions`, or 1 to `dimensions` without those. The
        result has length 1 again where the model normalises.
        `normalise`: True or False to get vectors of length 1, or as they are; None for the checkpoint's own choice.
        `truncate`: cuts texts that are too long at their end; with False they are a ValueError.

        Raises TypeError and ValueError for invalid arguments."""
        self.check_dimensions(dimensions)
        _check_normalise(normalise)
        return self.embed_tokens(self.tokenize(texts, prompt, truncate, task), dimensions, normalise)

    def rank(
        self, query: str, documents: Sequence[str], truncate: bool = False, instruction: str | None = None
    ) -> list[tuple[int, float]]:
        """Returns (index of the document, score) for all documents, best first; ties keep their order. The scores are
        those of `score`. A causal model computes the query once for all documents."""
        if not isinstance(query, str):
            raise TypeError(f"query must be a string; got {type(query).__name__}")
        if isinstance(documents, str):
            raise TypeError(f"documents must be a list of strings; got the string {shown(documents)}")
        scores = self.score([(query, text) for text in _read_texts(documents, "documents")], truncate, instruction)
        return [(index, score) for index, score in _best_first(scores.tolist())]

    def score(self, pairs: Pairs, truncate: bool = False, instruction: str | None = None) -> Tensor:
        """Returns float32 `[N]`, from 0 to 1: how well the second text of each pair answers the first.

        `truncate`: cuts the longer text of a pair first; with False a pair that is too long is a ValueError.
        `instruction`: the task, for Qwen3-Reranker and other causal models; None for the model's usual one.

        Raises ValueError for a model that cannot rank, for several labels, and for an `instruction` that has no
        place."""
        return self.scores_of(self.tokenize_pairs(pairs, truncate, instruction))

    def classify(self, texts: Texts | Pairs, truncate: bool = False) -> Tensor:
        """Returns probabilities, float32 `[N, labels]` in the order of `id2label`. They come from a sigmoid for one
        label, and where the config says "multi_label_classification", else from a softmax.

        Raises ValueError for a model without a classifier, and for a text that is too long, unless `truncate`."""
        return self.to_probabilities(self.logits_of(self.tokenize_to_classify(texts, truncate)))

    # -- tokens in -----------------------------------------------------------------------------------------------------

    def tokenize(
        self, texts: Texts, prompt: str | None = None, truncate: bool = True, task: str | None = None
    ) -> list[TextTokens]:
        """Returns the tokens of each text as `embed` computes them, with the prompt and special tokens."""
        self.check_task(task)
        if prompt is None:
            prompt = task or self.default_prompt_name
        if prompt is not None and prompt not in self.prompts:
            raise ValueError(
                f"prompt must be the name of one of this model's prompts, {_listed(self.prompts)}; got {shown(prompt)}"
            )
        if task is None:
            task = prompt if prompt in self.tasks else self.default_task
        return self.tokenize_after("" if prompt is None else self.prompts[prompt], texts, truncate, task)

    def tokenize_after(
        self, prefix: str, texts: Texts, truncate: bool = True, task: str | None = None
    ) -> list[TextTokens]:
        """Returns the tokens of `prefix` and each text, with special tokens, for the adapter of exactly this task."""
        found = self._encoder().texts([prefix + text for text in _read_texts(texts)], truncate)
        return [replace(text, task=task) for text in found] if task else found

    def check_task(self, task: str | None) -> None:
        """Raises ValueError for a task that the model has no adapter for."""
        if task is not None and task not in self.tasks:
            raise ValueError(f"task must be one of this model's tasks, {_listed(self.tasks)}; got {shown(task)}")

    def tokenize_pairs(self, pairs: Pairs, truncate: bool = False, instruction: str | None = None) -> list[TextTokens]:
        """Returns the tokens of each pair as `score` computes them."""
        if self._cannot_rank:
            raise ValueError(f"{self.name} cannot rank: {self._cannot_rank}")
        encoder = self._encoder()
        if self._prompt is not None:
            task = self._pair_prompt or None if instruction is None else instruction
            return self._prompt.pairs(_read_pairs(pairs), task, truncate)
        if instruction is not None:
            raise ValueError("instruction has no place in the pairs of this model; leave it out")
        return encoder.pairs(_read_pairs(pairs, self._pair_prompt), truncate)

    def tokenize_to_classify(self, texts: Texts | Pairs, truncate: bool = False) -> list[TextTokens]:
        """Returns the tokens of each text or pair as `classify` computes them, with the prompt of a cross-encoder."""
        self._check_classifier()
        if not isinstance(texts, str) and any(isinstance(text, list | tuple) for text in texts):
            return self._encoder().pairs(_read_pairs(texts, self._pair_prompt), truncate)
        return self._encoder().texts([self._pair_prompt + text for text in _read_texts(texts)], truncate)

    def embed_tokens(
        self, texts: Sequence[TextTokens], dimensions: int | None = None, normalise: bool | None = None
    ) -> Tensor:
        """Returns the vectors of tokenised texts, as `embed`. Their ids are used as they are."""
        self.check_dimensions(dimensions)
        _check_normalise(normalise)
        return self.finish_rows(wait_for(self.submit_rows(texts)), dimensions, normalise)

    def logits_of(self, texts: Sequence[TextTokens]) -> Tensor:
        """Returns raw logits, float32 `[N, num_labels]`. For a causal model that answers yes or no `[N, 1]`, the logit
        of yes less that of no."""
        return wait_for(self.submit_logits(texts))

    def scores_of(self, texts: Sequence[TextTokens]) -> Tensor:
        """Returns the scores of tokenised pairs, float32 `[N]`, as `score`."""
        return self.to_scores(self.logits_of(texts))

    # -- in two parts, for servers -------------------------------------------------------------------------------------

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises TypeError or ValueError unless `embed` takes these `dimensions`."""
        if dimensions is None:
            return
        if type(dimensions) is not int:
            raise TypeError(f"dimensions must be an int or None; got {type(dimensions).__name__}")
        allowed = self.matryoshka_dimensions
        if allowed and dimensions not in allowed:
            raise ValueError(
                f"dimensions must be one of {', '.join(map(str, allowed))} for this model; got {dimensions}"
            )
        if not 1 <= dimensions <= self._finish.size:
            raise ValueError(f"dimensions must be from 1 to {self._finish.size} for this model; got {dimensions}")

    def submit_rows(self, texts: Sequence[TextTokens]) -> Future[Tensor]:
        """Queues texts and returns at once. The future gets pooled rows for `finish_rows`; `cancel()` drops them."""
        return self.embedder.submit(texts, self.pooling)

    def finish_rows(self, rows: Tensor, dimensions: int | None = None, normalise: bool | None = None) -> Tensor:
        """Returns the vectors, float32 `[N, D]`, of pooled rows: Dense layers, the first `dimensions`, length 1."""
        return self._finish(rows, dimensions, normalise)

    def submit_logits(self, texts: Sequence[TextTokens]) -> Future[Tensor]:
        """Queues tokenised texts or pairs and returns at once. The future gets the logits of `logits_of`."""
        if self._answers is not None:
            assert isinstance(self.embedder, CausalEmbedder)
            return self.embedder.submit_answers(texts, self._answers)
        self._check_classifier()
        return self.embedder.submit(texts, LOGITS)

    def to_scores(self, logits: Tensor) -> Tensor:
        """Returns the scores, float32 `[N]`, of logits `[N, 1]`. Raises ValueError for a model that cannot rank."""
        if self._cannot_rank:
            raise ValueError(f"{self.name} cannot rank: {self._cannot_rank}")
        return _sigmoid(logits[:, 0])

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """Returns the probabilities of `classify` of logits `[N, num_labels]`."""
        if self.num_labels == 1 or self._is_multi_label:
            return _sigmoid(logits)
        return torch.softmax(logits.double(), 1).float()

    # ------------------------------------------------------------------------------------------------------------------

    def _encoder(self) -> TextEncoder:
        if self._texts is None:
            raise ValueError(f"{self.name} has no tokenizer; give tokenizer_name_or_path, or tokens instead of texts")
        return self._texts

    def _check_classifier(self) -> None:
        if not self.num_labels:
            raise ValueError(
                f"{self.name} has no classifier, so it has no labels; load a checkpoint of a *ForSequenceClassification"
            )

    def close(self) -> None:
        """Frees the weights. Pending calls fail with a ValueError. Closing twice is harmless."""
        self.embedder.close()

    def __enter__(self) -> EmbeddingModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        labels = f", {self.num_labels} labels" if self.num_labels else ""
        return f"EmbeddingModel({self.name!r}: {self.dimensions} dimensions{labels}, up to {self.max_length} tokens)"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _read_texts(texts: Any, name: str = "texts") -> list[str]:
    """A list of the texts of a call. Raises TypeError."""
    found = [texts] if isinstance(texts, str) else texts
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        raise TypeError(f"{name} must be a string or a list of strings; got {shown(texts)}")
    return list(found)


def _read_pairs(pairs: Any, prompt: str = "") -> list[tuple[str, str]]:
    """A list of the pairs of a call, with a prompt before the first text of each. Raises TypeError."""
    found = list(pairs) if isinstance(pairs, list | tuple) else [None]
    for pair in found:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise TypeError(f"pairs must be a list of pairs of strings; got {shown(pairs)}")
    return [(prompt + first, second) for first, second in found]


def _check_normalise(normalise: bool | None) -> None:
    if normalise is not None and type(normalise) is not bool:
        raise TypeError(f"normalise must be True, False or None; got {shown(normalise)}")


def _best_first(scores: Iterable[float]) -> list[tuple[int, float]]:
    return sorted(enumerate(scores), key=lambda pair: -pair[1])


def _sigmoid(logits: Tensor) -> Tensor:
    """In double precision: in single precision, torch's bits depend on the place in a tensor."""
    return torch.sigmoid(logits.double()).float()


def _read_dimensions(config: Mapping[str, Any], most: int) -> tuple[int, ...]:
    """`matryoshka_dimensions` of config.json. Raises ValueError for values that are no dimensions."""
    found = config.get("matryoshka_dimensions") or []
    if not isinstance(found, list) or not all(type(size) is int and 1 <= size <= most for size in found):
        raise ValueError(f"config.json: matryoshka_dimensions must be integers from 1 to {most}; got {shown(found)}")
    return tuple(found)
