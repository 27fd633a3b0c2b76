"""`EmbeddingModel`: texts to vectors, scores and labels. From encoders and causal models alike."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.llm.encoding.embedder import Embedder, Pooling, TextTokens

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
        **other_options: Any,
    ) -> None:
        """Loads a local directory, a GGUF file or a Hub id. The arguments are those of `LLMModel`, and so are
        `other_options`, such as `kv_cache_bytes` for a causal model.

        `dtype`: "auto" keeps weights as the checkpoint's config has them, in float32 if it does not say.

        Raises: the errors of `LLMModel`, and NotImplementedError for a module or setting of sentence-transformers that
        pace does not implement, by name."""
        raise NotImplementedError

    # -- texts in ------------------------------------------------------------------------------------------------------

    def embed(
        self,
        texts: Texts,
        prompt: str | None = None,
        dimensions: int | None = None,
        normalise: bool | None = None,
        truncate: bool = True,
    ) -> Tensor:
        """Returns the vectors of one text or several, float32 `[N, D]`.

        `prompt`: a name in `prompts`, whose text is put before each text. None for `default_prompt_name`.
        `dimensions`: keeps the first D numbers: one of `matryoshka_dimensions`, or 1 to `dimensions` without those. The
        result has length 1 again where the model normalises.
        `normalise`: True or False to get vectors of length 1, or as they are; None for the checkpoint's own choice.
        `truncate`: cuts texts that are too long at their end; with False they are a ValueError.

        Raises TypeError and ValueError for invalid arguments."""
        raise NotImplementedError

    def rank(
        self, query: str, documents: Sequence[str], truncate: bool = False, instruction: str | None = None
    ) -> list[tuple[int, float]]:
        """Returns (index of the document, score) for all documents, best first; ties keep their order. The scores are
        those of `score`. A causal model computes the query once for all documents."""
        raise NotImplementedError

    def score(self, pairs: Pairs, truncate: bool = False, instruction: str | None = None) -> Tensor:
        """Returns float32 `[N]`, from 0 to 1: how well the second text of each pair answers the first.

        `truncate`: cuts the longer text of a pair first; with False a pair that is too long is a ValueError.
        `instruction`: the task, for Qwen3-Reranker and other causal models; None for the model's usual one.

        Raises ValueError for a model that cannot rank, for several labels, and for an `instruction` that has no
        place."""
        raise NotImplementedError

    def classify(self, texts: Texts | Pairs, truncate: bool = False) -> Tensor:
        """Returns probabilities, float32 `[N, labels]` in the order of `id2label`. They come from a sigmoid for one
        label, and where the config says "multi_label_classification", else from a softmax."""
        raise NotImplementedError

    # -- tokens in -----------------------------------------------------------------------------------------------------

    def tokenize(self, texts: Texts, prompt: str | None = None, truncate: bool = True) -> list[TextTokens]:
        """Returns the tokens of each text as `embed` computes them, with the prompt and special tokens."""
        raise NotImplementedError

    def tokenize_pairs(self, pairs: Pairs, truncate: bool = False, instruction: str | None = None) -> list[TextTokens]:
        """Returns the tokens of each pair as `score` computes them."""
        raise NotImplementedError

    def embed_tokens(
        self, texts: Sequence[TextTokens], dimensions: int | None = None, normalise: bool | None = None
    ) -> Tensor:
        """Returns the vectors of tokenised texts, as `embed`. Their ids are used as they are."""
        return self.finish_rows(self.submit_rows(texts).result(), dimensions, normalise)

    def logits_of(self, texts: Sequence[TextTokens]) -> Tensor:
        """Returns raw logits, float32 `[N, num_labels]`. For a causal model that answers yes or no `[N, 1]`, the logit
        of yes less that of no."""
        return self.submit_logits(texts).result()

    def scores_of(self, texts: Sequence[TextTokens]) -> Tensor:
        """Returns the scores of tokenised pairs, float32 `[N]`, as `score`."""
        return self.to_scores(self.logits_of(texts))

    # -- in two parts, for servers -------------------------------------------------------------------------------------

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raises TypeError or ValueError unless `embed` takes these `dimensions`."""
        raise NotImplementedError

    def submit_rows(self, texts: Sequence[TextTokens]) -> Future[Tensor]:
        """Queues texts and returns at once. The future gets pooled rows for `finish_rows`; `cancel()` drops them."""
        return self.embedder.submit(texts, self.pooling)

    def finish_rows(self, rows: Tensor, dimensions: int | None = None, normalise: bool | None = None) -> Tensor:
        """Returns the vectors, float32 `[N, D]`, of pooled rows: Dense layers, the first `dimensions`, length 1."""
        raise NotImplementedError

    def submit_logits(self, texts: Sequence[TextTokens]) -> Future[Tensor]:
        """Queues tokenised texts or pairs and returns at once. The future gets the logits of `logits_of`."""
        raise NotImplementedError

    def to_scores(self, logits: Tensor) -> Tensor:
        """Returns the scores, float32 `[N]`, of logits `[N, 1]`."""
        return torch.sigmoid(logits[:, 0])

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """Returns the probabilities of `classify` of logits `[N, num_labels]`."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Frees the weights. What waits fails with a ValueError. Closing twice is harmless."""
        self.embedder.close()

    def __enter__(self) -> EmbeddingModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
