"""A sequence: its tokens, how many of them are cached, and the settings that decide its output. Data only."""

from __future__ import annotations

import copy
import itertools
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

_ids = itertools.count()

T = TypeVar("T")


class TokenSink(Protocol):
    """Receiver of a sequence's tokens. Called on the engine's thread during a step, so it must record the token, wake
    waiting threads, and return at once."""

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        """Receives a generated token, already appended to `sequence.tokens`, and its log-probability if requested."""
        ...

    def rollback(self, sequence: Sequence, num_tokens: int) -> None:
        """A step callback has removed the last `num_tokens` generated tokens."""
        ...

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        """The last call, made once: the sequence has left the engine for `reason` ("error": because of `error`)."""
        ...


class NullSink:
    """Discards everything."""

    def token(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        pass

    def rollback(self, sequence: Sequence, num_tokens: int) -> None:
        pass

    def end(self, sequence: Sequence, reason: str, error: BaseException | None) -> None:
        pass


NULL_SINK = NullSink()


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules for turning the generated tokens of a sequence into text (see `detokenizer.py`)."""

    context: tuple[int, ...] = ()
    """Last tokens of the prompt that affect the text after it. Empty if the text stands alone, as in a new turn of a
    chat. It then begins without the blank that SentencePiece puts before a word."""
    prompt_end: str = ""
    """Text of the prompt that the generated tokens begin with: token healing removed it from the prompt's tokens."""
    hidden: frozenset[int] | None = None
    """Tokens omitted from the text; None for the tokenizer's special tokens."""


PLAIN_TEXT = TextRules()
"""Rules for a text without context."""


class Sequence:
    """One row of tokens on its way through the engine.

    Ownership: the engine appends to `tokens` and sets `finish_reason`. Only the cache manager changes `block_table` and
    `num_computed`. The scheduler moves the sequence between its queues. Only step callbacks remove tokens while the
    sequence is in the engine. Otherwise `tokens` grows, so its owner may read new ones from another thread.

    `strategy` chooses tokens from the logits (see `sampler.py`), `stopping` ends the sequence (see
    `stopping_criteria.py`), and `mask` limits the allowed tokens (see `masks.py`). Each sequence has its own.
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
        """A `RowSteps`, if the caller set a step callback."""
        self.is_held = False
        """True from the token at a step point on: no more tokens are generated before the sequence is parked and
        resumed."""
        self.mask: Any = None
        """A `SequenceMask`; None if every token is allowed."""
        self.max_length = max_length
        """Number of tokens, prompt included, at which it finishes with "length". The cache must be able to hold
        them."""
        self.wanted_from: int | None = None
        """Position of the first token whose logits are needed; None for the last token at the time."""
        self.priority = 0
        """Priority in the scheduler's order; higher runs earlier, negative runs later."""
        self.place: tuple[int, int] | None = None
        """Sort key in the scheduler's order, smallest first; set by the scheduler. None while the sequence neither
        waits nor runs."""

        self.cache_salt: str | None = None
        """Sequences share cached blocks only if this is the same. Set it before the sequence is submitted; a fork
        inherits it."""
        self.num_computed = 0
        """Tokens whose keys and values are in the cache."""
        self.block_table = array("i")
        """Blocks of the first group of layers (`KVSpec.groups`), in order; may reach beyond `num_computed`. -1 for a
        block that was freed because no later position sees it."""
        self.more_tables: list[array] = []
        """Block tables of the other groups."""
        self.recomputed_length = 0
        """The model's `recompute_length`, set once the sequence has reached it and was recomputed from its start."""

        self.finish_reason: str | None = None
        """"stop", "length", "cancelled", or "error" with `error` set."""
        self.error: BaseException | None = None
        self.prompt_sharers: list[Sequence] = []
        """Sequences of the same prompt that wait to share its blocks."""
        self.waits_for_prompt = False
        """True while this sequence is in another's `prompt_sharers`."""
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        """Log-probability of each prompt token given those before it, if requested; None for the first, and for tokens
        not yet computed."""
        self.score: float | None = None
        """Score of a continuation found by beam search."""
        self.times = Times()

    @property
    def block_tables(self) -> list[array]:
        """The block tables of all groups of layers."""
        return [self.block_table, *self.more_tables]

    @property
    def logits_from(self) -> int:
        """First position whose logits are needed."""
        return len(self.tokens) - 1 if self.wanted_from is None else self.wanted_from

    @property
    def rope_length(self) -> int:
        """Minimum length used by rope scaling: the prompt's length, or the length that was recomputed if greater."""
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
        """Sets the receiver of the sequence's tokens; step callbacks run before it."""
        self.sink = sink if self.steps is None else self.steps.before(sink)

    def rollback(self, num_generated: int) -> None:
        """Removes all but the first `num_generated` generated tokens. The sequence must not be in a step."""
        del self.tokens[self.num_prompt_tokens + num_generated :]
        del self.logprobs[num_generated:]
        self.stopping.rewind(num_generated)

    def fail(self, error: BaseException) -> None:
        """Ends the sequence with an error, which its owner raises. Other sequences go on."""
        self.error = error
        self.finish_reason = "error"

    def outcome(self) -> Sequence:
        """Returns a copy of a finished sequence without its strategy and mask, which may be large."""
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
    """Times in seconds on the clock of `time.perf_counter`, and statistics of drafts and the prefix cache."""

    submitted: float = field(default_factory=time.perf_counter)
    admitted: float | None = None
    """Time of its first step."""
    first_token: float | None = None
    finished: float | None = None
    num_preemptions: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_forced: int = 0
    """Tokens that were the only ones a mask allowed, computed together; not counted as drafted."""
    num_reused: int = 0
    """Prompt tokens found in the prefix cache."""
    step_seconds: float = 0.0
    """This sequence's share of the time of measured decode steps, drafting included."""
    plain_seconds: float = 0.0
    """Estimated time for the same tokens in steps without drafts, from measured steps."""

    def count_drafts(self, span: Span, num_accepted: int) -> None:
        """Counts the drafts of a span; the first `num_accepted` were accepted."""
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
    """Proposed tokens after the last known one, to be verified. Only if the span reaches the end of the tokens."""
    num_forced: int = 0
    """Number of first drafts that are the only tokens allowed by the sequence's mask."""
    num_certain: int = 0
    """Number of first drafts that are kept without verification: the logits that would verify them are not computed."""

    def keep_drafts(self, drafts: list[int]) -> None:
        """Replaces the drafts by `drafts`, the first of them."""
        self.drafts = drafts
        self.num_forced = min(self.num_forced, len(drafts))
        self.num_certain = min(self.num_certain, len(drafts))

    @property
    def end(self) -> int:
        """Position after the last token of the span, drafts included. The cache must have room up to here."""
        return self.start + self.num_tokens + len(self.drafts)

    @property
    def num_rows(self) -> int:
        """Number of rows of logits needed: those from `sequence.logits_from` on, without certain drafts."""
        return max(0, self.end - max(self.start, self.sequence.logits_from + self.num_certain))


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of the model's own probability of a token, and of the most likely tokens at its position."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token, log-probability), most likely first."""
    rank: int | None = None
    """1 for the most likely token; set for prompt tokens only."""
    text: str = field(default="", compare=False)
    """Text of the token, if the model has a tokenizer; bytes that are no character become U+FFFD."""
    top_texts: tuple[str, ...] = field(default=(), compare=False)
    """Texts of the tokens in `top`."""


def fork_by_copy(original: T) -> T:
    """Returns a copy of an object that follows one sequence's tokens. Lists, dicts, sets, bytearrays and deques among
    its attributes are copied too, but not their items."""
    fork = copy.copy(original)
    for name, value in vars(original).items():
        if isinstance(value, (list, dict, set, bytearray, deque)):
            setattr(fork, name, copy.copy(value))
    return fork
