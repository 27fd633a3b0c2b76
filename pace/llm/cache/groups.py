"""Groups of layers with the same lifetime: layers with a window drop positions that no later position sees.

One pool of equal blocks serves all groups. A block holds 16 positions of the layers of one group. A sequence has a
block table for each group.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate

from pace.batch import BLOCK_SIZE, Group, KVSpec, keeps_positions
from pace.llm.cache.block_pool import BlockPool, num_blocks_of
from pace.llm.sequence import Sequence

LONG_TEXT = 4
"""Layers are grouped for a text this many windows long."""

SPARE_SHARE = 1 / 12
"""Extra memory, as a share of the best grouping's, that is accepted to have fewer groups."""

MOST_POSITIONS = 2**31 - BLOCK_SIZE
"""Maximum length of a sequence if every layer has a window."""


def by_lifetime(spec: KVSpec) -> KVSpec:
    """Returns the spec with one or more groups for each lifetime (one window, or none).

    Groups are about equal in bytes, because all blocks have the same size. Layers of two lifetimes may differ in heads
    and widths. Among the group sizes close to the best, the one with the fewest groups is chosen. Close means that a
    text of LONG_TEXT windows takes at most SPARE_SHARE more memory. A single group that keeps everything is also a
    candidate, so layers are grouped only if that saves more. Layers without positions of their own do not matter."""
    lifetimes: dict[int | None, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if keeps_positions(layer):
            window = getattr(layer, "window", None)
            lifetimes.setdefault(window and window + spec.kept_before, []).append(index)
    if len(lifetimes) <= 1:
        window = next(iter(lifetimes), None)
        return replace(spec, groups=(Group(tuple(range(len(spec.layers))), window),))
    in_order = sorted(lifetimes.items(), key=lambda lifetime: (lifetime[0] is not None, lifetime[0]))
    length = LONG_TEXT * max(window or 0 for window in lifetimes)
    ways = [replace(spec, groups=())]
    widths = [spec.content_bytes(Group((index,), None)) for index in range(len(spec.layers))]
    sizes = {size for layers in lifetimes.values() for size in accumulate(widths[index] for index in layers)}
    for size in sorted(sizes):
        groups = [Group(dealt, window) for window, layers in in_order for dealt in _deal(layers, widths, size)]
        ways.append(replace(spec, groups=tuple(groups)))
    taken = [way.group_bytes * sum(min(length, group.window or length) for group in way.groups) for way in ways]
    most = (1 + SPARE_SHARE) * min(taken)
    return min((way for way, bytes in zip(ways, taken) if bytes <= most), key=lambda way: len(way.groups))


def _deal(layers: list[int], widths: list[int], size: int) -> list[tuple[int, ...]]:
    """Splits `layers` into as few runs of about `size` bytes as possible, of about equal length. `widths`: bytes of
    each layer of the model."""
    count = min(len(layers), -(-sum(widths[index] for index in layers) // size))
    edges = [len(layers) * index // count for index in range(count + 1)]
    return [tuple(layers[start:stop]) for start, stop in zip(edges, edges[1:])]


# -- what is kept of a sequence ----------------------------------------------------------------------------------------


def first_kept(num_computed: int, window: int | None) -> int:
    """Index of the first block that a sequence of `num_computed` positions keeps for layers with this window, because
    later positions see it. The last full block is always kept: the prefix cache finds the sequence by it."""
    if window is None:
        return 0
    return max(0, num_computed - max(window, BLOCK_SIZE + 1) + 1) // BLOCK_SIZE


def most_kept(window: int, step_tokens: int) -> int:
    """Maximum number of blocks that a sequence holds for layers with this window, if a step computes `step_tokens`
    positions. Counts the worst alignment to blocks."""
    return num_blocks_of(max(window, BLOCK_SIZE + 1) + step_tokens + BLOCK_SIZE - 2)


def most_blocks(spec: KVSpec, num_tokens: int, step_tokens: int) -> int:
    """Maximum number of blocks of all groups that a sequence needs until `num_tokens` of its tokens are computed."""
    needed = num_blocks_of(num_tokens)
    return sum(
        needed if group.window is None else min(needed, most_kept(group.window, step_tokens)) for group in spec.groups
    )


def most_bytes(spec: KVSpec, num_tokens: int, step_tokens: int) -> int:
    """Bytes of `most_blocks`."""
    return most_blocks(spec, num_tokens, step_tokens) * spec.block_bytes


def most_tokens(spec: KVSpec, num_blocks: int, step_tokens: int) -> int:
    """Maximum length of a sequence that has a pool of `num_blocks` blocks to itself."""
    lengths = range(BLOCK_SIZE, MOST_POSITIONS + 1, BLOCK_SIZE)
    return BLOCK_SIZE * bisect_right(lengths, num_blocks, key=lambda length: most_blocks(spec, length, step_tokens))


# -- tables ------------------------------------------------------------------------------------------------------------


def tables_of(sequence: Sequence, num_groups: int) -> list[array]:
    """Returns the block tables of the sequence, one for each group. Creates those that are missing."""
    while len(sequence.more_tables) < num_groups - 1:
        sequence.more_tables.append(array("i"))
    return sequence.block_tables


def give_back_before(pool: BlockPool, table: array, first: int) -> None:
    """Gives back the blocks before index `first` of a table, and extends the table to at least that length. Blocks that
    earlier calls gave back are at the table's start."""
    start = stop = min(first, len(table))
    while start and table[start - 1] >= 0:
        start -= 1
    for index in range(start, stop):
        pool.give_back(table[index])
        table[index] = -1
    table.extend([-1] * (first - len(table)))


def is_kept(table: array, num_tokens: int, window: int | None) -> bool:
    """True if a table still has all blocks that positions from `num_tokens` on see."""
    return num_tokens == 0 or table[first_kept(num_tokens, window)] >= 0
