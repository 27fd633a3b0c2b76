"""Blocks are reserved all or none, shared and copied on write, and freed exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pace.batch import BLOCK_SIZE, KVSpec, Positions
from pace.llm.cache.manager import CacheManager
from pace.llm.sequence import Sequence
from pace.memory import resident_bytes
from tests.support import exit_code_in_fork

SPEC = KVSpec((Positions(1, 2, 2),) * 2, torch.float32)


def make_cache(num_blocks: int, **options) -> CacheManager:
    return CacheManager(SPEC, num_blocks * SPEC.block_bytes, **options)


def make_sequence(length: int = 1000) -> Sequence:
    return Sequence([1] * length, None, None, 4096)


def test_a_budget_below_one_block_is_told() -> None:
    with pytest.raises(ValueError, match="but a block of 16 positions takes"):
        CacheManager(SPEC, SPEC.block_bytes - 1)


@pytest.mark.alone
def test_memory_is_touched_only_as_used() -> None:
    spec = KVSpec((Positions(8, 64, 64),) * 4, torch.float32)
    cache = CacheManager(spec, 2 << 30)
    before = resident_bytes()
    sequence = make_sequence()
    assert cache.reserve(sequence, 100)
    for layer in cache.kv:
        for block in sequence.block_table:
            layer.k[block] = 1.0
    growth = resident_bytes() - before
    # 1.8 of 2048 MiB are written, in pages of 2 MiB. The rest of the bound is for memory that allocators keep.
    assert growth < 64 << 20, f"resident memory grew by {growth / 2**20:.1f} MiB"
    assert cache.touched_bytes == cache.used_bytes == 7 * spec.block_bytes


@pytest.mark.parametrize(
    "spec",
    [KVSpec((Positions(2, 5, 5),) * 3, torch.float32), KVSpec((Positions(8, 16, 16),) * 16, torch.bfloat16),
     KVSpec((Positions(2, 5, 5),) * 3, torch.int8), KVSpec((Positions(1, 64, 64),) * 1, torch.int8)],
)  # fmt: skip
def test_layers_lie_side_by_side_in_a_block(spec: KVSpec) -> None:
    """The keys and values of all layers fill a block without gaps or overlaps. Blocks whose size is a multiple of 64 KB
    are padded."""
    layers = spec.allocate(3)
    tensors = [tensor for layer in layers for tensor in layer.tensors]
    starts = {head.data_ptr(): head.nbytes for tensor in tensors for head in tensor[1]}
    first = min(starts)
    end = first
    for start in sorted(starts):
        assert start == end
        end += starts[start]
    assert end - first == 16 * spec.position_bytes
    assert all(tensor.stride(0) * tensor.itemsize == spec.block_bytes for tensor in tensors)
    assert spec.block_bytes % 65536 and 0 <= spec.block_bytes - (end - first) <= 4160


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_int8_takes_little_more_than_half_of_bfloat16(head_dim: int) -> None:
    """One byte instead of two, and 4 bytes for the scale of each head: 1/2 + 2/D."""
    wide, narrow = (KVSpec((Positions(2, head_dim, head_dim),) * 24, dtype) for dtype in (torch.bfloat16, torch.int8))
    assert narrow.position_bytes == wide.position_bytes // 2 + 24 * 2 * 2 * 4
    assert narrow.block_bytes < 0.54 * wide.block_bytes


def test_reserve_takes_all_or_nothing() -> None:
    cache, sequence = make_cache(3), make_sequence()
    assert cache.reserve(sequence, 3 * BLOCK_SIZE) and cache.num_free_blocks == 0
    other = make_sequence()
    assert not cache.reserve(other, 1) and not other.block_table
    cache.commit(sequence, 40)
    cache.truncate(sequence, 17)
    assert sequence.num_computed == 17 and len(sequence.block_table) == 2
    assert not cache.reserve(other, 17) and not other.block_table
    assert cache.reserve(other, 16)
    cache.check_integrity([sequence, other])


def test_blocks_given_back_are_used_again_first() -> None:
    cache = make_cache(100)
    first = make_sequence()
    cache.reserve(first, 64)
    cache.free(first)
    second = make_sequence()
    cache.reserve(second, 64)
    assert cache.touched_bytes == 4 * SPEC.block_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_fork_shares_until_it_is_written(dtype: torch.dtype) -> None:
    spec = replace(SPEC, dtype=dtype)
    cache, source, target = CacheManager(spec, 10 * spec.block_bytes), make_sequence(), make_sequence()
    cache.reserve(source, 40)
    cache.commit(source, 40)
    for layer in cache.kv:
        for index, block in enumerate(source.block_table):
            for number, tensor in enumerate(layer.tensors):
                tensor[block] = 10 * number + index + 1
    cache.fork(source, target, 35)
    assert cache.num_free_blocks == 7 and list(target.block_table) == list(source.block_table)
    assert cache.reserve(target, 36)
    assert cache.num_free_blocks == 6
    assert target.block_table[:2] == source.block_table[:2] and target.block_table[2] != source.block_table[2]
    for layer in cache.kv:
        for number, tensor in enumerate(layer.tensors):
            assert (
                tensor[target.block_table[2]].eq(10 * number + 3).all()
                and tensor[source.block_table[2]].eq(10 * number + 3).all()
            )
    cache.check_integrity([source, target])
    cache.free(source)
    cache.check_integrity([source, target])
    cache.free(target)
    assert cache.used_bytes == 0


def test_a_fork_needs_room_for_its_copy() -> None:
    cache, source, target = make_cache(3), make_sequence(), make_sequence()
    cache.reserve(source, 40)
    cache.commit(source, 40)
    cache.fork(source, target, 40)
    assert cache.room_needed(target, 41).blocks == 1 and not cache.reserve(target, 41)
    cache.check_integrity([source, target])


def test_the_block_boundary_needs_no_copy() -> None:
    cache, source, target = make_cache(4), make_sequence(), make_sequence()
    cache.reserve(source, 32)
    cache.commit(source, 32)
    cache.fork(source, target, 32)
    assert cache.room_needed(target, 33).blocks == 1, "a new block, and none to copy"


@pytest.mark.parametrize("damage", ["lost", "twice", "shared", "unknown", "short"])
def test_check_integrity_sees(damage: str) -> None:
    cache, sequence = make_cache(8), make_sequence()
    cache.reserve(sequence, 40)
    cache.commit(sequence, 40)
    cache.check_integrity([sequence])
    if damage == "lost":
        cache.pool._references[sequence.block_table.pop()] = 1
        sequence.num_computed = 20
    elif damage == "twice":
        cache.pool._free.append(sequence.block_table[0])
    elif damage == "shared":
        cache.pool._references[sequence.block_table[0]] = 2
    elif damage == "unknown":
        sequence.block_table.append(7)
    else:
        sequence.num_computed = 60
    with pytest.raises(AssertionError):
        cache.check_integrity([sequence])


def test_reset_frees_everything_from_any_state() -> None:
    cache, sequence = make_cache(8), make_sequence()
    cache.reserve(sequence, 100)
    cache.pool._references[2] = 9
    cache.pool._free.append(1)
    cache.reset([sequence])
    cache.check_integrity([sequence])
    assert cache.num_free_blocks == 8 and sequence.num_computed == 0 and not sequence.block_table


def test_a_process_with_a_cache_beyond_its_memory_can_fork():
    """The pool reserves addresses, not memory, so fork works even if the pool exceeds the machine's memory. With plain
    memory fork fails."""
    cache = CacheManager(KVSpec((Positions(1, 64, 64),) * 1, torch.float32), 2**40)
    assert cache.kv[0].k.nbytes + cache.kv[0].v.nbytes > 2**38
    assert exit_code_in_fork(lambda: True) == 0
