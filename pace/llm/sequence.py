"""A sequence is data: tokens, how many of them the cache holds, and what is wanted of it. Nothing here computes."""

from __future__ import annotations

import copy
import itertools
import time
from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol

_ids = itertools.count()


class TokenSink(Protocol):
    """Who hears of a sequence's progress, on the thread that owns the engine and in the middle of its step: it notes
    what it is told, wakes who waits, and returns at once."""

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """A generated token, which is in `sequence.tokens` by now; its log-probability where asked for."""
        ...

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        """The last call, once: the sequence has left the engine, for `reason` ("error": because of `error`)."""
        ...


class NullSink:
    """Hears nothing."""

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        pass

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        pass


NULL_SINK = NullSink()


@dataclass(frozen=True, slots=True)
class TextRules:
    """How the generated tokens of a sequence become text (see `detokenizer.py`)."""

    context: tuple[int, ...] = ()
    """Tokens of the prompt that decide how the text goes on after it. Empty where the text begins by itself, as in a new
    turn of a chat: it then begins without the blank that SentencePiece puts before a word."""
    prompt_end: str = ""
    """Text of the prompt that the generated tokens begin with: token healing took it from the prompt's tokens."""
    hidden: frozenset[int] | None = None
    """Tokens that are no text; None for the special tokens of the tokenizer."""


PLAIN_TEXT = TextRules()
"""For a text that begins by itself."""


class Sequence:
    """One row of tokens on its way through the engine.

    Who changes what: the engine appends to `tokens` and sets `finish_reason`; the cache manager alone changes
    `block_table` and `num_computed`; the scheduler moves the sequence between its queues. `tokens` only grows while the
    sequence is in the engine, but for step callbacks that take some back, so its owner may read new ones from another
    thread.

    `strategy` decides what becomes of the sequence's logits (see `sampler.py`), `stopping` when it ends (see
    `stopping_criteria.py`), `mask` which tokens may come at all (see `masks.py`); all are made anew for each sequence.
    """

    def __init__(self, prompt: list[int], strategy: Any, stopping: Any, max_length: int) -> None:
        self.id = next(_ids)
        self.tokens: list[int] = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.text_rules = PLAIN_TEXT
        self.strategy = strategy
        self.stopping = stopping
        self.sink: TokenSink = NULL_SINK
        self.steps: Any = None
        """A `RowSteps`, where the caller wants to be asked on the way."""
        self.is_held = False
        """True from the token on after which the caller is asked: no more come before it is parked and goes on."""
        self.mask: Any = None
        """A `SequenceMask`; None where every token may come."""
        self.max_length = max_length
        """Tokens, prompt included, at which it finishes with "length" at the latest; what the cache must be able to
        hold."""
        self.wanted_from: int | None = None
        """Position of the first token whose logits are wanted; None for the last token, whichever it is at the time."""
        self.priority = 0
        """A head start in the order of the scheduler, which says how much; negative for one that has time."""
        self.place: tuple[int, int] | None = None
        """In the scheduler's order, smallest first; None while it neither waits nor runs. The scheduler gives it."""

        self.adapter: Hashable = None
        """Names what is added to the model's weights where it computes this sequence; None for nothing."""
        self.cache_salt: str | None = None
        """Sequences share cached blocks of the same tokens only where this is the same, too. Set before the sequence
        is submitted; a fork takes over its source's."""
        self.num_computed = 0
        """Tokens whose keys and values are in the cache."""
        self.block_table = array("i")
        """Blocks that hold them, in order; may reach beyond `num_computed`. -1 for a block that was given back, since no
        later position sees it. Of the first group of layers (`KVSpec.groups`)."""
        self.more_tables: list[array] = []
        """Those of the other groups."""
        self.recomputed_length = 0
        """The model's `recompute_length`, once the sequence has grown to it and was computed again from its start."""

        self.finish_reason: str | None = None
        """"stop", "length", "cancelled", or "error" with `error` set."""
        self.error: BaseException | None = None
        self.prompt_sharers: list[Sequence] = []
        """Sequences of the same prompt that wait to take over its blocks."""
        self.waits_for_prompt = False
        """True while this one is in another's `prompt_sharers`."""
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        """Log-probability of each prompt token after those before it, where asked for; None for the first, and for what
        is not yet computed."""
        self.score: float | None = None
        """Score of a continuation that beam search found."""
        self.times = Times()

    @property
    def block_tables(self) -> list[array]:
        """Of all groups of layers."""
        return [self.block_table, *self.more_tables]

    @property
    def logits_from(self) -> int:
        """Logits are wanted of the positions from here on."""
        return len(self.tokens) - 1 if self.wanted_from is None else self.wanted_from

    @property
    def rope_length(self) -> int:
        """The least length that rope scaling looks at: the prompt's, or that of what was computed again as
        one."""
        return max(self.num_prompt_tokens, self.recomputed_length)

    @property
    def num_pending(self) -> int:
        """Tokens not yet in the cache: the rest of the prompt, or 1 between two decode steps."""
        return len(self.tokens) - self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def generated(self) -> list[int]:
        """A copy of the tokens after the prompt."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token: int) -> None:
        """Adds a generated token."""
        self.tokens.append(token)
        if self.times.first_token is None:
            self.times.first_token = time.perf_counter()

    def report_to(self, sink: TokenSink) -> None:
        """Has `sink` hear of the sequence, after who asks its caller on the way."""
        self.sink = sink if self.steps is None else self.steps.before(sink, self)

    def take_back(self, num_generated: int) -> None:
        """Forgets all but the first generated tokens; the sequence is not in a step."""
        del self.tokens[self.num_prompt_tokens + num_generated :]
        del self.logprobs[num_generated:]
        self.stopping.rewind(num_generated)

    def fail(self, error: BaseException) -> None:
        """Ends the sequence with an error, which its owner raises; other sequences go on."""
        self.error = error
        self.finish_reason = "error"

    def outcome(self) -> Sequence:
        """A finished sequence without what it needed to get there: its strategy's and mask's state may be large."""
        outcome = copy.copy(self)
        outcome.strategy, outcome.mask, outcome.prompt_sharers = None, None, []
        outcome.block_table, outcome.more_tables = array("i"), []
        outcome.sink = NULL_SINK
        return outcome

    def __repr__(self) -> str:
        return (
            f"Sequence(id={self.id}, prompt={self.num_prompt_tokens}, generated={self.num_generated}, "
            f"computed={self.num_computed}, blocks={len(self.block_table)}, finished={self.finish_reason})"
        )


@dataclass(slots=True)
class Times:
    """Seconds on the clock of `time.perf_counter`, and what drafts and the prefix cache brought."""

    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    """When it first got a place in the steps."""
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_forced: int = 0
    """Tokens that a mask made certain, and that were computed together; not among those drafted."""
    num_reused: int = 0
    """Tokens of the prompt whose keys and values the prefix cache had."""
    step_seconds: float = 0.0
    """This sequence's share of the decode steps that were measured, drafting included."""
    plain_seconds: float = 0.0
    """What the same tokens would have taken in steps without drafts, by what these were measured to take."""

    def count_drafts(self, span: Span, num_accepted: int) -> None:
        """Counts the drafts of a span, of which the first `num_accepted` came true."""
        num_forced = min(num_accepted, span.num_forced)
        self.num_forced += num_forced
        self.num_accepted += num_accepted - num_forced
        self.num_drafted += len(span.drafts) - span.num_forced


@dataclass(slots=True)
class Span:
    """Tokens of one sequence to compute in one step: `sequence.tokens[start : start + num_tokens]`, then `drafts`."""

    sequence: Sequence
    start: int
    num_tokens: int
    drafts: list[int] = field(default_factory=list)
    """Proposed tokens after the last known one, to be verified; only where the span reaches the end of the tokens."""
    num_forced: int = 0
    """Number of the first drafts that are all the sequence's mask allows."""
    num_certain: int = 0
    """Number of the first drafts that are kept unseen: no logits are wanted of the rows that would verify them."""

    def keep_drafts(self, drafts: list[int]) -> None:
        """Drops all drafts but these, the first ones."""
        self.drafts = drafts
        self.num_forced = min(self.num_forced, len(drafts))
        self.num_certain = min(self.num_certain, len(drafts))

    @property
    def end(self) -> int:
        """Position after the last token of the span, drafts included: the cache must have room up to here."""
        return self.start + self.num_tokens + len(self.drafts)

    @property
    def num_rows(self) -> int:
        """Rows of logits wanted: those from `sequence.logits_from` on, but for certain drafts."""
        return max(0, self.end - max(self.start, self.sequence.logits_from + self.num_certain))


@dataclass(frozen=True, slots=True)
class TakenBack:
    """Tells of generated tokens, the last ones so far, that a step callback has taken back."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the model's own probability of a token, and of the most likely ones in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability), most likely first."""
    rank: int | None = None
    """1 for the most likely token; known of tokens of prompts alone."""
    text: str = field(default="", compare=False)
    """The token as text, in the outputs of a model that has a tokenizer; with U+FFFD for what is no character."""
    top_texts: tuple[str, ...] = field(default=(), compare=False)
    """Those of `top`."""
