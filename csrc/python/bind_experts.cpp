// Mixtures of experts: routers, stacks of weights, and the ops on them.
#include "bindings.h"
#include "pace/expert_ops.h"
#include "pace/ops.h"

namespace {

using pace::ExpertStack;
using pace::Router;

Router make_router(int score, int64_t experts, int64_t top_k, int64_t groups, int64_t kept_groups, bool group_top2,
                   bool normalise, float eps, float least_sum, float scale, float jitter, Address choice_bias) {
    return {Router::Score(score),
            experts,
            top_k,
            groups,
            kept_groups,
            group_top2,
            normalise,
            eps,
            least_sum,
            scale,
            jitter,
            at<const float>(choice_bias)};
}

void route(Address logits, int64_t stride, int64_t rows, const Router& router, Address routing) {
    pace::RouteOp op = {at<const float>(logits), stride, rows, router, at<float>(routing), 0, 0};
    pace::execute(op);
}

void experts(Address x, int64_t x_stride, int64_t rows, Address routing, int64_t count, int64_t top_k,
             const ExpertStack& gate_up, const ExpertStack& down, int activation, float alpha, float limit,
             bool weighs_input, Address residual, Address out) {
    pace::ExpertsOp op = {};
    op.x = at<const float>(x);
    op.x_stride = x_stride;
    op.rows = rows;
    op.routing = at<const float>(routing);
    op.router.experts = count;
    op.router.top_k = top_k;
    op.gate_up = gate_up;
    op.down = down;
    op.activation = {pace::Activation(activation), alpha, limit};
    op.weighs_input = weighs_input;
    op.residual = at<const float>(residual);
    op.out = at<float>(out);
    pace::execute(op);
}

void heads_linear(Address x, int64_t token_stride, int64_t head_stride, int64_t rows, int64_t heads,
                  const ExpertStack& weights, Address out) {
    pace::HeadsLinearOp op = {};
    op.x = {at<float>(x), token_stride, head_stride};
    op.rows = rows;
    op.heads = heads;
    op.weights = weights;
    op.out = at<float>(out);
    pace::execute(op);
}

void gate(Address x, int64_t x_stride, int64_t rows, int64_t k, Address gates, int64_t gate_stride) {
    pace::GateOp op = {at<float>(x), x_stride, rows, k, at<const float>(gates), gate_stride, 0, 0};
    pace::execute(op);
}

}  // namespace

void bind_experts(py::module_& m) {
    const py::call_guard<py::gil_scoped_release> release;
    py::class_<Router>(m, "Router")
        .def(py::init(&make_router), py::arg("score"), py::arg("experts"), py::arg("top_k"), py::arg("groups"),
             py::arg("kept_groups"), py::arg("group_top2"), py::arg("normalise"), py::arg("eps"), py::arg("least_sum"),
             py::arg("scale"), py::arg("jitter"), py::arg("choice_bias"));
    py::class_<ExpertStack>(m, "ExpertStack")
        .def(py::init([](Address weights, int64_t stride, Address bias, bool mapped) {
                 return ExpertStack{at<const void>(weights), stride, at<const float>(bias), mapped};
             }),
             py::arg("weights"), py::arg("stride"), py::arg("bias"), py::arg("mapped") = false);
    m.def("route", route, release);
    m.def("experts", experts, release);
    m.def("heads_linear", heads_linear, release);
    m.def("gate", gate, release);
}
