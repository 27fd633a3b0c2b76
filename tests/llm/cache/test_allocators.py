"""Cache allocators differ in what they copy and how much spare room they keep, but give the same tokens and logits."""

from __future__ import annotations

import random

import pytest
import torch

from pace.assets import TINY
from pace.batch import BLOCK_SIZE, KVSpec, Positions
from pace.llm import LLMModel
from pace.llm.cache import block_pool
from pace.llm.cache.contiguous import COPY_COST, balanced_rows
from pace.llm.cache.manager import CacheManager
from pace.llm.sequence import Sequence

SPEC = KVSpec((Positions(1, 2, 2),) * 2, torch.float32)

OPTIONS = {
    "paged": {}, "prefix": {"prefix_cache_bytes": None}, "bmc": {"kv_cache_type": "bmc"},
    "bmc-1": {"kv_cache_type": "bmc", "bmc_rows": 1}, "bmc-50": {"kv_cache_type": "bmc", "bmc_rows": 50},
    "dynamic": {"kv_cache_type": "dynamic"},
}  # fmt: skip
CONTIGUOUS = [name for name in OPTIONS if name not in ("paged", "prefix")]


def make_cache(num_blocks: int, **options) -> CacheManager:
    return CacheManager(SPEC, num_blocks * SPEC.block_bytes, **options)


def sequence_of(length: int, most: int = 4096) -> Sequence:
    return Sequence([1] * length, None, None, most)


def write(cache: CacheManager, sequence: Sequence, end: int, mark: float = 0.0) -> None:
    """Computes positions up to `end`, and stores position + `mark` at each."""
    assert cache.reserve(sequence, end)
    for position in range(sequence.num_computed, end):
        cache.kv[1].v[sequence.block_table[position // BLOCK_SIZE], 0, position % BLOCK_SIZE, 0] = position + mark
    cache.commit(sequence, end)


def content(cache: CacheManager, sequence: Sequence) -> list[float]:
    blocks = torch.tensor(list(sequence.block_table), dtype=torch.int64)
    return cache.kv[1].v[blocks, 0, :, 0].reshape(-1)[: sequence.num_computed].tolist()


def blocks_of(sequence: Sequence) -> range:
    assert list(sequence.block_table) == list(range(sequence.block_table[0], sequence.block_table[-1] + 1))
    return range(sequence.block_table[0], sequence.block_table[-1] + 1)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sizes"),
    [(OPTIONS["dynamic"], [1, 2, 3, 4, 5, 6, 7, 8]), ({"kv_cache_type": "bmc", "bmc_rows": 48}, [3, 6, 9]),
     ({"kv_cache_type": "bmc", "bmc_rows": 20}, [2, 4, 6, 8])],
)  # fmt: skip
def test_a_run_grows_by_its_rows_and_is_copied_only_then(options: dict, sizes: list[int], monkeypatch) -> None:
    cache, sequence, copied, runs = make_cache(100, **options), sequence_of(500), [], []
    monkeypatch.setattr(
        cache.pool,
        "copy",
        lambda source, target, count, copy=cache.pool.copy: (copied.append(count), copy(source, target, count)),
    )
    for length in range(1, 129):
        write(cache, sequence, length)
        if not runs or runs[-1] != blocks_of(sequence):
            runs.append(blocks_of(sequence))
        cache.check_integrity([sequence])
    assert [len(run) for run in runs] == sizes
    assert copied == sizes[:-1], "each time what the last run held"
    assert content(cache, sequence) == list(range(128))


def test_rows_are_not_spared_for_what_cannot_come() -> None:
    cache = make_cache(100, kv_cache_type="bmc", bmc_rows=500)
    sequence = sequence_of(20, most=40)
    assert cache.reserve(sequence, 20) and len(sequence.block_table) == 3


def test_where_spare_rows_do_not_fit_what_is_needed_will_do() -> None:
    cache = make_cache(8, kv_cache_type="bmc", bmc_rows=64)
    other, sequence = sequence_of(64, most=64), sequence_of(500)
    write(cache, other, 64)
    write(cache, sequence, 30)
    assert len(sequence.block_table) == 2 and cache.num_free_blocks == 2, (
        "there were four of the six that it would have liked"
    )
    cache.check_integrity([other, sequence])


def test_a_run_that_cannot_move_widens_and_slides() -> None:
    cache = make_cache(10, kv_cache_type="dynamic")
    below, sequence = sequence_of(48), sequence_of(500)
    write(cache, below, 48)
    write(cache, sequence, 80)
    assert blocks_of(sequence) == range(3, 8)
    write(cache, sequence, 96)
    assert blocks_of(sequence) == range(3, 9), "no six others are free, but the one above is"
    cache.free(below)
    write(cache, sequence, 160)
    assert blocks_of(sequence) == range(10), "all of the pool, in its place"
    assert content(cache, sequence) == list(range(160))
    cache.check_integrity([sequence])
    assert not cache.reserve(sequence, 161) and content(cache, sequence) == list(range(160))


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_who_is_alone_can_have_all(name: str) -> None:
    """A single sequence can use the whole pool, wherever its run lies and however the pool was used before."""
    for seed in range(5):
        one_has_all_of_a_used_pool(name, random.Random(seed))


def one_has_all_of_a_used_pool(name: str, chance: random.Random) -> None:
    cache, others = make_cache(20, **OPTIONS[name]), []
    for _ in range(30):
        if others and chance.random() < 0.5:
            cache.free(others.pop(chance.randrange(len(others))))
        else:
            others.append(sequence_of(100, most=100))
            if not cache.reserve(others[-1], chance.randint(1, 90)):
                others.pop()
    sequence = sequence_of(320, most=320)
    while not cache.reserve(sequence, 16):
        cache.free(others.pop())
    cache.free(sequence)
    write(cache, sequence, 16)
    for other in others:
        cache.free(other)
    for length in (40, 41, 100, 290, 320):
        assert cache.room_needed(sequence, length).blocks <= cache.num_free_blocks
        write(cache, sequence, length)
        cache.check_integrity([sequence])
    assert content(cache, sequence) == list(range(320))


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_a_fork_moves_when_it_writes(name: str) -> None:
    cache, source, target = make_cache(100, **OPTIONS[name]), sequence_of(500), sequence_of(500)
    write(cache, source, 40)
    cache.fork(source, target, 35)
    assert cache.used_bytes == len(source.block_table) * SPEC.block_bytes
    write(cache, target, 60, mark=0.5)
    write(cache, source, 45)
    cache.check_integrity([source, target])
    assert not set(blocks_of(source)) & set(blocks_of(target))
    assert content(cache, source) == list(range(45))
    assert content(cache, target) == [*range(35), *(position + 0.5 for position in range(35, 60))]


def test_a_shared_run_neither_widens_nor_slides() -> None:
    """There is free room next to the run, but not enough to copy it elsewhere."""
    cache, source, target = make_cache(6, kv_cache_type="dynamic"), sequence_of(500), sequence_of(500)
    write(cache, source, 40)
    cache.fork(source, target, 40)
    for sequence in (source, target):
        assert cache.room_needed(sequence, 60).blocks == 4 and not cache.reserve(sequence, 60)
    write(cache, target, 45, mark=0.5)
    assert content(cache, source) == list(range(40))
    cache.check_integrity([source, target])


def test_where_the_shared_part_is_full_the_source_stays() -> None:
    cache, source, target = make_cache(100, kv_cache_type="bmc", bmc_rows=64), sequence_of(500), sequence_of(500)
    write(cache, source, 32)
    cache.fork(source, target, 32)
    before = blocks_of(source)
    write(cache, source, 40)
    assert blocks_of(source) == before
    write(cache, target, 33)
    assert blocks_of(target)[0] not in before
    cache.check_integrity([source, target])


def test_the_memory_of_blocks_is_populated_in_runs(monkeypatch) -> None:
    cache, found = make_cache(20), []
    cache.kv  # noqa: B018 (allocates the memory)
    monkeypatch.setattr(block_pool, "populate", lambda address, num_bytes: found.append((address, num_bytes)))
    cache.pool.populate([5, 6, 7, 3, 4, 9, 9])
    start, size = cache.pool._bytes.ctypes.data, SPEC.block_bytes
    assert found == [(start + first * size, count * size) for first, count in ((5, 3), (3, 2), (9, 1), (9, 1))]


def test_check_integrity_sees_a_run_that_is_none() -> None:
    cache, sequence = make_cache(20, kv_cache_type="bmc"), sequence_of(500)
    write(cache, sequence, 40)
    sequence.block_table[0], sequence.block_table[1] = sequence.block_table[1], sequence.block_table[0]
    with pytest.raises(AssertionError, match="not adjacent"):
        cache.check_integrity([sequence])


def test_the_balanced_rows_are_where_the_cost_is_least() -> None:
    """The cost for rows r and length n: copying takes c / r of attention's time, spare rows r / 2n of the memory."""
    for length in (100, 1000, 30_000):
        best = min(range(16, 4096, 16), key=lambda rows: COPY_COST / rows + rows / (2 * length))
        assert best - 16 <= balanced_rows(length) <= best + 16


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [({"kv_cache_type": "ring"}, ValueError, "'dynamic', 'bmc', 'paged'; got 'ring'"),
     ({"bmc_rows": 64}, ValueError, "bmc_rows=64 needs kv_cache_type='bmc', got 'paged'"),
     ({"kv_cache_type": "dynamic", "bmc_rows": 64}, ValueError, "got 'dynamic'"),
     ({"kv_cache_type": "bmc", "bmc_rows": 0}, ValueError, "bmc_rows must be an int >= 1"),
     ({"kv_cache_type": "bmc", "bmc_rows": 1.5}, TypeError, "bmc_rows must be an int >= 1"),
     ({"kv_cache_type": "bmc", "bmc_rows": True}, TypeError, "bmc_rows must be an int >= 1"),
     ({"kv_cache_type": "bmc", "prefix_cache_bytes": 1 << 20}, ValueError,
       "prefix cache .* needs kv_cache_type='paged'"),
     ({"kv_cache_type": "dynamic", "prefix_cache_bytes": "1MiB"}, ValueError,
       "prefix cache .* needs kv_cache_type='paged'"),
     ({"prefix_cache_bytes": 10}, ValueError, "prefix_cache_bytes=10 is less than one block"),
     ({"prefix_cache_bytes": "8MiB", "kv_cache_bytes": "4MiB"}, ValueError,
       "is more than all 4194304 bytes of the cache; lower it, or raise kv_cache_bytes"),
     ({"prefix_cache_bytes": "much"}, ValueError, 'prefix_cache_bytes: .*or "auto"'),
     ({"prefix_cache_bytes": None}, TypeError, "prefix_cache_bytes: .*got None"),
     ({"prefix_cache_bytes": True}, TypeError, "prefix_cache_bytes: .*got True")],
)  # fmt: skip
def test_options_that_make_no_sense_are_told_before_weights_are_read(
    options: dict, error: type[Exception], message: str, monkeypatch
) -> None:
    from pace.llm.loading import checkpoint as checkpoint_module

    monkeypatch.setattr(checkpoint_module, "CheckpointReader", lambda directory: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        LLMModel(TINY, progress=False, **options)
