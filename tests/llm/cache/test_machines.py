"""Operations in any order on every kind of cache. The bookkeeping stays right, and each sequence keeps the positions
that its next tokens attend to, also if blocks are shared."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from pace.batch import BLOCK_SIZE, KVBlocks
from pace.llm.cache.manager import CacheManager, spec_of
from pace.llm.cache.room import Room
from pace.llm.sequence import Sequence, Span
from tests.llm.cache.test_windows import WINDOWS
from tests.llm.fake_model import FakeModel
from tests.plugins.tiers import commit

STEP_TOKENS = 30
LONGEST = 160
MOST_SEQUENCES = 7
"""Bounds of one walk. Their product bounds its time, because each step checks all positions of all sequences."""


@dataclass(frozen=True)
class Kind:
    num_blocks: int = 24
    prefix_blocks: int = 0
    windows: tuple[int | None, ...] = (None, None)
    options: dict = field(default_factory=dict)
    num_slots: int = 0
    max_drafts: int = 0


KINDS = {
    "paged": Kind(12),
    "bmc": Kind(12, options={"kv_cache_type": "bmc", "bmc_rows": 50}),
    "dynamic": Kind(12, options={"kv_cache_type": "dynamic"}),
    "prefix": Kind(12, 7),
    "half": Kind(prefix_blocks=9, windows=WINDOWS["half"]),
    "half without a prefix cache": Kind(windows=WINDOWS["half"]),
    "most": Kind(prefix_blocks=11, windows=WINDOWS["most"]),
    "two windows": Kind(prefix_blocks=5, windows=WINDOWS["two windows"]),
    "all": Kind(prefix_blocks=6, windows=WINDOWS["all"]),
    "all short": Kind(prefix_blocks=3, windows=WINDOWS["all short"]),
    "all, two windows": Kind(prefix_blocks=8, windows=WINDOWS["all, two windows"]),
    "states": Kind(num_slots=5, max_drafts=4),
    "states, bmc": Kind(12, options={"kv_cache_type": "bmc"}, num_slots=9, max_drafts=2),
    "states, prefix": Kind(prefix_blocks=12, num_slots=9, max_drafts=4),
    "states, prefix, few slots": Kind(prefix_blocks=24, num_slots=2),
    "states, most": Kind(prefix_blocks=11, windows=WINDOWS["most"], num_slots=20, max_drafts=3),
    "states, all": Kind(prefix_blocks=11, windows=WINDOWS["all"], num_slots=12),
    "states alone": Kind(prefix_blocks=24, windows=(), num_slots=30, max_drafts=5),
}


class Machine:
    """Does random operations on a cache and checks that blocks keep the values stored in them.

    With a prefix cache a value depends on all tokens so far, as in a model. Without one each value is unique."""

    def __init__(self, kind: Kind, chance: random.Random) -> None:
        self.kind = kind
        self.chance = chance
        self.has_windows = any(kind.windows)
        model_spec = FakeModel(windows=kind.windows, num_states=bool(kind.num_slots)).kv_spec
        self.spec = spec_of(model_spec, kind.options.get("kv_cache_type", "paged"))
        slot_bytes = self.spec.slots(kind.max_drafts).slot_bytes
        num_bytes = kind.num_blocks * self.spec.block_bytes + kind.num_slots * slot_bytes
        self.cache = CacheManager(
            model_spec,
            num_bytes,
            prefix_cache_bytes=num_bytes * kind.prefix_blocks // kind.num_blocks,
            step_tokens=STEP_TOKENS,
            max_drafts=kind.max_drafts,
            num_slots=kind.num_slots,
            **kind.options,
        )
        self.layers = [
            (kv.k.numpy()[:, 0, 0], kv.group, layer.window)
            for kv, layer in zip(self.cache.kv, self.spec.layers)
            if isinstance(kv, KVBlocks)
        ]
        self.texts: dict[int, list[int]] = {}
        """Tokens that the states in each slot have seen."""
        self.journals: dict[int, list[int]] = {}
        self.sequences: list[Sequence] = []
        self.stored: dict[int, np.ndarray] = {}
        """Values that each sequence has stored at its computed positions, by sequence id."""
        self.num_stored = 0

    def step(self) -> str:
        """Does a random operation and returns its name."""
        may_begin = len(self.sequences) < MOST_SEQUENCES
        verbs = {"begin": 3 * may_begin}
        if self.sequences:
            verbs |= {"compute": 6, "truncate": 2, "fork": 3 * may_begin, "end": 1, "drop": 0.2}
        (verb,) = self.chance.choices(list(verbs), list(verbs.values()))
        getattr(self, verb)(*([] if verb in ("begin", "drop") else [self.chance.choice(self.sequences)]))
        return verb

    # -- operations ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Adds a sequence that begins with token 0 or 1 and counts up by one at a random position."""
        stem, length, split = self.chance.randint(0, 1), self.chance.randint(1, 120), self.chance.randint(0, 120)
        self.add(Sequence([stem + (position >= split) for position in range(length)], None, None, 4096), [])

    def compute(self, sequence: Sequence) -> None:
        cache, count = self.cache, self.chance.randint(1, STEP_TOKENS)
        cache.reuse(sequence)
        known = self.stored[sequence.id]
        self.stored[sequence.id] = np.append(known, self.values(sequence, len(known), sequence.num_computed))
        self.check(sequence)
        if self.chance.random() < 0.6:
            self.compute_some(sequence, count)
            return
        fits = cache.room_needed(sequence, len(sequence.tokens)).fits_in(cache.free_room)
        is_admitted = cache.admit(sequence, len(sequence.tokens))
        assert is_admitted == fits or self.kind.options and not is_admitted, "a run needs blocks side by side"
        free = cache.num_free_blocks
        known = -1
        while is_admitted and known < sequence.num_computed < len(sequence.tokens):  # unless it lost its states
            known = sequence.num_computed
            assert self.compute_some(sequence, count), "a sequence that was admitted found no room"
        is_alone = len(self.sequences) == 1 and not self.kind.prefix_blocks
        assert cache.num_free_blocks >= free or not is_admitted or not is_alone

    def compute_some(self, sequence: Sequence, count: int) -> bool:
        begin, end = sequence.num_computed, min(sequence.num_computed + count, len(sequence.tokens))
        if not self.cache.reserve(sequence, end):
            return False
        if begin == end:
            return True
        values, positions = self.values(sequence, begin, end), np.arange(begin, end)
        for number, (keys, group, _) in enumerate(self.layers):
            blocks = np.asarray(sequence.block_tables[group])[positions // BLOCK_SIZE]
            keys[blocks, positions % BLOCK_SIZE] = values + number * 2**20
        span = self.span(sequence, begin, end)
        self.cache.plan([span])
        self.run(span)
        least = span.start + span.num_tokens
        kept = self.chance.choice([end, self.chance.randint(min(least + span.num_certain, end), end), least])
        self.cache.commit(sequence, kept)
        assert sequence.num_computed == kept or kept < least + span.num_certain
        self.stored[sequence.id] = np.append(self.stored[sequence.id], values)[: sequence.num_computed]
        self.cache.publish(sequence)
        return True

    def span(self, sequence: Sequence, begin: int, end: int) -> Span:
        """Returns a span of these tokens. The last ones may be drafts, and the first of these certain."""
        most = min(self.kind.max_drafts, end - begin - 1)
        num_drafts = self.chance.choice([0, most])
        num_certain = self.chance.choice([0, 0, self.chance.randint(0, end - begin - 1 - num_drafts)])
        first = end - num_drafts - num_certain
        return Span(sequence, begin, first - begin, sequence.tokens[first:end], num_certain=num_certain)

    def run(self, span: Span) -> None:
        """Does what `StateSpans` says."""
        step = span.sequence.state.step
        if not self.kind.num_slots:
            return
        assert step is not None
        text = [*self.texts[step.read], *self.journals[step.read][: step.replay]] if step.read >= 0 else []
        assert text == span.sequence.tokens[: span.start], "the states of another text"
        text += span.sequence.tokens[span.start : span.end]
        for row, slot in [*step.marks, (step.certain, step.write)]:
            self.texts[slot] = text[: span.start + row]
            self.journals[slot] = [-1] * self.kind.max_drafts
        drafts = text[span.start + step.certain :]
        self.journals[step.write][: len(drafts)] = drafts

    def truncate(self, sequence: Sequence) -> None:
        length, num_computed = max(0, len(sequence.tokens) - self.cut()), sequence.num_computed
        self.cache.truncate(sequence, length)
        self.check_kept(sequence, min(num_computed, length))
        self.stored[sequence.id] = self.stored[sequence.id][: sequence.num_computed]
        del sequence.tokens[length:]
        self.lengthen(sequence)

    def fork(self, source: Sequence) -> None:
        target, num_computed = Sequence(source.tokens, None, None, 4096), max(0, source.num_computed - self.cut())
        self.cache.fork(source, target, num_computed)
        self.check_kept(target, num_computed)
        self.add(target, self.stored[source.id][: target.num_computed])
        self.lengthen(self.chance.choice([source, target]))

    def check_kept(self, sequence: Sequence, num_tokens: int) -> None:
        """Asserts that a sequence kept `num_tokens` positions, or fewer if it may."""
        least = 0 if self.has_windows or self.kind.num_slots else num_tokens
        assert least <= sequence.num_computed <= num_tokens

    def end(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.cache.free(sequence)
        assert self.cache.room_held(sequence) == Room()

    def drop(self) -> None:
        self.cache.reset(self.sequences)
        self.stored = {sequence.id: np.empty(0) for sequence in self.sequences}

    def cut(self) -> int:
        """Returns a distance from the end at which a sequence is cut or forked, mostly within its last blocks."""
        return self.chance.randint(0, self.chance.choice([2 * BLOCK_SIZE, LONGEST]))

    def lengthen(self, sequence: Sequence) -> None:
        count = min(self.chance.randint(1, 40), LONGEST - len(sequence.tokens))
        sequence.tokens += [self.chance.randint(0, 1)] * count

    # -- invariants ----------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, stored: object) -> None:
        self.sequences.append(sequence)
        self.stored[sequence.id] = np.array(stored)

    def values(self, sequence: Sequence, begin: int, end: int) -> np.ndarray:
        """Returns the values to store at positions `begin` to `end`. They are exact in float32."""
        if self.kind.prefix_blocks:
            chain = itertools.accumulate(sequence.tokens[:end], lambda *pair: hash(pair) % 2**20, initial=0)
            return np.array(list(chain)[begin + 1 :])
        self.num_stored += end - begin
        return np.arange(self.num_stored - (end - begin), self.num_stored)

    def check(self, sequence: Sequence) -> None:
        """Asserts that the cache holds all positions that the next one attends to."""
        end, stored, state = sequence.num_computed, self.stored[sequence.id], sequence.state
        assert len(stored) == end
        if state.slot >= 0:
            assert [*self.texts[state.slot], *self.journals[state.slot][: state.pending]] == sequence.tokens[:end]
        for number, (keys, group, window) in enumerate(self.layers):
            first = 0 if window is None else max(0, end - window + 1)
            if first == end:
                continue
            table = np.asarray(sequence.block_tables[group])[first // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
            assert (table >= 0).all(), f"a block is gone that is still seen: {sequence.block_tables[group]}"
            found = keys[table].reshape(-1)[first % BLOCK_SIZE :][: end - first] - number * 2**20
            assert found.tolist() == stored[first:].tolist(), f"layer {number} from position {first} on"

    def check_all(self) -> None:
        self.cache.check_integrity(self.sequences)
        for sequence in self.sequences:
            self.check(sequence)


@pytest.mark.parametrize("num_walks", [25, pytest.param(2000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", KINDS)
def test_any_order_of_verbs(name: str, num_walks: int) -> None:
    """Each commit runs other walks."""
    for number in range(num_walks * commit()[1], num_walks * (commit()[1] + 1)):
        machine, done = Machine(KINDS[name], random.Random(f"{name} {number}")), []
        try:
            for _ in range(40):
                done.append(machine.step())
                machine.check_all()
        except BaseException as error:
            error.add_note(f"walk {number}, after {', '.join(done)}")
            raise
