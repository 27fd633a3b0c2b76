"""Answers of jobs: text in pieces, streamed or whole."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from pace.llm.chat.events import Event, Text
from pace.llm.chat.turn import TurnReader
from pace.llm.clients.notifiers import LoopNotifier
from pace.llm.clients.token_log import TokenEvent, TokenLog
from pace.llm.constraints.grammar_mask import GrammarTooComplex
from pace.llm.engine.driver import EngineDriver
from pace.llm.sampling.sampler import NoAllowedToken
from pace.llm.sequence import Sequence, TextRules
from pace.llm.text.reader import TextReader
from pace.llm.text.token_texts import TokenPiece, TokenTexts
from pace.server.errors import ApiError
from pace.server.jobs import PreparedJob


@dataclass(frozen=True, slots=True)
class Finish:
    """Reason for the end of a choice."""

    reason: str
    """ "stop", "length" or "tool_calls"."""
    stop: str | int | None = None
    """The stop string, or the id of a token given as one; None for the model's own end."""
    is_end_token: bool = False
    """True if the last token ended it, which shows no text."""


@dataclass(slots=True)
class Piece:
    """New part of a choice since it was last read."""

    index: int
    text: str
    tokens: list[TokenPiece] = field(default_factory=list)
    """Tokens whose text is in `text`, in order; empty unless tokens or log-probabilities are requested."""
    finish: Finish | None = None
    prompt: list[TokenPiece] | None = None
    """The prompt's tokens, in a choice's first piece, if requested."""
    events: list[Event] = field(default_factory=list)
    """Events of a chat answer: thoughts, text and calls. `text` is then the text among them."""

    @property
    def parts(self) -> list[Event]:
        """The events; only the text if there are none."""
        return self.events or ([Text(self.text)] if self.text else [])


@dataclass(frozen=True, slots=True)
class Usage:
    """Number of tokens of an answer so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    """Tokens of the completion that are thoughts."""
    audio_tokens: int = 0
    """Tokens of the prompt that are of sound."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class ChoiceReader:
    """Reads one row as text. Holds back text that may become a stop string or is an incomplete character, with its
    tokens."""

    def __init__(self, index: int, sequence: Sequence, prepared: PreparedJob) -> None:
        """Without a tokenizer texts are empty."""
        self.index = index
        self.sequence = sequence
        self.num_read = 0
        self._job = prepared.job
        self._text = sequence.stopping.text.fresh()
        turn = prepared.turn
        self._turn = None if turn is None or turn.is_plain else TurnReader(turn)
        self._token_texts = TokenTexts(self._text.tokenizer) if self._job.wants_tokens else None

    @property
    def num_thought(self) -> int:
        """Number of read tokens that are thoughts."""
        return 0 if self._turn is None else self._turn.num_thought

    def read(self, fresh: list[TokenEvent]) -> Piece | None:
        """Returns the piece of the row's next events; None if there is nothing to show. Raises the row's error."""
        end, finish = fresh[-1], None
        if end.error is not None:
            raise end.error
        is_ended = end.finish_reason is not None
        text = self._read_tokens(fresh[: len(fresh) - is_ended])
        if is_ended:
            text += self._take(self._text.flush())
            if self._token_texts is not None:
                self._token_texts.close(self._text.piece)
            finish = self._finish()
            if self._job.include_stop and isinstance(finish.stop, str):
                text += finish.stop
        tokens = [] if self._token_texts is None else self._token_texts.take(len(text), is_ended)
        if finish is not None and finish.is_end_token and tokens and not tokens[-1].text:
            tokens[-1] = tokens[-1].as_end()
        events: list[Event] = []
        if self._turn is not None:
            text, events = self._turn.drain(is_ended)
            if finish is not None and finish.reason == "stop" and self._turn.has_called:
                finish = replace(finish, reason="tool_calls")
        if not (text or tokens or events or finish is not None):
            return None
        return Piece(self.index, text, tokens, finish, events=events)

    def _read_tokens(self, fresh: list[TokenEvent]) -> str:
        """Returns the text that tokens make certain. They are detokenised at once unless the text of each is needed."""
        self.num_read += len(fresh)
        if fresh and self._token_texts is None and self._turn is None:
            return self._text.extend([event.token for event in fresh])
        text = ""
        for event in fresh:
            text += self._take(self._text.push(event.token))
            if self._token_texts is not None:
                self._token_texts.push(event.token, event.logprob, self._text.piece)
        return text

    def _take(self, text: str) -> str:
        """Passes text to the reader of the turn, if there is one, and returns it."""
        if self._turn is not None:
            self._turn.push(text)
        return text

    def _finish(self) -> Finish:
        sequence = self.sequence
        if sequence.finish_reason != "stop":
            return Finish(sequence.finish_reason)
        if (matched := sequence.stopping.text.matched) is not None:
            return Finish("stop", matched)
        token = sequence.tokens[-1]
        if token not in sequence.stopping.end_tokens:  # a grammar has ended
            return Finish("stop")
        is_own_end = token == getattr(self._text.tokenizer, "eos_token_id", None)
        return Finish("stop", None if is_own_end else token, is_end_token=True)


class Answer:
    """The engine's answer to one job: several choices, read as they are generated."""

    def __init__(self, driver: EngineDriver, prepared: PreparedJob, tokenizer: Any, max_running: int) -> None:
        """Submits the first sequences, and others as these end. At most `max_running` run at once, so that prompts of
        other requests get their turn. It must be at least the number of samples of a prompt. Raises the error that
        ended the driver."""
        self._driver = driver
        self.prepared = prepared
        self._job = prepared.job
        self._tokenizer = tokenizer
        self._sequences = [sequence for group in prepared.samples for sequence in group]
        self._waiting = deque(prepared.samples)
        self._num_submitted = 0
        self._max_running = max_running
        self._failure: ApiError | None = None
        self._log = TokenLog()
        self._num_read = 0
        self._is_due = False
        """True if the loop was notified of events since the last read."""
        self._notifier = LoopNotifier(self._note_events)
        self._log.subscribe(self._notifier)
        self._choices: list[ChoiceReader] = []
        self._choices_of_row: list[list[ChoiceReader]] = []
        for group in prepared.samples:
            for sequence in group:
                self._add_row(sequence, self._job.num_choices if len(group) == 1 else 1)
        self._prompts = {choice: self._job.wants_prompt for choice in self._choices}
        self._submit()

    @property
    def usage(self) -> Usage:
        """Usage of the tokens read so far; a prompt counts once, regardless of its number of choices."""
        firsts = [choice.sequence for choice in self._choices[:: self._per_prompt]]
        return Usage(
            prompt_tokens=sum(sequence.num_prompt_tokens for sequence in firsts),
            completion_tokens=0 if self._job.max_tokens == 0 else sum(choice.num_read for choice in self._choices),
            cached_tokens=sum(sequence.stats.num_reused for sequence in firsts),
            reasoning_tokens=sum(choice.num_thought for choice in self._choices),
            audio_tokens=sum(span.length for row in firsts for span in row.media if span.media.kind == "audio"),
        )

    @property
    def first_token(self) -> float | None:
        """Time of the first token of any choice, by `time.perf_counter`."""
        times = [sequence.stats.first_token for sequence in self._sequences]
        return min((when for when in times if when is not None), default=None)

    @property
    def _per_prompt(self) -> int:
        return max(self._job.num_choices, self._job.sampling.num_return_sequences)

    async def pieces(self, patience: float) -> AsyncIterator[list[Piece]]:
        """Yields new pieces as they are generated, until all choices are done; an empty list after `patience` seconds
        without any. Raises ApiError for the error of a row."""
        num_left = len(self._choices)
        while num_left:
            is_due = await self._notifier.wait_for(lambda: self._is_due, patience)
            self._is_due = False
            if self._failure is not None:
                raise self._failure
            events = self._log.events[self._num_read :]
            self._num_read += len(events)
            fresh: dict[int, list[TokenEvent]] = {}
            for event in events:
                fresh.setdefault(event.row, []).append(event)
            pieces = []
            for row, events in fresh.items():
                for choice in self._choices_of_row[row]:
                    if (piece := self._read(choice, events)) is not None:
                        pieces.append(piece)
                        num_left -= piece.finish is not None
            if pieces or not is_due:
                yield pieces

    async def whole(self) -> list[Piece]:
        """Returns each choice with all of its text. Raises as `pieces` does."""
        choices = [Piece(choice.index, "") for choice in self._choices]
        async for pieces in self.pieces(3600.0):
            for piece in pieces:
                choice = choices[piece.index]
                choice.text += piece.text
                choice.tokens += piece.tokens
                choice.events += piece.events
                choice.finish = piece.finish
                choice.prompt = choice.prompt or piece.prompt
        return self._best(choices)

    def cancel(self) -> None:
        """Ends all choices that have not ended; harmless afterwards."""
        self._notifier.close()
        self._waiting.clear()
        self._driver.abort(self._sequences)

    # ------------------------------------------------------------------------------------------------------------------

    def _add_row(self, sequence: Sequence, num_choices: int) -> None:
        """Adds a row, and a reader for each choice that it answers: several greedy choices share one row."""
        self._log.add(sequence)
        first = len(self._choices)
        own = [ChoiceReader(first + number, sequence, self.prepared) for number in range(num_choices)]
        self._choices += own
        self._choices_of_row.append(own)

    def _submit(self) -> None:
        """Submits the rows of prompts while there is room for them. Raises the error that ended the driver."""
        while self._waiting and (
            self._num_submitted - self._log.num_ended + len(self._waiting[0]) <= self._max_running
        ):
            group = self._waiting.popleft()
            self._num_submitted += len(group)
            self._driver.submit(group)

    def _note_events(self) -> None:
        """Called on the loop when there are new events."""
        self._is_due = True
        try:
            self._submit()
        except (RuntimeError, ValueError) as error:
            self._failure = ApiError(503, str(error))

    def _read(self, choice: ChoiceReader, events: list[TokenEvent]) -> Piece | None:
        try:
            piece = choice.read(events)
        except Exception as error:
            raise as_api_error(error) from error
        if piece is None:
            return None
        if piece.finish is not None and piece.finish.reason == "cancelled":
            raise ApiError(503, "the server is shutting down", headers={"retry-after": "10"})
        if self._job.max_tokens == 0:
            piece.text, piece.tokens = "", []
        if self._prompts.pop(choice, False):
            piece.prompt = self._prompt(choice.sequence)
        return piece

    def _prompt(self, sequence: Sequence) -> list[TokenPiece]:
        """Returns the tokens of a prompt with their texts, and log-probabilities if they were computed."""
        tokens = sequence.tokens[: sequence.num_prompt_tokens]
        logprobs = sequence.prompt_logprobs or [None] * len(tokens)
        rules = TextRules(hidden=None if self._job.skip_special_tokens else frozenset())
        text, texts = TextReader(self._tokenizer, rules=rules), TokenTexts(self._tokenizer)
        for token, logprob in zip(tokens, logprobs):
            texts.push(token, logprob, text.push(token))
        texts.close(text.flush())
        return texts.take(len(text.shown), is_last=True)

    def _best(self, choices: list[Piece]) -> list[Piece]:
        """Returns the choices to answer: for each prompt those with the highest mean log-probability, if more were
        computed."""
        n, per_prompt = self._job.num_choices, self._per_prompt
        if per_prompt == n:
            return choices
        kept: list[Piece] = []
        for first in range(0, len(choices), per_prompt):
            group = sorted(choices[first : first + per_prompt], key=mean_logprob, reverse=True)
            for choice in group[:n]:
                choice.index = len(kept)
                kept.append(choice)
        return kept


def mean_logprob(choice: Piece) -> float:
    values = [piece.logprob.logprob for piece in choice.tokens if piece.logprob is not None]
    return sum(values) / len(values) if values else 0.0


def as_api_error(error: BaseException) -> ApiError:
    """Returns the error that a client gets for a failed row: the engine's own message if it is about the request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, GrammarTooComplex):
        return ApiError(500, str(error), code="grammar_too_complex", headers={"x-should-retry": "false"})
    if isinstance(error, NoAllowedToken):
        return ApiError(
            400,
            f"after {error.num_generated} generated tokens no token is left to pick; loosen allowed_token_ids, "
            f"logit_bias, bad_words, no_repeat_ngram_size or the grammar",
        )
    if isinstance(error, ValueError):
        return ApiError(400, str(error))
    return ApiError(500, "the engine failed at this request; it goes on with others")
