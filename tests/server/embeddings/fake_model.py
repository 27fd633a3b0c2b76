"""A model of vectors and scores without weights, whose tokens are the words of a text. Its rows are known functions of
the tokens, so that a test can compute the answer of any request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pace.llm.encoding.embedder import LOGITS, TextTokens, check_texts
from pace.llm.encoding.texts import TooLong
from tests.waiting import PATIENCE

BEGIN, END = 1, 2
VOCAB_SIZE = 64
WIDTH = 8


class FakeEmbedder:
    """Computes rows at once, on a thread; not while `gate` is cleared. Counts what it computed."""

    hidden_size = WIDTH
    vocab_size = VOCAB_SIZE
    num_types = 2
    instructions = {"match": "w8 "}

    def __init__(self, max_length: int, num_labels: int) -> None:
        self.max_length, self.num_labels = max_length, num_labels
        self.driver = SimpleNamespace(engine=None, stepping_since=None, turns=None)
        self.gate = threading.Event()
        self.gate.set()
        self.num_begun = self.num_texts = 0
        self.computed: list[tuple[int, ...]] = []
        self.salts: list[str | None] = []
        self._threads = ThreadPoolExecutor(1)

    def submit(self, texts: Sequence[TextTokens], what: Any) -> Future[Tensor]:
        check_texts(self, texts)
        return self._threads.submit(self._compute, list(texts), what)

    def _compute(self, texts: list[TextTokens], what: Any) -> Tensor:
        self.num_begun += 1
        assert self.gate.wait(PATIENCE)
        self.num_texts += len(texts)
        self.computed += [text.tokens for text in texts]
        self.salts += [text.cache_salt for text in texts]
        rows = [row_of(text.tokens, self.num_labels if what == LOGITS else WIDTH) for text in texts]
        return torch.stack([-row if text.task else row for row, text in zip(rows, texts)])

    def close(self) -> None:
        self.gate.set()
        self._threads.shutdown(cancel_futures=True)


def row_of(tokens: Sequence[int], width: int) -> Tensor:
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    return torch.randn(width, generator=generator)


class FakeTokenizer:
    """The word "wN" is the token N, any other is 3. Only what a server needs of a tokenizer."""

    cls_token_id, sep_token_id, bos_token_id, eos_token_id = BEGIN, END, None, None
    chat_template = None
    model_max_length = 10**30

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [int(word[1:]) if word[:1] == "w" and word[1:].isdigit() else 3 for word in text.split()]
        return [BEGIN, *ids, END] if add_special_tokens else ids

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}


class FakeModel:
    """What `EmbeddingService` uses of an EmbeddingModel."""

    pooling = ("mean",)
    default_prompt_name = None
    tasks = ("match",)
    default_task = None

    def __init__(self, max_length: int = 16, labels: Sequence[str] = (), matryoshka: Sequence[int] = ()) -> None:
        self.name = "fake"
        self.max_length = max_length
        self.dimensions = WIDTH
        self.matryoshka_dimensions = tuple(matryoshka)
        self.prompts = {"query": "w9 ", **FakeEmbedder.instructions}
        self.id2label = dict(enumerate(labels))
        self.num_labels = len(labels)
        self.can_rank = self.num_labels == 1
        self.tokenizer = FakeTokenizer()
        self.embedder = FakeEmbedder(max_length, self.num_labels)

    def tokenize(
        self, texts: Sequence[str], prompt: str | None = None, truncate: bool = True, task: str | None = None
    ) -> list[TextTokens]:
        before = self.prompts[prompt or task] if prompt or task else ""
        found = self._cut([self.tokenizer.encode(before + text) for text in texts], truncate)
        return [replace(text, task=task) for text in found]

    def tokenize_to_classify(self, texts: Sequence[Any], truncate: bool = False) -> list[TextTokens]:
        are_pairs = any(isinstance(text, tuple) for text in texts)
        return self.tokenize_pairs(texts, truncate) if are_pairs else self.tokenize(texts, None, truncate)

    def tokenize_pairs(
        self, pairs: Sequence[tuple[str, str]], truncate: bool = False, instruction: str | None = None
    ) -> list[TextTokens]:
        if instruction is not None:
            raise ValueError("instruction: this model takes none")
        encode = self.tokenizer.encode
        return self._cut([[*encode(first), *encode(second)[1:]] for first, second in pairs], truncate)

    def _cut(self, rows: list[list[int]], truncate: bool) -> list[TextTokens]:
        for index, ids in enumerate(rows):
            if len(ids) > self.max_length:
                if not truncate:
                    raise TooLong(index, len(ids), self.max_length)
                rows[index] = [*ids[: self.max_length - 1], END]
        return [TextTokens(tuple(ids)) for ids in rows]

    def check_dimensions(self, dimensions: int) -> None:
        allowed = self.matryoshka_dimensions or range(1, WIDTH + 1)
        if dimensions not in allowed:
            raise ValueError(f"dimensions must be in {allowed}; got {dimensions}")

    def submit_rows(self, texts: Sequence[TextTokens]) -> Future[Tensor]:
        return self.embedder.submit(texts, self.pooling)

    def submit_logits(self, texts: Sequence[TextTokens]) -> Future[Tensor]:
        return self.embedder.submit(texts, LOGITS)

    def finish_rows(self, rows: Tensor, dimensions: int | None = None, normalise: bool | None = None) -> Tensor:
        rows = rows[:, :dimensions]
        return rows if normalise is False else torch.nn.functional.normalize(rows)

    def to_scores(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits[:, 0])

    def to_probabilities(self, logits: Tensor) -> Tensor:
        return torch.sigmoid(logits) if logits.shape[1] == 1 else torch.softmax(logits, 1)

    def close(self) -> None:
        self.embedder.close()
