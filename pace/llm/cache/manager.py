"""The KV cache of all sequences, in blocks of 16 positions, for any allocator."""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable

from pace.batch import BLOCK_SIZE, KVSpec, LayerBlocks
from pace.llm.cache.allocators import BlockAllocator, Paged, Windowed
from pace.llm.cache.block_pool import BlockPool, num_blocks_of
from pace.llm.cache.contiguous import Contiguous, RunPool, balanced_rows
from pace.llm.cache.groups import by_lifetime, is_kept, most_tokens, tables_of
from pace.llm.cache.marks import MarkedPrefixCache
from pace.llm.cache.prefix_cache import NoPrefixCache, PrefixCache
from pace.llm.cache.room import Room
from pace.llm.cache.state_cache import LEAST_SLOTS, START, NoStates, StateCache, StatePoint, budget_for, num_slots_of
from pace.llm.configs import KVCacheType
from pace.llm.sequence import Sequence, Span

STEP_TOKENS = 512
"""Default maximum of positions of one sequence that a step computes."""

PREFIX_SHARE = 0.25
"""Default share of the budget for cached prefixes of ended sequences. The system keeps the rest until running sequences
need it."""


class CacheManager:
    """Cache of all sequences of one model: a pool of blocks, an allocator that assigns them to sequences, slots for
    states, and the prefix cache.

    A block may belong to several sequences (`fork`, `reuse`); it is copied when one of them writes to it. A slot may
    too; a sequence that shares its slot writes to another one. Only the manager and its parts change a sequence's block
    tables, `state` and `num_computed`. With the "paged" allocator, layers with a window give back blocks that no later
    position sees. Not thread-safe: the thread that owns the engine calls it.
    """

    def __init__(
        self,
        spec: KVSpec,
        budget_bytes: int,
        kv_cache_type: KVCacheType | str = KVCacheType.PAGED,
        bmc_rows: int | None = None,
        prefix_cache_bytes: int | None = 0,
        rope_regime: Callable[[int], int] = lambda length: 0,
        step_tokens: int = STEP_TOKENS,
        max_drafts: int = 0,
        num_slots: int | None = None,
    ) -> None:
        """`bmc_rows` is the r of "bmc"; None for `balanced_rows`. `prefix_cache_bytes` bounds the blocks that only the
        prefix cache keeps. 0 means no prefix cache; None means PREFIX_SHARE of the budget if the allocator shares
        blocks. `rope_regime` is the model's. `step_tokens` is the maximum of positions of one sequence computed between
        two calls of `reserve`. `max_drafts` is the maximum of drafts of a sequence in a step, for a model with states.
        Such a model gets `num_slots` slots within the budget; None for `num_slots_of`.

        Raises ValueError if the budget holds no block and no slots, and for options that conflict."""
        kv_cache_type = check_cache_options(kv_cache_type, bmc_rows, prefix_cache_bytes)
        self.spec = spec = spec_of(spec, kv_cache_type)
        self.step_tokens = step_tokens
        self._journal_rows = max_drafts
        slots = spec.slots(max_drafts)
        if num_slots is None:
            num_slots = num_slots_of(spec, slots, budget_bytes)
        block_budget = budget_bytes - num_slots * slots.slot_bytes
        num_blocks = min(block_budget // spec.block_bytes, 2**31 // BLOCK_SIZE - 1)
        if num_blocks < len(spec.groups):
            states = f" and {LEAST_SLOTS} slots for states of {slots.slot_bytes} bytes each" if spec.has_states else ""
            raise ValueError(
                f"the cache has {budget_bytes} bytes, but a block of {BLOCK_SIZE} positions{states} takes "
                f"{budget_for(spec, 1, step_tokens, max_drafts)} bytes in this model; raise kv_cache_bytes, or free "
                f"some memory"
            )
        if prefix_cache_bytes is None:
            prefix_cache_bytes = int(PREFIX_SHARE * budget_bytes) if kv_cache_type == KVCacheType.PAGED else 0
        elif prefix_cache_bytes > budget_bytes:
            raise ValueError(
                f"prefix_cache_bytes={prefix_cache_bytes} is more than all {budget_bytes} bytes of the cache; lower "
                f"it, or raise kv_cache_bytes"
            )
        elif 0 < prefix_cache_bytes < spec.block_bytes:
            raise ValueError(
                f"prefix_cache_bytes={prefix_cache_bytes} is less than one block, which takes {spec.block_bytes} bytes "
                f"in this model; raise it, or use 0 for no prefix cache"
            )
        idle_slot_bytes = prefix_cache_bytes * num_slots * slots.slot_bytes // budget_bytes
        max_idle_blocks = (prefix_cache_bytes - idle_slot_bytes) // spec.block_bytes
        self.states: StateCache | NoStates = NoStates()
        self.has_states = spec.has_states
        """True if the model has layers with states, which each step must `plan`."""
        if self.has_states:
            self.states = StateCache(slots, num_slots, -(-idle_slot_bytes // slots.slot_bytes))
        self.pool: BlockPool
        self.allocator: BlockAllocator
        if kv_cache_type == KVCacheType.PAGED:
            self.pool = BlockPool(spec, num_blocks, max_idle_blocks)
            keeps_all = all(group.window is None for group in spec.groups)
            self.allocator = Paged(self.pool) if keeps_all else Windowed(self.pool, step_tokens)
        else:
            self.pool = runs = RunPool(spec, num_blocks)
            rows = 1 if kv_cache_type == KVCacheType.DYNAMIC else bmc_rows
            self.allocator = Contiguous(runs, balanced_rows if rows is None else lambda num_tokens: rows)
        self.prefix: PrefixCache | NoPrefixCache = NoPrefixCache()
        if prefix_cache_bytes and isinstance(self.states, StateCache):
            self.prefix = MarkedPrefixCache(self.pool, rope_regime, self.states)
        elif prefix_cache_bytes:
            self.prefix = PrefixCache(self.pool, rope_regime)
        self._kv: list[LayerBlocks] = []

    @property
    def kv(self) -> list[LayerBlocks]:
        """Blocks or slots of each layer; allocated on first access."""
        if not self._kv:
            self._kv = self.states.fill(self.pool.kv)
        return self._kv

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks available to sequences, including those that only the prefix cache keeps."""
        return self.pool.num_free

    @property
    def capacity(self) -> int:
        """Maximum number of positions if one sequence has the whole cache."""
        return most_tokens(self.spec, self.num_blocks, self.step_tokens)

    @property
    def num_groups(self) -> int:
        """Number of blocks that a sequence takes at once when its last ones are full."""
        return len(self.spec.groups)

    @property
    def free_room(self) -> Room:
        """Blocks and slots available to sequences."""
        return Room(self.pool.num_free, self.states.num_free)

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts of a sequence in a step, certain ones not counted."""
        return self.states.max_drafts

    @property
    def budget_bytes(self) -> int:
        """Bytes of all blocks and slots: the maximum size of the cache."""
        return self.num_blocks * self.spec.block_bytes + self.states.budget_bytes

    def bytes_for(self, num_tokens: int) -> int:
        """Bytes of a cache that is enough for one sequence until its first `num_tokens` tokens are computed."""
        return budget_for(self.spec, num_tokens, self.step_tokens, self._journal_rows)

    @property
    def token_bytes(self) -> float:
        """Bytes for one more token of a long sequence. Layers with a window give back as much as they take."""
        return self.spec.block_bytes * [group.window for group in self.spec.groups].count(None) / BLOCK_SIZE

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states of one sequence, which do not grow with its length; 0 for a model without states."""
        return self.spec.slots(self._journal_rows).slot_bytes

    @property
    def touched_bytes(self) -> int:
        """Bytes of blocks and slots handed out at least once, which may be resident."""
        return self.pool.num_touched * self.spec.block_bytes + self.states.touched_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of blocks and slots that sequences hold."""
        return (self.num_blocks - self.num_free_blocks) * self.spec.block_bytes + self.states.used_bytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes of the blocks and slots that the prefix cache keeps and no sequence holds."""
        return self.pool.num_idle * self.spec.block_bytes + self.states.idle_bytes

    # -- calls for sequences -------------------------------------------------------------------------------------------

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room to write positions `num_computed .. num_tokens - 1` of the sequence. Returns False and takes
        nothing if there are too few free blocks or slots. First gives back blocks that no later position sees. Copies
        shared blocks that will be written."""
        return self._with_slot(self.allocator.reserve, sequence, num_tokens)

    def admit(self, sequence: Sequence, num_tokens: int) -> bool:
        """Makes room to compute the sequence up to `num_tokens`, in steps that reserve what they write. Returns False
        as `reserve` does. Layers with a window get room for the window and one step: from then on they give back as
        much as they take."""
        return self._with_slot(self.allocator.admit, sequence, num_tokens)

    def _with_slot(self, take: Callable[[Sequence, int], bool], sequence: Sequence, num_tokens: int) -> bool:
        """Takes blocks by `take`, and a slot to write if the sequence needs one; both or nothing."""
        if not self.has_states:
            return take(sequence, num_tokens)
        if self.states.needed(sequence) > self.states.num_free or not take(sequence, num_tokens):
            return False
        self.states.reserve(sequence)
        return True

    def room_needed(self, sequence: Sequence, num_tokens: int) -> Room:
        """Free room that `admit` needs."""
        return Room(self.allocator.blocks_needed(sequence, num_tokens), self.states.needed(sequence))

    def room_held(self, sequence: Sequence) -> Room:
        """Blocks of all groups, and slots, that the sequence holds, including shared ones."""
        blocks = sum(len(table) - table.count(-1) for table in sequence.block_tables)
        return Room(blocks, self.states.held(sequence))

    def room_to_grow(self, sequence: Sequence) -> Room:
        """Largest room that a running sequence may need for its next token."""
        return Room(self.num_groups, self.states.needed(sequence))

    def reuse(self, sequence: Sequence) -> None:
        """Takes known blocks of the sequence's tokens from the prefix cache, which raises `num_computed`. Leaves at
        least the tokens whose logits are wanted."""
        self.prefix.reuse(sequence)

    def plan(self, spans: Iterable[Span]) -> None:
        """Decides what a step reads and writes of the sequences' states. The spans have their drafts, and `reserve` was
        called for all of them. Each must then be committed."""
        for span in spans:
            self.states.plan(span, self.prefix.marks(span))

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Marks the first `num_tokens` positions as computed. Entries beyond them (rejected drafts) are void. In a
        model with states, certain tokens that are dropped nevertheless take the computed ones along, as in
        `truncate`."""
        assert num_tokens <= len(sequence.block_table) * BLOCK_SIZE
        if not self.has_states:
            sequence.num_computed = num_tokens
            return
        seen = self.states.commit(sequence, num_tokens)
        sequence.num_computed = max(num_tokens, seen)
        if seen > num_tokens:
            self.truncate(sequence, num_tokens)

    def publish(self, sequence: Sequence) -> None:
        """Offers computed blocks to the prefix cache. The sequence must have all of its tokens by now."""
        self.prefix.publish(sequence)

    def truncate(self, sequence: Sequence, num_tokens: int) -> None:
        """Drops the positions from `num_tokens` on and gives back the blocks that held only those.

        Drops more if blocks that the next position sees were given back before, or if the states after `num_tokens`
        are not known. These positions must be recomputed."""
        if num_tokens < sequence.num_computed:
            point = self._last_point(sequence, num_tokens)
            self.states.enter(sequence, point)
            num_tokens = sequence.num_computed = point.num_tokens
        self.states.release(sequence)
        num_kept = num_blocks_of(num_tokens)
        tables = sequence.block_tables
        for index in range(max(map(len, tables)) - 1, num_kept - 1, -1):
            for table in reversed(tables):
                if index < len(table) and (block := table.pop()) >= 0:
                    self.pool.give_back(block)

    def hold(self, sequence: Sequence) -> None:
        """Keeps the present states of a sequence in addition to later ones, until it is truncated: `truncate` then goes
        back at most to here. The next `reserve` may need one more slot."""
        self.states.hold(sequence)

    def fork(self, source: Sequence, target: Sequence, num_tokens: int) -> None:
        """Gives `target` the first `num_tokens` computed positions of `source`, and its cache salt and adapters.
        Nothing is copied.

        `target` must hold no block. It gets fewer positions, or none, where `truncate` would drop them."""
        assert not target.block_table and num_tokens <= source.num_computed
        target.cache_salt, target.adapter = source.cache_salt, source.adapter
        point = self._last_point(source, num_tokens)
        if not point.num_tokens:
            return
        self.states.enter(target, point)
        for table, taken in zip(source.block_tables, tables_of(target, self.num_groups)):
            for block in table[: num_blocks_of(point.num_tokens)]:
                if block >= 0:
                    self.pool.share(block)
                taken.append(block)
        target.num_computed = point.num_tokens

    def _last_point(self, sequence: Sequence, num_tokens: int) -> StatePoint:
        """Returns the last point at or before `num_tokens` from which the computed sequence can continue."""
        points = itertools.chain(self.states.points(sequence, num_tokens), self.prefix.points(sequence, num_tokens))
        return next((point for point in points if self._is_kept(sequence, point.num_tokens)), START)

    def _is_kept(self, sequence: Sequence, num_tokens: int) -> bool:
        """True if the sequence has all blocks that the position after its first `num_tokens` computed ones sees."""
        return all(
            is_kept(table, num_tokens, group.window) for table, group in zip(sequence.block_tables, self.spec.groups)
        )

    def free(self, sequence: Sequence) -> None:
        """Gives back every block and slot of the sequence; its tokens must then be recomputed."""
        self.states.enter(sequence, START)
        self.truncate(sequence, 0)

    # -- error recovery ------------------------------------------------------------------------------------------------

    def reset(self, sequences: Iterable[Sequence]) -> None:
        """Drops everything, in any state that a failed step left. All blocks and slots are free, and `sequences`, which
        must include all that hold any, start again from their first token."""
        sequences = list(sequences)
        for sequence in sequences:
            sequence.num_computed = 0
            sequence.block_table = array("i")  # a new one: the traceback may still hold a view of the old
            sequence.more_tables = []
        self.states.reset(sequences)
        self.pool.reset()
        self.prefix.reset()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless each block and slot is in exactly one state and is held as often as `sequences`
        (all there are) hold it. Each sequence must have blocks for what it has computed, in the allocator's layout. The
        prefix cache must be consistent."""
        sequences = list(sequences)
        held: Counter[int] = Counter()
        for sequence in sequences:
            assert sequence.num_computed <= len(sequence.tokens), (
                f"more tokens are computed than the sequence has: {sequence}"
            )
            for table in sequence.block_tables:
                held.update(block for block in table if block >= 0)
                assert 0 <= sequence.num_computed <= len(table) * BLOCK_SIZE, f"blocks are missing: {sequence}"
                self.allocator.check_layout(table)
            has_all = not sequence.num_computed or len(sequence.block_tables) == self.num_groups
            assert has_all and self._is_kept(sequence, sequence.num_computed), f"blocks are missing: {sequence}"
        self.pool.check_integrity(held)
        self.states.check_integrity(sequences)
        self.prefix.check_integrity(sequences)


def spec_of(spec: KVSpec, kv_cache_type: KVCacheType | str) -> KVSpec:
    """Returns the spec with the layers grouped by lifetime for the paged cache. The contiguous allocators keep all
    positions in one group."""
    return by_lifetime(spec) if kv_cache_type == KVCacheType.PAGED else spec


def check_cache_options(
    kv_cache_type: KVCacheType | str, bmc_rows: int | None, prefix_cache_bytes: int | None
) -> KVCacheType:
    """Returns the type. Raises ValueError or TypeError for an invalid type, and for options that conflict with it."""
    names = [kind.value for kind in KVCacheType]
    if kv_cache_type not in names:
        raise ValueError(f"kv_cache_type must be one of {', '.join(map(repr, names))}; got {kv_cache_type!r}")
    kind = KVCacheType(kv_cache_type)
    if bmc_rows is not None:
        if isinstance(bmc_rows, bool) or not isinstance(bmc_rows, int):
            raise TypeError(f"bmc_rows must be an int >= 1, or None to balance copying and memory; got {bmc_rows!r}")
        if bmc_rows < 1:
            raise ValueError(f"bmc_rows must be an int >= 1, or None to balance copying and memory; got {bmc_rows}")
        if kind != KVCacheType.BMC:
            raise ValueError(f"bmc_rows={bmc_rows} needs kv_cache_type='bmc', got {kind.value!r}; leave bmc_rows out")
    if prefix_cache_bytes and kind != KVCacheType.PAGED:
        raise ValueError(
            f"a prefix cache (prefix_cache_bytes={prefix_cache_bytes}) needs kv_cache_type='paged', in which texts "
            f"share blocks; with {kind.value!r} leave it out, or use 0"
        )
    return kind
