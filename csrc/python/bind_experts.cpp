// Mixtures of experts: routing, products with the chosen experts, and products of heads.
#include "records.h"

namespace {

using pace::Array;
using pace::ExpertStack;
using pace::HeadsTensor;
using pace::Matrix;

void route(const Matrix& logits, pace::Router router, Array<const float> choice_bias, Array<const float> expert_scale,
           Array<float> routing) {
    router.choice_bias = choice_bias;
    router.expert_scale = expert_scale;
    pace::RouteOp op = {logits.data, logits.stride, logits.rows, router, routing, 0, 0};
    pace::execute(op);
}

void experts(const Matrix& x, const Matrix& routing, int64_t count, const ExpertStack& gate_up, const ExpertStack& down,
             const pace::ExpertOptions& options, Array<const float> residual, Array<float> out) {
    pace::ExpertsOp op = {};
    op.gate_up = gate_up;
    op.down = down;
    op.options = options;
    op.router.experts = count;
    op.router.top_k = routing.columns / 2;
    op.x = x.data;
    op.x_stride = x.stride;
    op.rows = x.rows;
    op.routing = routing.data;
    op.residual = residual;
    op.out = out;
    pace::execute(op);
}

void heads_linear(const HeadsTensor& x, const ExpertStack& weights, Array<float> out) {
    pace::HeadsLinearOp op = {};
    op.x = x;
    op.rows = x.tokens;
    op.heads = x.heads;
    op.weights = weights;
    op.out = out;
    pace::execute(op);
}

}  // namespace

void bind_experts(py::module_& m) {
    const py::call_guard<py::gil_scoped_release> release;
    m.def("route", route, release);
    m.def("experts", experts, release);
    m.def("heads_linear", heads_linear, release);
}
