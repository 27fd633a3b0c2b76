"""Vectors of pace under the names of sentence-transformers, for libraries that take such a model as an object:
`from pace.integrations.sentence_transformers import SentenceEncoder` (docs/embeddings.md). It does not need that
library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pace.llm.embedding_model import EmbeddingModel

DISTANCES = {"euclidean": 2.0, "manhattan": 1.0}
"""Similarity of sentence-transformers -> the norm whose distance it is."""


def query_prompt(prompts: Mapping[str, str]) -> str | None:
    """Returns the name of the prompt before queries: that of sentence-transformers, or a task's."""
    return next((name for name in ("query", "retrieval.query") if name in prompts), None)


def document_prompt(prompts: Mapping[str, str]) -> str | None:
    """Returns the name of the prompt before documents: that of sentence-transformers, or a task's."""
    return next((name for name in ("document", "passage", "corpus", "retrieval.passage") if name in prompts), None)


class SentenceEncoder:
    """An EmbeddingModel with the methods of `SentenceTransformer` that give vectors. Texts that are too long are cut
    off. Vectors that are made shorter have length 1 again where the model normalises."""

    def __init__(self, model: EmbeddingModel | str | Path, **options: Any) -> None:
        """`model` is an EmbeddingModel, or what to load with `options`, its arguments."""
        if isinstance(model, EmbeddingModel) and options:
            raise TypeError(f"{', '.join(options)}: options are for loading, and this model is loaded")
        self.model = model if isinstance(model, EmbeddingModel) else EmbeddingModel(model, **options)

    def encode(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: str | None = "sentence_embedding",
        precision: str = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        task: str | None = None,
    ) -> np.ndarray | Tensor | list[Tensor]:
        """Returns the vectors, float32 `[N, D]`, or `[D]` for one string: an array, a tensor, or a list of tensors.

        `task`: the task whose adapter the model has. It brings no prompt, and a prompt brings no task, as in
        jina-embeddings-v3's own code: give both.

        `batch_size`, `show_progress_bar` and `device` have no effect: texts share steps without padding, on the CPU.
        Raises NotImplementedError for another `output_value` or `precision`."""
        if output_value != "sentence_embedding":
            raise NotImplementedError(f"output_value must be 'sentence_embedding'; got {output_value!r}")
        if precision != "float32":
            raise NotImplementedError(f"precision must be 'float32'; got {precision!r}")
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        normalise = True if normalize_embeddings else None
        vectors = torch.zeros(0, truncate_dim or self.model.dimensions)
        if task is not None or self.model.tasks:
            self.model.check_task(task)
            prefix = self._prefix(prompt_name) if prompt is None else prompt
            tokens = self.model.tokenize_after(prefix, texts, task=task or self.model.default_task)
            vectors = self.model.embed_tokens(tokens, truncate_dim, normalise)
        elif texts:
            if prompt is not None:
                texts, prompt_name = self._with_prompt(texts, prompt)
            vectors = self.model.embed(texts, prompt=prompt_name, dimensions=truncate_dim, normalise=normalise)
        if isinstance(sentences, str):
            vectors = vectors[0]
        if convert_to_tensor:
            return vectors
        return vectors.numpy() if convert_to_numpy else list(vectors)

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> np.ndarray | Tensor | list[Tensor]:
        return self._encode_as(query_prompt(self.prompts), sentences, options)

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> np.ndarray | Tensor | list[Tensor]:
        return self._encode_as(document_prompt(self.prompts), sentences, options)

    def _encode_as(self, prompt_name: str | None, sentences: str | Sequence[str], options: dict[str, Any]) -> Any:
        if options.get("prompt") is None:
            options = {**options, "prompt_name": options.get("prompt_name") or prompt_name}
        if prompt_name in self.model.tasks:
            options.setdefault("task", prompt_name)
        return self.encode(sentences, **options)

    def _prefix(self, prompt_name: str | None) -> str:
        """The text of a prompt, or of the default one. Raises ValueError for an unknown name."""
        name = prompt_name or self.default_prompt_name
        if name is not None and name not in self.prompts:
            raise ValueError(f"prompt_name must be one of {list(self.prompts)}; got {name!r}")
        return "" if name is None else self.prompts[name]

    def _with_prompt(self, texts: list[str], prompt: str) -> tuple[list[str], str | None]:
        """Returns texts with a prompt that is given as a text, and the name of the prompt that is still to be added.
        Raises ValueError if the model would add its own."""
        for name, text in self.prompts.items():
            if text == prompt:
                return texts, name
        if self.model.default_prompt_name is not None:
            known = list(self.prompts.values())
            raise ValueError(f"prompt must be one of {known}, as this model always has a prompt; got {prompt!r}")
        return [prompt + text for text in texts], None

    def similarity(self, first: Any, second: Any) -> Tensor:
        """Returns how alike each vector of `first` and each of `second` are, `[N, M]`, by `similarity_fn_name`. Of
        distances it is the negative."""
        rows = [torch.atleast_2d(torch.as_tensor(each)).float() for each in (first, second)]
        name = self.similarity_fn_name
        if name in DISTANCES:
            return -torch.cdist(*rows, p=DISTANCES[name])
        if name == "cosine":
            rows = [torch.nn.functional.normalize(each) for each in rows]
        return rows[0] @ rows[1].T

    @property
    def similarity_fn_name(self) -> str:
        return self.model.similarity_fn_name

    def get_sentence_embedding_dimension(self) -> int:
        return self.model.dimensions

    get_embedding_dimension = get_sentence_embedding_dimension

    @property
    def max_seq_length(self) -> int:
        return self.model.max_length

    @property
    def prompts(self) -> dict[str, str]:
        return self.model.prompts

    @property
    def default_prompt_name(self) -> str | None:
        return self.model.default_prompt_name

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer
