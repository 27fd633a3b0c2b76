"""A toy setting of attention, `gain`, a factor of the result, added by the steps of "A new argument of an op" in
CONTRIBUTING.md: `add(copy)`."""

from __future__ import annotations

from tests.project.recipes.copied_sources import Copy

TEST = '''\
"""The toy setting: the kernel, its definition and a program apply it."""

import torch

from pace.batch import ForwardBatch, KVSpec, Positions, Spans
from pace.graph.program import Program
from pace.ops import native, reference
from pace.ops.protocol import AttentionOptions

LAYERS = (Positions(1, 16, 16),)


class Model:
    """Logits = attention over columns of the embedding."""

    def __init__(self):
        self.table = native.empty_weight(50, 48, torch.float32)
        native.pack_rows_(self.table, torch.randn(50, 48), 0)

    def compute(self, ops, batch, angles, gain=3.0):
        q, k, v = (ops.embedding(batch.tokens, self.table)[:, i : i + 16].unflatten(1, (1, 16)) for i in (0, 16, 32))
        ops.store_kv(k, v, batch.kv[0], batch.slots)
        return ops.attention(q, batch.kv[0], batch.spans, AttentionOptions(0.3, gain=gain))[batch.logit_rows]


def test_gain():
    model, ids = Model(), torch.randint(0, 50, (7,))
    spans = Spans(*(torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 7], [7], [[0]])))
    kv = KVSpec(LAYERS, torch.float32).allocate(1)
    batch = ForwardBatch(ids, torch.arange(7), torch.arange(7), spans, torch.arange(7), torch.arange(7), kv)
    found = Program(model, LAYERS, ()).run(batch, ())
    assert torch.equal(found, model.compute(native, batch, ()))
    plain = model.compute(native, batch, (), gain=1.0)
    torch.testing.assert_close(found, 3 * plain)
    q = native.embedding(ids, model.table)[:, :16].unflatten(1, (1, 16))
    expected = reference.attention(q, kv[0], spans, AttentionOptions(0.3, gain=3.0))
    torch.testing.assert_close(found, expected)
'''


def add(copy: Copy) -> set[str]:
    """Returns the paths of the files that a new setting touches, without its test."""
    before, copy.touched = copy.touched, set()
    # 1. The contract
    field = '    gain: float = 1.0\n    """Factor of the result."""\n\n'
    copy.add_before("pace/ops/protocol.py", "    def __post_init__(self)", field)
    # 2. The definition
    copy.add_before("pace/ops/reference.py", "    return out.flatten(1)", "    out *= options.gain\n")
    # 3. The C++ field, and 4. the line that reads it
    copy.add_after("csrc/include/pace/attention.h", "    const float* sinks", "    float gain = 1;\n")
    line = '    read_field(record, "gain", to.gain);\n'
    copy.add_after("csrc/python/records.h", '    read_field(record, "sinks"', line)
    # 5. The kernel
    line = "    weight *= args.gain;\n"
    copy.add_before("csrc/kernels/attention_partitions.inl", "    const F32 scale = broadcast(weight)", line)
    # 6. The layer
    layer = "pace/llm/layers/attention.py"
    copy.add_after(layer, "        self.softcap = softcap", "        self.gain = 1.0\n")
    copy.add_after(layer, "from __future__", "\nimport dataclasses\n")
    line = "        options = dataclasses.replace(options, gain=self.gain)\n"
    copy.add_before(layer, "        return ops.attention(", line)
    touched, copy.touched = copy.touched, before | copy.touched
    copy.write("tests/ops/test_gain.py", TEST)
    return touched
