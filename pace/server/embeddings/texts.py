"""Tokenises the texts of jobs, and checks them against the model. Runs in workers."""

from __future__ import annotations

import itertools
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pace.llm.encoding.embedder import TextTokens
from pace.llm.encoding.texts import TooLong
from pace.server.embeddings.inputs import Text, is_token, read_text
from pace.server.embeddings.jobs import CLASSIFY, EMBED, SCORE, EncodingJob
from pace.server.errors import ApiError, invalid
from pace.server.limits import Limits

if TYPE_CHECKING:
    from pace.llm.embedding_model import EmbeddingModel

BYTES_FACTOR = 4
"""Bytes for each token of the context, in units of `Limits.bytes_per_token`. Tokenizers of encoders drop blanks, and
make one token of a long word that they do not know."""


class TextReader:
    """Reads texts for one model, one thread at a time: a tokenizer is not safe to share."""

    def __init__(self, model: EmbeddingModel, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._lock = threading.Lock()
        self._max_bytes = BYTES_FACTOR * limits.bytes_per_token * model.max_length

    def read(self, job: EncodingJob, begin: int, end: int) -> list[TextTokens]:
        """Returns the tokens of some of a job's texts. Raises ApiError."""
        places = job.places[begin:end]
        texts = [self._checked(text, place, job) for text, place in zip(job.texts[begin:end], places)]
        with self._lock:  # mostly free, except if a cancelled request is still being read
            found = self._tokenise(texts, places, job)
        for tokens, place in zip(found, places):
            self._check_length(tokens, place)
        return found

    def _checked(self, text: Any, place: str, job: EncodingJob) -> Text | tuple[str, str]:
        """Returns one text or pair. Raises ApiError for one that is wrong without tokenising it."""
        read = text if isinstance(text, tuple) else read_text(text, place)
        if self._model.tokenizer is None and not (isinstance(read, list) and all(map(is_token, read))):
            raise ApiError(400, f"{place}: this model has no tokenizer: send token ids", param=place)
        if isinstance(read, list):
            self._check_ids(read, place, job)
        elif job.max_tokens is None:
            num_bytes = sum(len(part.encode()) for part in ([read] if isinstance(read, str) else read))
            if num_bytes > self._max_bytes:
                raise self._too_large(f"{num_bytes} bytes are more than {self._model.max_length} tokens", place)
        return read

    def _check_ids(self, parts: list[int | str], place: str, job: EncodingJob) -> None:
        if job.prompt is not None:
            raise ApiError(
                400, f"{place}: token ids are used as they are; leave out prompt_name, or send texts", param=place
            )
        size = self._model.embedder.vocab_size
        wrong = next((part for part in parts if isinstance(part, int) and part >= size), None)
        if wrong is not None:
            raise ApiError(
                400,
                f"{place}: token ids of this model are from 0 to {size - 1}, got {wrong}. These may be ids of another "
                "tokenizer: LangChain's OpenAIEmbeddings needs check_embedding_ctx_length=False",
                param=place,
            )

    def _tokenise(self, texts: list[Any], places: list[str], job: EncodingJob) -> list[TextTokens]:
        found: dict[int, TextTokens] = {}
        for kind in (str, tuple):
            indexes = [index for index, text in enumerate(texts) if isinstance(text, kind)]
            if not indexes:
                continue
            try:
                found |= zip(indexes, self._by_model([texts[index] for index in indexes], kind is tuple, job))
            except TooLong as error:
                place = places[indexes[error.index]]
                raise self._too_large(f"{error.length} tokens", place, n_prompt_tokens=error.length) from None
            except (TypeError, ValueError) as error:
                param = places[0].partition("[")[0] if job.instruction is None else "instruction"
                raise ApiError(400, str(error), param=param) from None
        for index, text in enumerate(texts):
            if index not in found:
                most = None if job.max_tokens is None else self._model.max_length
                task = job.task or self._model.default_task
                found[index] = TextTokens(tuple(self._ids(text))[:most], task=task if job.what == EMBED else None)
        return [self._shortened(found[index], job) for index in range(len(texts))]

    def _by_model(self, texts: list[Any], are_pairs: bool, job: EncodingJob) -> list[TextTokens]:
        cut = job.max_tokens is not None
        if job.what == CLASSIFY:
            return self._model.tokenize_to_classify(texts, cut)
        if are_pairs:
            return self._model.tokenize_pairs(texts, cut, job.instruction)
        return self._model.tokenize(texts, job.prompt, cut, job.task)

    def _shortened(self, text: TextTokens, job: EncodingJob) -> TextTokens:
        """Returns a text cut to the tokens that the request allows. The special tokens at its end stay."""
        count = job.max_tokens
        if count is None or count < 0 or len(text.tokens) <= count:
            return text
        tokenizer = self._model.tokenizer
        names = () if tokenizer is None else ("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id")
        special = {getattr(tokenizer, name) for name in names}
        ends = tuple(reversed(list(itertools.takewhile(special.__contains__, reversed(text.tokens)))))
        if job.what == SCORE or len(ends) >= count:
            why = "pairs are only cut to the model's maximum" if job.what == SCORE else "that leaves no room for text"
            raise invalid("truncate_prompt_tokens", f"must be -1 or larger than {count}: {why}")
        types = None if text.types is None else text.types[:count]
        return replace(text, tokens=text.tokens[: count - len(ends)] + ends, types=types)

    def _ids(self, parts: list[int | str]) -> list[int]:
        """Returns token ids as given. Texts among them get no special tokens."""
        ids: list[int] = []
        for part in parts:
            ids += self._model.tokenizer.encode(part, add_special_tokens=False) if isinstance(part, str) else [part]
        return ids

    def _check_length(self, tokens: TextTokens, place: str) -> None:
        if not tokens.tokens:
            raise invalid(place, "has no tokens")
        if len(tokens.tokens) > self._model.max_length:
            raise self._too_large(f"{len(tokens.tokens)} tokens", place, n_prompt_tokens=len(tokens.tokens))

    def _too_large(self, what: str, place: str, **details: int) -> ApiError:
        """The message has the words that clients of OpenAI and of llama.cpp look for."""
        maximum = self._model.max_length
        return ApiError(
            400,
            f"{place} is too large: {what}. This model's maximum context length is {maximum} tokens; shorten it, or "
            "send truncate_prompt_tokens=-1 to cut it off",
            param=place,
            code="context_length_exceeded",
            n_ctx=maximum,
            **details,
        )
