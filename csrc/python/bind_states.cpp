// Causal convolutions, recurrences and gates.
#include "pace/state_ops.h"
#include "records.h"

namespace {

using pace::Array;
using pace::HeadsTensor;
using pace::Matrix;

void gate(const Matrix& x, const Matrix& gates, const pace::NamedGate& activation) {
    pace::GateOp op = {activation.kind, x.data,       x.stride,      x.rows, x.columns,
                       gates.data,      gates.stride, gates.columns, 0,      0};
    pace::execute(op);
}

void gated_norm(const Matrix& x, const Matrix& gate, const pace::GatedNorm& norm, Array<float> y) {
    pace::GatedNormOp op = {norm, x.data, gate.data, x.stride, gate.stride, x.rows, x.columns, y, 0, 0};
    pace::execute(op);
}

void causal_conv(const Matrix& x, Array<const float> weight, Array<const float> bias, bool silu,
                 const pace::StateSlots& slots, const pace::StateSpans& spans, Array<float> out) {
    pace::CausalConvOp op = {};
    op.convolution = {weight, bias, silu};
    op.x = x.data;
    op.x_stride = x.stride;
    op.tokens = x.rows;
    op.slots = slots;
    op.spans = spans;
    op.out = out;
    pace::execute(op);
}

void recurrence(const HeadsTensor& q, const HeadsTensor& k, const HeadsTensor& v, const Matrix& steps,
                const std::optional<Matrix>& beta, const pace::StateSlots& slots, const pace::StateSpans& spans,
                const pace::Recurrence& options, Array<float> out) {
    pace::RecurrenceOp op = {};
    op.recurrence = options;
    op.q = q;
    op.k = k;
    op.v = v;
    op.key_heads = q.heads;
    op.tokens = v.tokens;
    op.steps = steps.data;
    op.steps_stride = steps.stride;
    op.beta = beta ? beta->data : nullptr;
    op.beta_stride = beta ? beta->stride : 0;
    op.slots = slots;
    op.spans = spans;
    op.out = out;
    pace::execute(op);
}

}  // namespace

void bind_states(py::module_& m) {
    const py::call_guard<py::gil_scoped_release> release;
    m.def("gate", gate, release);
    m.def("gated_norm", gated_norm, release);
    m.def("causal_conv", causal_conv, release);
    m.def("recurrence", recurrence, release);
}
