"""Layers of one lifetime in a group of their own: those with a window need not keep what no later position sees.

One pool of equal blocks serves all groups: a block holds 16 positions of the layers of one group, and a sequence has a
block table for each of them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import replace

from pace.batch import BLOCK_SIZE, Group, KVSpec
from pace.llm.cache.block_pool import BlockPool, num_blocks_of
from pace.llm.sequence import Sequence

LONG_TEXT = 4
"""Windows that a text is long for which layers are grouped."""

SPARE_SHARE = 1 / 12
"""Of the bytes that such a text takes in the best groups, what it may take more in fewer groups."""

MOST_POSITIONS = 2**31 - BLOCK_SIZE
"""That a sequence can have where every layer has a window."""


def by_lifetime(spec: KVSpec) -> KVSpec:
    """The spec with layers of one lifetime (one window, or none) in groups of their own.

    Groups are about as large as each other, for their blocks are: of all numbers of layers in a group, the one with the
    fewest groups of those whose text of LONG_TEXT windows takes at most SPARE_SHARE more than in the best. One group
    that keeps everything is among these, so nothing is grouped that saves no more than that."""
    lifetimes: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if layer:
            lifetimes.setdefault(getattr(layer, "window", None), []).append(index)
    if len(lifetimes) == 1:
        [window] = lifetimes
        return replace(spec, groups=(Group(tuple(range(len(spec.layers))), window),))
    in_order = sorted(lifetimes.items(), key=lambda lifetime: (lifetime[0] is not None, lifetime[0]))
    length = LONG_TEXT * max(window or 0 for window in lifetimes)
    ways = [replace(spec, groups=())]
    for size in range(1, max(map(len, lifetimes.values())) + 1):
        groups = [Group(dealt, window) for window, layers in in_order for dealt in _deal(layers, size)]
        ways.append(replace(spec, groups=tuple(groups)))
    taken = [way.group_bytes * sum(min(length, group.window or length) for group in way.groups) for way in ways]
    most = (1 + SPARE_SHARE) * min(taken)
    return min((way for way, bytes in zip(ways, taken) if bytes <= most), key=lambda way: len(way.groups))


def _deal(layers: list[int], size: int) -> list[tuple[int, ...]]:
    """Neighbours in as few groups of at most `size` as can be, about equal."""
    count = -(-len(layers) // size)
    edges = [len(layers) * index // count for index in range(count + 1)]
    return [tuple(layers[start:stop]) for start, stop in zip(edges, edges[1:])]


# -- what of a sequence is kept ----------------------------------------------------------------------------------------


def first_kept(num_computed: int, window: int | None) -> int:
    """Index of the first block that a sequence of so many computed positions keeps for layers with this window: the
    first that a later position sees; and its last full one in any case, by which the prefix cache knows its place."""
    if window is None:
        return 0
    return max(0, num_computed - max(window, BLOCK_SIZE + 1) + 1) // BLOCK_SIZE


def most_kept(window: int, step_tokens: int) -> int:
    """Blocks that a sequence holds at most for layers with this window, when a step computes `step_tokens` of its
    positions: wherever in a block they begin."""
    return num_blocks_of(max(window, BLOCK_SIZE + 1) + step_tokens + BLOCK_SIZE - 2)


def most_blocks(spec: KVSpec, num_tokens: int, step_tokens: int) -> int:
    """Blocks of all groups that a sequence needs at most, until so many tokens of it are computed."""
    needed = num_blocks_of(num_tokens)
    return sum(
        needed if group.window is None else min(needed, most_kept(group.window, step_tokens)) for group in spec.groups
    )


def most_bytes(spec: KVSpec, num_tokens: int, step_tokens: int) -> int:
    """Bytes of these blocks."""
    return most_blocks(spec, num_tokens, step_tokens) * spec.block_bytes


def most_tokens(spec: KVSpec, num_blocks: int, step_tokens: int) -> int:
    """Positions that one sequence alone can have in a pool of so many blocks."""
    lengths = range(BLOCK_SIZE, MOST_POSITIONS + 1, BLOCK_SIZE)
    return BLOCK_SIZE * bisect_right(lengths, num_blocks, key=lambda length: most_blocks(spec, length, step_tokens))


# -- tables ------------------------------------------------------------------------------------------------------------


def tables_of(sequence: Sequence, num_groups: int) -> list[array]:
    """The block tables of the sequence, one for each group; those of one that has held nothing so far are made."""
    while len(sequence.more_tables) < num_groups - 1:
        sequence.more_tables.append(array("i"))
    return sequence.block_tables


def give_back_before(pool: BlockPool, table: array, first: int) -> None:
    """Gives back the blocks before index `first` of a table, which is at least as long from then on. What it has given
    back before is a part from its start."""
    start = stop = min(first, len(table))
    while start and table[start - 1] >= 0:
        start -= 1
    for index in range(start, stop):
        pool.give_back(table[index])
        table[index] = -1
    table.extend([-1] * (first - len(table)))


def is_kept(table: array, num_tokens: int, window: int | None) -> bool:
    """Whether a table still has all that positions from `num_tokens` on see before it."""
    return num_tokens == 0 or table[first_kept(num_tokens, window)] >= 0
