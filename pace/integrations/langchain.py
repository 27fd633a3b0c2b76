"""Vectors of pace for LangChain, in process: `from pace.integrations.langchain import PaceEmbeddings`
(docs/embeddings.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

try:
    from langchain_core.embeddings import Embeddings
except ImportError as error:
    raise ModuleNotFoundError(f'{error}; vectors for LangChain need it: pip install "pace-llm[langchain]"') from None

from pace.integrations.sentence_transformers import document_prompt, query_prompt
from pace.llm.embedding_model import EmbeddingModel


class PaceEmbeddings(Embeddings):
    """Vectors of texts by an EmbeddingModel, for vector stores and retrievers of LangChain.

    Texts that are too long are cut off. Calls of several threads and tasks share steps.
    """

    def __init__(
        self,
        model: EmbeddingModel | str | Path,
        *,
        query_prompt_name: str | None = None,
        document_prompt_name: str | None = None,
        dimensions: int | None = None,
        **options: Any,
    ) -> None:
        """`model` is an EmbeddingModel, or what to load with `options`, its arguments. The prompts are names in
        `model.prompts`; None for the one that sentence-transformers uses for queries and documents, if the model has
        it. Raises TypeError for options of a loaded model, and the errors of EmbeddingModel."""
        if isinstance(model, EmbeddingModel) and options:
            raise TypeError(f"{', '.join(options)}: options are for loading, and this model is loaded")
        self.model = model if isinstance(model, EmbeddingModel) else EmbeddingModel(model, **options)
        self.query_prompt_name = query_prompt_name or query_prompt(self.model.prompts)
        self.document_prompt_name = document_prompt_name or document_prompt(self.model.prompts)
        self.dimensions = dimensions

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self._embed(texts, self.document_prompt_name)

    def embed_query(self, text: str) -> list[float]:
        return self._embed([text], self.query_prompt_name)[0]

    def _embed(self, texts: list[str], prompt: str | None) -> list[list[float]]:
        if not texts:
            return []
        return self.model.embed(list(texts), prompt=prompt, dimensions=self.dimensions).tolist()
