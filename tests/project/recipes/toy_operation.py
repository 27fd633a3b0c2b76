"""A toy operation, `hinge(x [T, K], margin) = max(x - margin, 0)`, added by the steps of "A kernel" in CONTRIBUTING.md:
`add(copy)`."""

from __future__ import annotations

from tests.project.recipes.copied_sources import Copy

KERNEL = """\
// Rows of max(x - margin, 0).
//
// SHAPES      x, y [count]
// DEFINITION  y = max(x - margin, 0)
// NUMERICS    fp32, one subtraction an element: the same bits on every table.

static void hinge(const float* x, float margin, float* y, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const int n = int(count - i < kLanes ? count - i : kLanes);
        store_lanes(y + i, max(load_lanes(x + i, n) - broadcast(margin), zero()), n);
    }
}
"""

OP_HEADER = """\
// csrc/ops/hinge.cpp. y = max(x - margin, 0).
struct HingeOp {
    static constexpr int kPhases = 1;
    const float* x;  // [rows][k], x_stride floats between rows
    int64_t x_stride, rows, k;
    float margin;
    float* y;  // [rows][k]

    void prepare(int) {}
    int64_t chunks(int) const { return rows; }
    void run(int phase, int64_t chunk, int thread) const;
};
"""

OP = """\
// How the toy is cut: rows.
#include "pace/ops.h"
#include "pace/row_ops.h"

namespace pace {

void HingeOp::run(int, int64_t row, int) const { kernels().hinge(x + row * x_stride, margin, y + row * k, k); }

}  // namespace pace
"""

BINDING = """\
void hinge(const Matrix& x, float margin, Array<float> y) {
    pace::HingeOp op = {x.data, x.stride, x.rows, x.columns, margin, y};
    pace::execute(op);
}
"""

PROGRAM = """\
void Program::hinge(Value out, Columns x, float margin) {
    record<HingeOp>("hinge", false, [=](HingeOp& op, const Frame& frame) {
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(out);
        op.k = x.count;
        op.margin = margin;
        op.y = frame.at(out);
    });
}
"""

PROMISE = '''\
    def hinge(self, x: Tensor, margin: float) -> Tensor:
        """`[T, K]`: `max(x - margin, 0)`; x may have any row stride."""

'''

NATIVE = '''\
"""The hinge on its C++ kernel."""

import torch
from torch import Tensor

from pace import _C


def hinge(x: Tensor, margin: float) -> Tensor:
    if x.dtype != torch.float32 or x.ndim != 2 or x.stride(1) != 1:
        raise ValueError(f"x must be float32 [T, K] with contiguous rows; got {x.dtype} {list(x.shape)}")
    out = torch.empty(x.shape)
    _C.hinge(x, margin, out)
    return out
'''

REFERENCE = """\
def hinge(x: Tensor, margin: float) -> Tensor:
    return (x - margin).clamp(min=0)


"""

RECORDED = '''\
@dataclass(eq=False)
class Hinge(Instruction):
    """out = max(x - margin, 0)."""

    operations = ("hinge",)
    operator = "mlp"
    out: Value
    x: Columns
    margin: float

    def lower(self, program: _C.Program, places: Places) -> None:
        program.hinge(places.value(self.out), places.columns(self.x), self.margin)


def hinge(x: Rows, margin: float) -> Rows:
    return x.recording.rows(Hinge(x.like(), x.columns, margin))


'''

CPP_TEST = """\
// The toy, at the edges of vectors.
#include "check.h"
#include "pace/kernels.h"

TEST_TABLES(hinge_of_every_length) {
    for (const int64_t count : {1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 100}) {
        std::vector<float> x = check::heavy_tailed(count, 1), y(count + 1, check::kPoison);
        table.hinge(x.data(), 0.25f, y.data(), count);
        for (int64_t i = 0; i < count; ++i) CHECK(y[i] == std::max(x[i] - 0.25f, 0.0f));
        CHECK(std::isnan(y[count]));
    }
}
"""

TEST = '''\
"""The toy operation: the kernel, its reference and its instruction agree to the bit."""

import torch

from pace.batch import ForwardBatch, Spans
from pace.graph.program import Program
from pace.ops import native, reference


class Model:
    """Logits = the hinge of some columns of the embedding."""

    def __init__(self):
        self.table = native.empty_weight(50, 40, torch.float32)
        native.pack_rows_(self.table, torch.randn(50, 40), 0)

    def compute(self, ops, batch, angles):
        return ops.hinge(ops.embedding(batch.tokens, self.table)[:, 3:20], 0.5)[batch.logit_rows]


def test_the_reference():
    x = torch.randn(5, 40)[:, 2:39]
    y = native.hinge(x, 0.25)
    assert torch.equal(y, reference.hinge(x, 0.25)) and 0 < int((y > 0).sum()) < y.numel()


def test_a_program():
    ids, one = torch.randint(0, 50, (7,)), torch.tensor([0, 7], dtype=torch.int32)
    spans = Spans(one, one[1:], torch.zeros(1, 1, dtype=torch.int32))
    batch = ForwardBatch(ids, torch.arange(7), torch.arange(7), spans, torch.arange(7), torch.tensor([1, 6]), [])
    model = Model()
    assert torch.equal(Program(model, (), ()).run(batch, ()), model.compute(native, batch, ()))
'''


def add(copy: Copy) -> None:
    # 1. One .inl
    copy.write("csrc/kernels/hinge.inl", KERNEL)
    copy.add_after("csrc/kernels/all.inl", '#include "elementwise.inl"', '#include "hinge.inl"\n')
    # 2. One line in the table, and how work is cut
    line = "    void (*hinge)(const float* x, float margin, float* y, int64_t count);\n"
    copy.add_after("csrc/include/pace/kernels.h", "    void (*activation)(", line)
    copy.add_after("csrc/kernels/table.inl", "    .activation = activation,", "    .hinge = hinge,\n")
    copy.add_before("csrc/include/pace/row_ops.h", "// csrc/ops/sampling.cpp. indices[r]", OP_HEADER + "\n")
    copy.write("csrc/ops/hinge.cpp", OP)
    # 3. One binding
    copy.add_before("csrc/python/bind_rows.cpp", "void argmax(", BINDING + "\n")
    copy.add_after("csrc/python/bind_rows.cpp", '    m.def("argmax"', '    m.def("hinge", hinge, release);\n')
    stub = "def hinge(x: Tensor, margin: float, y: Tensor) -> None: ...\n"
    copy.add_before("pace/_C.pyi", "def argmax(", stub)
    # 4. One op with its reference
    copy.add_before("pace/ops/protocol.py", "    def rms_norm(", PROMISE)
    copy.write("pace/ops/native_hinge.py", NATIVE)
    copy.add_after("pace/ops/native.py", "from pace.ops.kernels.attention", "from pace.ops.native_hinge import hinge\n")
    copy.add_after("pace/ops/native.py", '    "head_rms_norm_",', '    "hinge",\n')
    copy.add_before("pace/ops/reference.py", "def activation(", REFERENCE)
    # 5. One instruction
    copy.add_before("pace/graph/recorded/elementwise.py", "@dataclass(eq=False)\nclass Scale", RECORDED)
    line = "from pace.graph.recorded.elementwise import hinge  # noqa: F401\n"
    copy.add_after("pace/graph/recorded/__init__.py", "from pace.graph.recorded.elementwise", line)
    declaration = "    void hinge(Value out, Columns x, float margin);\n"
    copy.add_after("csrc/include/pace/program.h", "    void activation(", declaration)
    copy.add_before("csrc/program.cpp", "void Program::activation(", PROGRAM + "\n")
    copy.add_after("csrc/python/bind_program.cpp", '        .def("add"', '        .def("hinge", &Program::hinge)\n')
    method = "    def hinge(self, out: Value, x: Columns, margin: float) -> None: ...\n"
    copy.add_after("pace/_C.pyi", "    def activation(", method)
    # 6. One test in tests/csrc/, and one in tests/ops/
    copy.write("tests/csrc/test_hinge.cpp", CPP_TEST)
    copy.write("tests/ops/test_hinge.py", TEST)
