"""A sequence: its tokens, how many of them are cached, and the settings that decide its output. Data only."""

from __future__ import annotations

import copy
import itertools
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from pace.media.media import MediaSpan
from pace.ops.draws import Edits
from pace.ops.rules import Rules

_ids = itertools.count()

T = TypeVar("T")

AdapterKey = tuple[tuple[str, float], ...]
"""Adapters of a sequence: (digest of its contents, weight) of each, sorted, no digest twice. () for the base model."""


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
        """Called once, last: the sequence has left the engine for `reason`, which is "error" if there is an `error`."""
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


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What the sampler's batched call does with the rows of a span: edit a few logits, pick a token, record."""

    edits: Callable[[Span], list[list[Edits]]] | None = None
    """Returns the edits of each wanted row; None if nothing is edited."""
    rules: Rules | None = None
    """Rules of the draw; None to take the largest logit."""
    seed: int = 0
    num_logprobs: int | None = None
    """Records the log-probability of the token, and of this many most likely ones; None records nothing."""

    @property
    def needs_sampling(self) -> bool:
        """True if more than the largest logit is needed."""
        return self.rules is not None or self.edits is not None or self.num_logprobs is not None


class Strategy(Protocol):
    """Decides what is done with the logits of one sequence. Each sequence has its own strategy. A subclass that picks
    tokens changes the defaults."""

    plan: RowPlan | None = None
    """The plan by which the sampler handles all rows in one call, and accepts drafts; None to call `choose`."""
    rules: Rules | None = None
    """Rules of the draw; None to take the largest logit."""
    takes_drafts: bool = False
    """True if the sequence continues with one token of each row, so that drafts can be verified."""
    needs_every_row: bool = True
    """True if the strategy needs the logits even where the mask leaves a single token."""
    num_logprobs: int | None = None
    is_unmasked: bool = False
    """True if log-probabilities cover all tokens, including those that the sequence's mask forbids."""

    def choose(self, ops: Any, logits: Tensor, span: Span) -> list[int]:
        """Takes masked `logits [rows, V]` of the span's wanted rows, which it must not keep or change. Returns the
        tokens that the sequence continues with: none, one, or one more than the drafts it accepts. The last rows of
        drafts may be missing if no token can be picked from them. Changes no token list."""
        ...

    def follow(self, tokens: list[int]) -> None:
        """Called between two steps, after the sequence lost some of its last tokens."""

    def guess(self, ops: Any, logits: Tensor, num_generated: int) -> int:
        """Returns the token after `num_generated` others if `logits [V]` were the model's, after the processors; -1 if
        none is left. Draft models use it for strategies that take drafts."""
        ...


class RowStrategy(Strategy, Protocol):
    """Takes rows of the final norm of a sequence with `takes_rows`, and picks no token."""

    def take(self, rows: Tensor, span: Span) -> None:
        """Takes `rows [n, W]` of the last n tokens of the span, which it must not keep. Rows may repeat after a dropped
        cache, with equal content. It sets `finish_reason` of the sequence once it has all."""
        ...


class Stopping(Protocol):
    """Decides when a sequence ends. The defaults suit one that has no text."""

    def stop_now(self, sequence: Sequence) -> str | None:
        """Returns the finish reason after the sequence's last token, or None to continue."""
        ...

    def rewind(self, num_generated: int) -> None:
        """Drops all generated tokens but the first `num_generated`."""


class Mask(Protocol):
    """The tokens that may come next in one sequence (`SequenceMask`)."""

    error: BaseException | None
    """Error that could not be raised at once."""

    @property
    def releases_gil(self) -> bool: ...

    def follow(self, sequence: Sequence) -> None: ...

    def is_finished_after(self, sequence: Sequence) -> bool: ...

    def forced_after(self, sequence: Sequence, vocab_size: int) -> list[int]: ...

    def cut(self, sequence: Sequence, drafts: list[int]) -> list[int]: ...

    def fill(self, rows: Tensor, drafts: list[int]) -> tuple[int, BaseException | None]: ...


class Steps(Protocol):
    """Step points of one sequence (`RowSteps`)."""

    def before(self, sink: Any, sequence: Sequence) -> TokenSink:
        """Returns a sink that finds step points and forwards events to `sink`."""
        ...


@dataclass(slots=True)
class StateStep:
    """Slots that a step reads and writes for one span; `StateSpans` has the meaning."""

    read: int
    replay: int
    write: int
    certain: int
    marks: list[tuple[int, int]]
    """(tokens of the span before the mark, slot), ascending."""


@dataclass(slots=True)
class SequenceState:
    """Slots of one sequence. `slot` has the states after the first `num_computed - pending` tokens."""

    slot: int = -1
    """-1 for zeros: no token is computed."""
    pending: int = 0
    """Number of accepted drafts whose updates are still in the journal of `slot`."""
    spare: int = -1
    """Slot that the next step writes; -1 if it writes `slot` itself."""
    held: int = -1
    """Slot of the states after the first `num_held` tokens, to go back to; -1 for none."""
    num_held: int = 0
    step: StateStep | None = None
    """The step under way."""
    marks: list[tuple[int, int]] = field(default_factory=list)
    """(number of tokens, slot) of states that the last step wrote for the prefix cache."""
    branch: int = 0
    """Number of tokens up to which the prefix cache knew the text, but not its states."""
    tail: int = 0
    """Number of tokens before the mark that moves along with a text that is being generated."""


class Sequence:
    """One row of tokens on its way through the engine.

    Ownership: the engine appends to `tokens` and sets `finish_reason`. Only the cache manager changes `block_table`,
    `state` and `num_computed`. The scheduler moves the sequence between its queues. Only step callbacks remove tokens
    while the sequence is in the engine. Otherwise `tokens` grows, so its owner may read new ones from another thread.

    `strategy` chooses tokens from the logits, `stopping` ends the sequence, and `mask` limits the allowed tokens. Each
    sequence has its own.
    """

    def __init__(self, prompt: list[int], strategy: Strategy | None, stopping: Stopping, max_length: int) -> None:
        self.id = next(_ids)
        self.tokens: list[int] = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.media: tuple[MediaSpan, ...] = ()
        """Images and clips of the prompt, in order. Set it before the sequence is submitted."""
        self.text_rules = PLAIN_TEXT
        self.strategy = strategy
        self.stopping = stopping
        self.sink: TokenSink = NULL_SINK
        self.steps: Steps | None = None
        """Set if the caller has a step callback."""
        self.is_held = False
        """True from the token at a step point on: no more tokens are generated before the sequence is parked and
        resumed."""
        self.mask: Mask | None = None
        """None if every token is allowed."""
        self.max_length = max_length
        """Number of tokens, prompt included, at which it finishes with "length". The cache must be able to hold
        them."""
        self.wanted_from: int | None = None
        """Position of the first token whose logits are needed; None for the last token at the time."""
        self.takes_rows = False
        """True if `strategy` is a `RowStrategy`, which gets rows of the final norm in place of logits."""
        self.priority = 0
        """Priority in the scheduler's order; higher runs earlier, negative runs later."""
        self.sort_key: tuple[int, int] | None = None
        """Sort key in the scheduler's order, smallest first; set by the scheduler. None while the sequence neither
        waits nor runs."""

        self.adapter: AdapterKey = ()
        """Adapters that its tokens are computed with, all of them loaded. Set it before the sequence is submitted; a
        fork inherits it."""
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
        self.state = SequenceState()
        """Slots of its states, in a model that has any."""
        self.recomputed_length = 0
        """The model's `recompute_length`, set once the sequence has reached it and was recomputed from its start."""

        self.finish_reason: str | None = None
        """"stop", "length", "cancelled", or "error" with `error` set."""
        self.error: BaseException | None = None
        self.prompt_sharers: list[Sequence] = []
        """Sequences with the same first tokens that wait to share their blocks."""
        self.num_shared: int | None = None
        """Number of first tokens that `prompt_sharers` have in common with it; None for the same prompt."""
        self.waits_for_prompt = False
        """True while this sequence is in another's `prompt_sharers`."""
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        """Log-probability of each prompt token given those before it, if requested; None for the first, and for tokens
        not yet computed."""
        self.score: float | None = None
        """Score of a continuation found by beam search."""
        self.stats = SequenceStats()

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
        """Minimum length used by rope scaling: the prompt's length, or the recomputed length if that is greater."""
        return max(self.num_prompt_tokens, self.recomputed_length)

    @property
    def num_to_share(self) -> int:
        """Number of first tokens whose blocks `prompt_sharers` get: of a prompt, all but the last, whose logits each of
        them needs."""
        return self.num_prompt_tokens - 1 if self.num_shared is None else self.num_shared

    def share_prompt(self, sharers: list[Sequence], num_shared: int | None = None) -> None:
        """Lets other sequences wait for the blocks of the prompt that this one computes, or of its first `num_shared`
        tokens. Call it before they are submitted."""
        self.prompt_sharers, self.num_shared = sharers, num_shared
        for sharer in sharers:
            sharer.waits_for_prompt = True

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
        if self.stats.first_token is None:
            self.stats.first_token = time.perf_counter()

    def report_to(self, sink: TokenSink) -> None:
        """Sets the receiver of the sequence's tokens; step callbacks run before it."""
        self.sink = sink if self.steps is None else self.steps.before(sink)

    def rollback(self, num_generated: int) -> None:
        """Removes all but the first `num_generated` generated tokens. The sequence must not be in a step."""
        del self.tokens[self.num_prompt_tokens + num_generated :]
        del self.logprobs[num_generated:]
        self.stopping.rewind(num_generated)

    def fail(self, error: BaseException) -> None:
        """Ends the sequence with an error, which its owner raises. Other sequences continue."""
        self.error = error
        self.finish_reason = "error"

    def outcome(self) -> Sequence:
        """Returns a copy of a finished sequence without its strategy, mask and media, which may be large."""
        outcome = copy.copy(self)
        outcome.strategy, outcome.mask, outcome.prompt_sharers = None, None, []
        outcome.media = ()
        outcome.block_table, outcome.more_tables, outcome.state = array("i"), [], SequenceState()
        outcome.sink = NULL_SINK
        return outcome

    def __repr__(self) -> str:
        return (
            f"Sequence(id={self.id}, prompt={self.num_prompt_tokens}, generated={self.num_generated}, "
            f"computed={self.num_computed}, blocks={len(self.block_table)}, finished={self.finish_reason})"
        )


@dataclass(slots=True)
class SequenceStats:
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
    def num_wanted(self) -> int:
        """Number of rows of logits, or of the final norm, that are needed: those from `sequence.logits_from` on,
        without certain drafts."""
        return max(0, self.end - max(self.start, self.sequence.logits_from + self.num_certain))

    @property
    def num_rows(self) -> int:
        """Number of rows of logits needed."""
        return 0 if self.sequence.takes_rows else self.num_wanted


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
    """Text of the token, if the model has a tokenizer; bytes that form no character become U+FFFD."""
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
