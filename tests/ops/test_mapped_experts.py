"""Stacks of experts in a mapped file: checked, multiplied to the same bits, and read ahead once rows have chosen
experts."""

from __future__ import annotations

import itertools
import mmap
import os
import resource

import pytest
import torch

from pace import _C
from pace.checkpoints.mapping import address_of
from pace.ops import native
from pace.ops.experts import Router
from pace.ops.kernels.experts import ExpertStack
from pace.ops.protocol import ExpertOptions
from pace.ops.weight import Room
from pace.ops.weight_layout import MixedLayout
from pace.quant import read_format

COUNT, HIDDEN, INNER, TOP_K = 16, 256, 512, 4
SILU = ExpertOptions("silu")
FORMATS = {name: read_format(name) for name in ("int8", "int4", "q4_k")}


def shapes(layout):
    return (COUNT, 2 * INNER, HIDDEN, layout, True), (COUNT, HIDDEN, INNER, layout, False)


def fill(stacks, format):
    generator = torch.Generator().manual_seed(1)
    for stack in stacks:
        for expert in stack.experts:
            rows = torch.randn(stack.n, stack.k, generator=generator)
            native.pack_quantized_(expert, native.quantize(rows, format), 0)


def over(mapping, layout, is_packed):
    room, found = Room(address_of(mapping), mapping, is_packed), []
    for shape in shapes(layout):
        found.append(ExpertStack(*shape, room))
        room = room.at(found[-1].nbytes)
    return found


@pytest.fixture
def make_file(tmp_path):
    """`make_file(format)` returns a descriptor of a file with both stacks."""
    descriptors = []

    def make(format):
        descriptor = os.open(tmp_path / format.name, os.O_RDWR | os.O_CREAT)
        descriptors.append(descriptor)
        os.ftruncate(descriptor, sum(native.stack_nbytes(*shape) for shape in shapes(format.layout)))
        fill(over(mmap.mmap(descriptor, 0), format.layout, is_packed=False), format)
        os.fsync(descriptor)
        return descriptor

    yield make
    for descriptor in descriptors:
        os.close(descriptor)


def read_only(descriptor):
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


def routing_of(rows):
    generator = torch.Generator().manual_seed(2)
    return native.route(torch.randn(rows, COUNT, generator=generator), Router(COUNT, TOP_K))


@pytest.mark.parametrize("name", FORMATS)
def test_bits_are_those_of_stacks_in_memory(name, make_file):
    format = FORMATS[name]
    in_memory = [native.empty_stack(*shape) for shape in shapes(format.layout)]
    fill(in_memory, format)
    mapped = over(read_only(make_file(format)), format.layout, is_packed=True)
    assert [stack.is_mapped for stack in in_memory + mapped] == [False, False, True, True]
    for threads, rows in itertools.product((1, 2, 5), (1, 3, 40, 200)):
        _C.set_num_threads(threads)
        x = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(rows))
        expected = native.experts(x, *in_memory, routing_of(rows), SILU)
        assert torch.equal(native.experts(x, *mapped, routing_of(rows), SILU), expected), (
            threads,
            rows,
        )


def test_other_layouts_than_the_file_has_are_refused(make_file):
    mapping = read_only(make_file(FORMATS["int8"]))
    with pytest.raises(ValueError, match="no weight .* in int4.* lies there"):
        over(mapping, FORMATS["int4"].layout, is_packed=True)


def test_headers_of_parts_are_checked_too():
    layouts = FORMATS["int8"].layout, FORMATS["int4"].layout
    mixed = MixedLayout(((64, layouts[0]), (64, layouts[1])))
    shape = (2, 128, 256, mixed)
    memory = mmap.mmap(-1, native.stack_nbytes(*shape))
    stack = ExpertStack(*shape, room=Room(address_of(memory), memory))
    assert ExpertStack(*shape, room=Room(address_of(memory), memory, is_packed=True)).is_mapped
    headers = [at for at in range(0, stack.stride, 64) if memory[stack.stride + at :][:4] == b"PACE"]
    assert len(headers) == 3
    for at in (*headers, 64):  # the headers of the whole and of its parts, then the offsets of the parts
        place = stack.stride + at + 8
        kept = memory[place]
        memory[place] = kept ^ 1
        with pytest.raises(ValueError, match="lies there"):
            ExpertStack(*shape, room=Room(address_of(memory), memory, is_packed=True))
        memory[place] = kept


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.alone
def test_pages_of_chosen_experts_are_read_before_products_want_them(rows, make_file):
    descriptor = make_file(FORMATS["int8"])
    mapping = read_only(descriptor)
    mapping.madvise(mmap.MADV_RANDOM)  # turns off the system's own readahead
    stacks = over(mapping, FORMATS["int8"].layout, is_packed=True)
    x, routing = torch.randn(rows, HIDDEN), routing_of(rows)
    chosen = len(set(routing[:, :TOP_K].flatten().tolist()))
    pages = chosen * sum(stack.stride for stack in stacks) // mmap.PAGESIZE

    def faults(work):
        """Number of pages that threads waited for, because they had not been read ahead."""
        native.experts(x, *in_memory, routing, SILU)  # so that code and buffers are loaded
        mapping.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        work()
        return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before

    in_memory = [native.empty_stack(*shape) for shape in shapes(FORMATS["int8"].layout)]
    fill(in_memory, FORMATS["int8"])
    if faults(lambda: sum(mapping[:: mmap.PAGESIZE])) < len(mapping) // mmap.PAGESIZE:
        pytest.skip("pages of this file system stay in memory")
    assert faults(lambda: native.experts(x, *stacks, routing, SILU)) <= 4 + pages // 50
    for stack in stacks:
        stack.is_mapped = False
    assert faults(lambda: native.experts(x, *stacks, routing, SILU)) >= pages // 2, "this does not see who asks"
