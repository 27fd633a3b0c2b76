"""A cache described layer by layer: the tensors of layers do not overlap, and their bytes are counted right."""

from __future__ import annotations

import pytest
import torch

from pace.batch import BLOCK_SIZE, KVBlocks, KVSpec, Latent, Positions
from pace.llm.cache.manager import CacheManager
from pace.llm.sequence import Sequence
from pace.ops import native

LAYERS = (Positions(3, 5, 5), None, Positions(1, 20, 33, window=7), Latent(40, 6), Positions(3, 5, 5))
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]


def test_bytes_by_hand() -> None:
    spec = KVSpec(LAYERS, torch.bfloat16)
    # rows of values are rounded up to 16 elements: 5 to 16, 33 to 48
    assert spec.position_bytes == 2 * (2 * 3 * (5 + 16) + (20 + 48) + (6 + 48))
    narrow = KVSpec(LAYERS, torch.int8)
    scales = 2 * 3 * 2 + 2 + 2  # one per key and per value of each head; one for the latent, one for the rotated key
    assert narrow.position_bytes == spec.position_bytes // 2 + 4 * scales
    assert KVSpec((None, Positions(2, 8, 8)), torch.float32) != KVSpec((Positions(2, 8, 8), None), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_of_a_block_belongs_to_one_layer(dtype: torch.dtype) -> None:
    spec = KVSpec(LAYERS, dtype)
    layers = spec.allocate(3)
    assert [type(layer) for layer in layers] == [KVBlocks, type(None), KVBlocks, KVBlocks, KVBlocks]
    seen = 0
    tensors = [tensor for layer in layers if layer for tensor in layer.tensors]
    for tensor in tensors:
        tensor.fill_(0)
    for number, tensor in enumerate(tensors, 1):
        assert tensor.shape[0] == 3 and (tensor == 0).all(), "written by another"
        tensor.fill_(number)
        seen += tensor[0].nbytes
    assert seen == BLOCK_SIZE * spec.position_bytes
    assert all((tensor == number).all() for number, tensor in enumerate(tensors, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_are_those_of_the_layer(dtype: torch.dtype) -> None:
    _, _, wide, latent, _ = KVSpec(LAYERS, dtype).allocate(2)
    assert (wide.k.shape, wide.v.shape, wide.value_dim) == ((2, 1, 20, 16), (2, 1, 16, 48), 33)
    assert (latent.k.shape, latent.v.shape, latent.value_dim) == ((2, 1, 6, 16), (2, 1, 16, 48), 40)
    if dtype == torch.int8:
        assert wide.k_scales.shape == wide.v_scales.shape == (2, 1, 16)
        assert latent.k_scales.shape == latent.v_scales.shape == (2, 1, 16)


def test_a_copied_block_takes_all_layers_along() -> None:
    cache = CacheManager(KVSpec(LAYERS, torch.float32), 10 * KVSpec(LAYERS, torch.float32).block_bytes)
    source, target = (Sequence([1] * 20, None, None, 100) for _ in range(2))
    assert cache.reserve(source, 20)
    cache.commit(source, 20)
    tensors = [tensor for layer in cache.kv if layer for tensor in layer.tensors]
    for tensor in tensors:
        tensor.fill_(0)
        tensor[source.block_table[1]] = 7
    cache.fork(source, target, 20)
    assert cache.reserve(target, 21) and target.block_table[1] != source.block_table[1]
    assert all((tensor[target.block_table[1]] == 7).all() for tensor in tensors)


def test_a_cache_of_nothing_is_refused() -> None:
    for layers in ((), (None, None)):
        with pytest.raises(ValueError, match="needs a layer that keeps something"):
            KVSpec(layers, torch.float32)


def test_kernels_refuse_what_they_do_not_read_by_name() -> None:
    nothing = KVSpec(LAYERS, torch.float32).allocate(1)[1]
    x, slots = torch.zeros(1, 1, 5), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match="got a layer without a cache"):
        native.store_kv(x, x, nothing, slots)
