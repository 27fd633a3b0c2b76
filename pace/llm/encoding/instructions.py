"""The prompt of Qwen3-Reranker: does the document meet the requirements, "yes" or "no"?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pace.llm.encoding.embedder import TextTokens
from pace.llm.encoding.texts import Pair, TooLong, fit_lengths
from pace.naming import check_text

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the "
    'answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The task without an instruction."""
BEFORE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
ANSWERS = ("yes", "no")
FAMILY = "Qwen3"
"""Models that know the prompt's marks begin with this name."""


def answer_ids(tokenizer: Any) -> tuple[int, int]:
    """Ids of the answers. Raises ValueError if they are no tokens of the vocabulary."""
    ids = [tokenizer.convert_tokens_to_ids(answer) for answer in ANSWERS]
    for answer, index in zip(ANSWERS, ids):
        if index is None or tokenizer.convert_ids_to_tokens(index) != answer:
            raise ValueError(
                f"its tokenizer has no token {answer!r}, and the score is read from the logits of {ANSWERS[0]!r} and "
                f"{ANSWERS[1]!r}"
            )
    return ids[0], ids[1]


class PairPrompt:
    """Writes a query and a document into the prompt. Queries come first, so that documents share their tokens."""

    def __init__(self, tokenizer: Any, max_length: int):
        """`max_length`: maximum number of tokens of the whole prompt."""
        self._tokenizer = tokenizer
        self._before, self._after = self._ids(BEFORE), self._ids(AFTER)
        self.max_length = max_length

    def pairs(self, pairs: Sequence[Pair], instruction: str | None, truncate: bool) -> list[TextTokens]:
        """Returns the tokens of each pair. With `truncate`, cuts the longer of query and document first. Raises
        ValueError for a pair that is too long otherwise, and for invalid Unicode."""
        task = INSTRUCTION if instruction is None else instruction
        check_text(task, "the instruction")
        found = []
        for index, (query, document) in enumerate(pairs):
            check_text(query, f"the first text of pair {index}")
            check_text(document, f"the second text of pair {index}")
            tokens = self._whole(self._ids(_body(task, query, document)))
            if len(tokens) > self.max_length:
                if not truncate:
                    raise TooLong(index, len(tokens), self.max_length)
                tokens = self._cut(task, query, document)
            found.append(TextTokens(tuple(tokens)))
        return found

    def _cut(self, task: str, query: str, document: str) -> list[int]:
        """The prompt of a query and a document of fewer tokens. Tokens may join where texts meet, so the room for texts
        shrinks until the whole fits."""
        texts = [self._ids(text) for text in (query, document)]
        room = self.max_length - len(self._whole(self._ids(_body(task, "", ""))))
        while room >= len(texts):
            cut = [ids[:length] for ids, length in zip(texts, fit_lengths([len(ids) for ids in texts], room))]
            tokens = self._whole(self._ids(_body(task, *map(self._tokenizer.decode, cut))))
            if len(tokens) <= self.max_length:
                return tokens
            room -= len(tokens) - self.max_length
        raise ValueError(f"max_seq_len={self.max_length} has no room for a pair of texts in the prompt; raise it")

    def _whole(self, body: list[int]) -> list[int]:
        return [*self._before, *body, *self._after]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _body(task: str, query: str, document: str) -> str:
    return f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
