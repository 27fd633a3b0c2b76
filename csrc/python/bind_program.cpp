// Recorded programs (pace/program.h). Weights, parameters and caches are kept alive by the Python side.
#include <algorithm>

#include "bindings.h"
#include "pace/program.h"

namespace {

using pace::Columns;
using pace::HeadsOf;
using pace::Norm;
using pace::Program;
using pace::Value;

Norm make_norm(const std::string& kind, Address weight, Address bias, float eps, int64_t head_stride) {
    const Norm::Kind named = kind == "layer" ? Norm::Kind::Layer : Norm::Kind::Rms;
    return {named, at<const float>(weight), at<const float>(bias), eps, head_stride};
}

void linear(Program& program, Value out, Columns x, const Norm* norm, Address weight, Address order, Address bias,
            int activation, const Value* residual) {
    program.linear(out, x, norm ? *norm : Norm{}, at<const void>(weight), at<const int32_t>(order),
                   at<const float>(bias), pace::Activation(activation), residual);
}

void experts(Program& program, Value out, Columns x, const Norm* norm, Value choices, bool chooses,
             const pace::Router& router, const pace::ExpertStack& gate_up, const pace::ExpertStack& down,
             int activation, float alpha, float limit, bool weighs_input, const Value* residual) {
    program.experts(out,
                    {x,
                     norm ? *norm : Norm{},
                     choices,
                     chooses,
                     router,
                     gate_up,
                     down,
                     {pace::Activation(activation), alpha, limit},
                     weighs_input},
                    residual);
}

pace::Preparation make_preparation(HeadsOf k, HeadsOf v, const Norm* query_norm, const Norm* key_norm,
                                   const Norm* value_norm, const pace::Rotation* rotation, bool norm_last) {
    return {k,
            v,
            query_norm ? *query_norm : Norm{},
            key_norm ? *key_norm : Norm{},
            value_norm ? *value_norm : Norm{},
            rotation ? *rotation : pace::Rotation{},
            norm_last};
}

void attention(Program& program, Value out, HeadsOf q, const HeadsOf* latent_q, const pace::Preparation* preparation,
               int layer, float scale, int64_t window, bool chunked, float softcap, Address sinks) {
    program.attention(out, q, latent_q, preparation, layer, scale, window == 0 ? pace::kNoWindow : window, chunked,
                      softcap, at<const float>(sinks));
}

// The caches of all layers, built once and reused by many steps.
struct KvCache {
    std::vector<pace::LayerCache> layers;
    int groups = 0;

    explicit KvCache(const std::vector<std::pair<pace::KvView, int>>& views) {
        for (const auto& [kv, group] : views) {
            if (group < 0) throw std::invalid_argument("a group of layers is numbered 0 or more");
            layers.push_back({kv, group});
            groups = std::max(groups, group + 1);
        }
    }
};

void run(Program& program, const KvCache& cache, int64_t tokens, int64_t logit_rows, Address ids, Address positions,
         Address rows, int64_t spans, Address query_start, Address kv_len,
         const std::vector<std::pair<Address, Address>>& groups, int64_t table_stride,
         const std::vector<std::pair<Address, Address>>& rotations, Address logits) {
    std::vector<pace::Table> tables;
    for (const auto& [slots, blocks] : groups) tables.push_back({at<const int64_t>(slots), at<const int32_t>(blocks)});
    if (int(tables.size()) < cache.groups) {
        throw std::invalid_argument("the cache has " + std::to_string(cache.groups) +
                                    " groups of layers, the batch has tables for " + std::to_string(tables.size()));
    }
    std::vector<pace::Angles> angles;
    for (const auto& [cos, sin] : rotations) angles.push_back({at<const float>(cos), at<const float>(sin)});
    program.run({cache.layers.data(), tokens, logit_rows, at<const int64_t>(ids), at<const int64_t>(positions),
                 angles.data(), at<const int64_t>(rows), spans, at<const int32_t>(query_start),
                 at<const int32_t>(kv_len), tables.data(), table_stride, at<float>(logits)});
}

py::list timings(const Program& program) {
    py::list out;
    for (const Program::Timing& timing : program.timings())
        out.append(py::make_tuple(timing.name, timing.runs, timing.seconds));
    return out;
}

}  // namespace

void bind_program(py::module_& m) {
    const py::call_guard<py::gil_scoped_release> release;
    py::class_<Value>(m, "Value")
        .def(py::init<int, int64_t, bool>(), py::arg("buffer"), py::arg("columns"), py::arg("per_token"));
    py::class_<Columns>(m, "Columns")
        .def(py::init<Value, int64_t, int64_t>(), py::arg("value"), py::arg("first"), py::arg("count"));
    py::class_<HeadsOf>(m, "Heads")
        .def(py::init<Value, int64_t, int64_t, int64_t, int64_t>(), py::arg("value"), py::arg("column"),
             py::arg("count"), py::arg("head_dim"), py::arg("stride"));
    py::class_<Norm>(m, "Norm").def(py::init(&make_norm), py::arg("kind"), py::arg("weight"), py::arg("bias"),
                                    py::arg("eps"), py::arg("head_stride"));
    py::class_<pace::Rotation>(m, "Rotation")
        .def(py::init<int, int64_t, bool>(), py::arg("table"), py::arg("half"), py::arg("interleaved"));
    py::class_<pace::Preparation>(m, "Preparation")
        .def(py::init(&make_preparation), py::arg("k"), py::arg("v"), py::arg("query_norm"), py::arg("key_norm"),
             py::arg("value_norm"), py::arg("rotation"), py::arg("norm_last"));
    py::class_<KvCache>(m, "KvCache")
        .def(py::init<const std::vector<std::pair<pace::KvView, int>>&>(), py::arg("layers"));
    py::class_<Program>(m, "Program")
        .def(py::init<std::vector<int64_t>>(), py::arg("widths"))
        .def("embedding",
             [](Program& program, Value out, Address weight, Address order, bool positions, int64_t offset) {
                 program.embedding(out, at<const void>(weight), at<const int32_t>(order),
                                   positions ? Program::Ids::Positions : Program::Ids::Tokens, offset);
             })
        .def("gather_rows", &Program::gather_rows)
        .def("add", &Program::add)
        .def("activation", [](Program& program, Value out, Columns x,
                              int kind) { program.activation(out, x, pace::Activation(kind)); })
        .def("scale", &Program::scale)
        .def("softcap", &Program::softcap)
        .def("norm", &Program::norm)
        .def("linear", linear)
        .def("gate", &Program::gate)
        .def("route", &Program::route)
        .def("experts", experts)
        .def("norm_heads", &Program::norm_heads)
        .def("rotate_heads", &Program::rotate_heads)
        .def("store_kv", &Program::store_kv)
        .def("heads_linear", &Program::heads_linear)
        .def("attention", attention)
        .def("run", run, release)
        .def("set_profiling", &Program::set_profiling)
        .def("timings", timings)
        .def_property_readonly("num_instructions", &Program::num_instructions)
        .def_property_readonly("barriers", &Program::barriers)
        .def_property_readonly("buffer_bytes", &Program::buffer_bytes);
}
