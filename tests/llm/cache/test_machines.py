"""Any order of the verbs, on every kind of cache: the books stay right, and a sequence has what its next positions
see, whoever shares its blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from pace.batch import BLOCK_SIZE
from pace.llm.cache.manager import CacheManager, spec_of
from pace.llm.sequence import Sequence
from tests.llm.cache.window_kinds import WINDOWS
from tests.llm.fake_model import FakeModel

STEP_TOKENS = 30
LONGEST = 160
MOST_SEQUENCES = 7
"""Bounds of what a run may build. Their product bounds its time: each step looks at all positions of all sequences."""


@dataclass(frozen=True)
class Kind:
    num_blocks: int = 24
    prefix_blocks: int = 0
    windows: tuple[int | None, ...] = (None, None)
    options: dict = field(default_factory=dict)


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
}


class Machine(RuleBasedStateMachine):
    """What a block holds stays what its sequence has stored there. With a prefix cache that depends on all tokens so
    far, as in a model; without one each value is stored once."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind
        self.has_windows = any(kind.windows)
        model_spec = FakeModel(windows=kind.windows).kv_spec
        self.spec = spec_of(model_spec, kind.options.get("kv_cache_type", "paged"))
        self.cache = CacheManager(
            model_spec,
            kind.num_blocks * self.spec.block_bytes,
            prefix_cache_bytes=kind.prefix_blocks * self.spec.block_bytes,
            step_tokens=STEP_TOKENS,
            **kind.options,
        )
        self.layers = [
            (kv.k.numpy()[:, 0, 0], kv.group, layer.window) for kv, layer in zip(self.cache.kv, self.spec.layers)
        ]
        self.sequences: list[Sequence] = []
        self.stored: dict[int, np.ndarray] = {}
        """What each sequence has stored at its computed positions."""
        self.num_stored = 0

    def may_begin(self) -> bool:
        return len(self.sequences) < MOST_SEQUENCES

    def pick(self, number: int) -> Sequence:
        return self.sequences[number % len(self.sequences)]

    # -- the verbs -----------------------------------------------------------------------------------------------------

    @precondition(may_begin)
    @rule(stem=st.integers(0, 1), length=st.integers(1, 120), split=st.integers(0, 120))
    def begin(self, stem: int, length: int, split: int) -> None:
        """Two stems, each left at some place."""
        self.add(Sequence([stem + (position >= split) for position in range(length)], None, None, 4096), [])

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0, MOST_SEQUENCES - 1), count=st.integers(1, STEP_TOKENS), is_admitted=st.booleans())
    def compute(self, number: int, count: int, is_admitted: bool) -> None:
        sequence, cache = self.pick(number), self.cache
        cache.reuse(sequence)
        known = self.stored[sequence.id]
        self.stored[sequence.id] = np.append(known, self.values(sequence, len(known), sequence.num_computed))
        self.check(sequence)
        if not is_admitted:
            self.step(sequence, count)
            return
        fits = cache.blocks_needed(sequence, len(sequence.tokens)) <= cache.num_free_blocks
        is_admitted = cache.admit(sequence, len(sequence.tokens))
        assert is_admitted == fits or self.kind.options and not is_admitted, "a run needs blocks side by side"
        free = cache.num_free_blocks
        while is_admitted and sequence.num_computed < len(sequence.tokens):
            assert self.step(sequence, count), "a sequence that was admitted found no room"
        is_alone = len(self.sequences) == 1 and not self.kind.prefix_blocks
        assert cache.num_free_blocks >= free or not is_admitted or not is_alone

    def step(self, sequence: Sequence, count: int) -> bool:
        begin, end = sequence.num_computed, min(sequence.num_computed + count, len(sequence.tokens))
        if not self.cache.reserve(sequence, end):
            return False
        values, positions = self.values(sequence, begin, end), np.arange(begin, end)
        for number, (keys, group, _) in enumerate(self.layers):
            blocks = np.asarray(sequence.block_tables[group])[positions // BLOCK_SIZE]
            keys[blocks, positions % BLOCK_SIZE] = values + number * 2**20
        self.stored[sequence.id] = np.append(self.stored[sequence.id], values)
        self.cache.commit(sequence, end)
        self.cache.publish(sequence)
        return True

    @precondition(lambda self: self.sequences)
    @rule(
        number=st.integers(0, MOST_SEQUENCES - 1),
        cut=st.one_of(st.integers(0, 2 * BLOCK_SIZE), st.integers(0, LONGEST)),
        token=st.integers(0, 1),
        num_new=st.integers(1, 40),
    )
    def truncate(self, number: int, cut: int, token: int, num_new: int) -> None:
        sequence = self.pick(number)
        length, num_computed = max(0, len(sequence.tokens) - cut), sequence.num_computed
        self.cache.truncate(sequence, length)
        assert sequence.num_computed == min(num_computed, length) or self.has_windows and sequence.num_computed == 0
        self.stored[sequence.id] = self.stored[sequence.id][: sequence.num_computed]
        sequence.tokens[length:] = [token] * min(num_new, LONGEST - length)

    @precondition(lambda self: self.sequences and self.may_begin())
    @rule(number=st.integers(0, MOST_SEQUENCES - 1), cut=st.integers(0, LONGEST))
    def fork(self, number: int, cut: int) -> None:
        source = self.pick(number)
        target, count = Sequence(source.tokens, None, None, 4096), max(0, source.num_computed - cut)
        self.cache.fork(source, target, count)
        assert target.num_computed == count or self.has_windows and target.num_computed == 0
        self.add(target, self.stored[source.id][: target.num_computed])

    @precondition(lambda self: self.sequences)
    @rule(number=st.integers(0, MOST_SEQUENCES - 1))
    def end(self, number: int) -> None:
        sequence = self.pick(number)
        self.sequences.remove(sequence)
        self.cache.free(sequence)
        assert not self.cache.blocks_held(sequence)

    @precondition(lambda self: self.sequences)
    @rule()
    def drop(self) -> None:
        self.cache.reset(self.sequences)
        self.stored = {sequence.id: np.empty(0) for sequence in self.sequences}

    # -- what must hold ------------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence, stored: object) -> None:
        self.sequences.append(sequence)
        self.stored[sequence.id] = np.array(stored)

    def values(self, sequence: Sequence, begin: int, end: int) -> np.ndarray:
        """For positions from `begin` on: here, exactly representable in float32."""
        if self.kind.prefix_blocks:
            chain = itertools.accumulate(sequence.tokens[:end], lambda *pair: hash(pair) % 2**20, initial=0)
            return np.array(list(chain)[begin + 1 :])
        self.num_stored += end - begin
        return np.arange(self.num_stored - (end - begin), self.num_stored)

    def check(self, sequence: Sequence) -> None:
        """All that the next position sees is there."""
        end, stored = sequence.num_computed, self.stored[sequence.id]
        assert len(stored) == end
        for number, (keys, group, window) in enumerate(self.layers):
            first = 0 if window is None else max(0, end - window + 1)
            if first == end:
                continue
            table = np.asarray(sequence.block_tables[group])[first // BLOCK_SIZE : -(-end // BLOCK_SIZE)]
            assert (table >= 0).all(), f"a block is gone that is still seen: {sequence.block_tables[group]}"
            found = keys[table].reshape(-1)[first % BLOCK_SIZE :][: end - first] - number * 2**20
            assert found.tolist() == stored[first:].tolist(), f"layer {number} from position {first} on"

    @invariant()
    def books_and_content_are_right(self) -> None:
        self.cache.check_integrity(self.sequences)
        for sequence in self.sequences:
            self.check(sequence)


@pytest.mark.parametrize("num_runs", [25, pytest.param(500, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", KINDS)
def test_any_order_of_verbs(name: str, num_runs: int) -> None:
    limits = settings(
        max_examples=num_runs,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],  # on a busy machine
    )
    run_state_machine_as_test(lambda: Machine(KINDS[name]), settings=limits)
