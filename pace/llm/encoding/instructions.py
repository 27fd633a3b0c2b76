"""Prompts that ask a causal model about a query and a document. That of Qwen3-Reranker: does the document meet the
requirements, "yes" or "no"? Or that of the checkpoint's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pace.llm.encoding.embedder import TextTokens
from pace.llm.encoding.settings import EncodingSettings, PairTemplate
from pace.llm.encoding.texts import Pair, TooLong, fit_lengths
from pace.naming import check_text, one_line

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
    """Writes a query and a document into the prompt of Qwen3-Reranker. Queries come first, so that documents share
    their tokens."""

    def __init__(self, tokenizer: Any, max_length: int):
        """`max_length`: maximum number of tokens of the whole prompt."""
        self._tokenizer = tokenizer
        self._before, self._after = self._ids(BEFORE), self._ids(AFTER)
        self.max_length = max_length

    def pairs(self, pairs: Sequence[Pair], instruction: str | None, truncate: bool) -> list[TextTokens]:
        """Returns the tokens of each pair. With `truncate`, cuts the longer of query and document first. Raises
        ValueError for a pair that is too long otherwise, and for invalid Unicode."""
        check_text(instruction or "", "the instruction")
        found = []
        for index, (query, document) in enumerate(pairs):
            check_text(query, f"the first text of pair {index}")
            check_text(document, f"the second text of pair {index}")
            tokens = self.tokens(instruction, query, document)
            if len(tokens) > self.max_length:
                if not truncate:
                    raise TooLong(index, len(tokens), self.max_length)
                tokens = self._cut(instruction, query, document)
            found.append(TextTokens(tuple(tokens)))
        return found

    def tokens(self, task: str | None, query: str, document: str) -> list[int]:
        """Returns the tokens of a prompt. `task`: None for the usual one."""
        task = INSTRUCTION if task is None else task
        body = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        return [*self._before, *self._ids(body), *self._after]

    def _cut(self, task: str | None, query: str, document: str) -> list[int]:
        """The prompt of a query and a document of fewer tokens. Tokens may join where texts meet, so the room for texts
        shrinks until the whole fits."""
        texts = [self._ids(text) for text in (query, document)]
        room = self.max_length - len(self.tokens(task, "", ""))
        while room >= len(texts):
            cut = [ids[:length] for ids, length in zip(texts, fit_lengths([len(ids) for ids in texts], room))]
            tokens = self.tokens(task, *map(self._tokenizer.decode, cut))
            if len(tokens) <= self.max_length:
                return tokens
            room -= len(tokens) - self.max_length
        raise ValueError(f"max_seq_len={self.max_length} has no room for a pair of texts in the prompt; raise it")

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


class TemplatePrompt(PairPrompt):
    """Writes them with a chat template, as sentence-transformers does: messages of the roles "query" and "document",
    after one of the role "system" for a task."""

    def __init__(self, tokenizer: Any, max_length: int, template: PairTemplate):
        """Raises NotImplementedError for a template that does not write both texts."""
        super().__init__(tokenizer, max_length)
        self._template = template
        try:
            text, why = self._text(None, "QUERY", "DOCUMENT"), "it leaves out one of the texts"
        except Exception as error:  # any error of the template
            text, why = "", one_line(error)
        if not ("QUERY" in text and "DOCUMENT" in text):
            raise NotImplementedError(
                f'the chat template does not write messages of the roles "query" and "document", which the scores of '
                f"this checkpoint need: {why}"
            )

    def tokens(self, task: str | None, query: str, document: str) -> list[int]:
        return self._ids(self._text(task, query, document))

    def _text(self, task: str | None, query: str, document: str) -> str:
        texts = {"system": task or None, "query": query, "document": document}
        messages = [{"role": role, "content": self._content(text)} for role, text in texts.items() if text is not None]
        return self._tokenizer.apply_chat_template(messages, tokenize=False, **self._template.variables)

    def _content(self, text: str) -> str | list[dict[str, str]]:
        return text if self._template.is_flat else [{"type": "text", "text": text}]


def pair_prompt(tokenizer: Any, max_length: int, settings: EncodingSettings, asks: bool) -> PairPrompt | None:
    """Returns what writes the pairs of a model; None if they are written as for a classifier. `asks`: True if its
    scores are logits of answers. Raises as `TemplatePrompt`."""
    if tokenizer is None or not (asks or settings.asks) or (settings.answers and settings.has_plain_pairs):
        return None
    if settings.answers and settings.pair_template is not None:
        return TemplatePrompt(tokenizer, max_length, settings.pair_template)
    return PairPrompt(tokenizer, max_length)
