// Recorded programs (pace/program.h). Weights, parameters and caches are kept alive by the Python side.
#include <algorithm>

#include "pace/program.h"
#include "records.h"

namespace {

using pace::Array;
using pace::Columns;
using pace::HeadsOf;
using pace::Norm;
using pace::Program;
using pace::Value;

void linear(Program& program, Value out, Columns x, const Norm& norm, const pace::Weight& weight,
            Array<const float> bias, const pace::ActivationFunction& activation, std::optional<Value> residual,
            bool apart, const std::optional<pace::AdapterTable>& adapters) {
    program.linear(out, x, {norm, weight.data, weight.order, bias, activation, apart}, residual, adapters);
}

// Without a router, `choices` is a routing.
void experts(Program& program, Value out, Columns x, const Norm& norm, Value choices,
             std::optional<pace::Router> router, Array<const float> choice_bias, Array<const float> expert_scale,
             int64_t count, const pace::ExpertStack& gate_up, const pace::ExpertStack& down,
             const pace::ExpertOptions& options, std::optional<Value> residual) {
    pace::Mixture mixture = {norm, router.value_or(pace::Router{}), gate_up, down, options};
    mixture.router.choice_bias = choice_bias;
    mixture.router.expert_scale = expert_scale;
    if (!router) {
        mixture.router.experts = count;
        mixture.router.top_k = choices.columns / 2;
    }
    program.experts(out, x, choices, router.has_value(), mixture, residual);
}

Program::Ids find_ids(const std::string& name) {
    if (name == "tokens") return Program::Ids::Tokens;
    return name == "positions" ? Program::Ids::Positions : Program::Ids::Types;
}

// The caches of all layers, built once and reused by many steps.
struct KvCache {
    std::vector<pace::LayerCache> layers;
    int groups = 0;

    explicit KvCache(const py::list& caches) {
        for (const py::handle cache : caches) {
            pace::LayerCache& layer = layers.emplace_back();
            if (py::hasattr(cache, "state")) {
                pace::read(cache, layer.states);
                continue;
            }
            std::tie(layer.kv, layer.group) = cache.cast<std::pair<pace::KvView, int>>();
            if (layer.group < 0) throw std::invalid_argument("a group of layers is numbered 0 or more");
            groups = std::max(groups, layer.group + 1);
        }
    }
};

// The arrays of a ForwardBatch of pace/batch.py, which must outlive it.
struct Batch {
    pace::Step step = {};
    std::vector<pace::Table> tables;  // for each group of layers
    std::optional<pace::StateSpans> states;

    explicit Batch(py::handle batch) {
        pace::read_field(batch, "tokens", step.ids);
        pace::read_field(batch, "positions", step.positions);
        pace::read_field(batch, "types", step.types);
        pace::read_field(batch, "logit_rows", step.rows);
        pace::read_field(batch, "largest", step.largest);
        step.tokens = int64_t(py::len(batch.attr("tokens")));
        step.logit_rows = int64_t(py::len(batch.attr("logit_rows")));
        if (const py::object given = batch.attr("given"); !given.is_none()) {
            pace::Matrix rows;
            pace::read(given.attr("rows"), rows);
            step.given = {rows.data, rows.stride, rows.rows, rows.columns, nullptr};
            pace::read_field(given, "at", step.given.at);
        }
        if (const py::object kept = batch.attr("kept"); !kept.is_none()) {
            pace::Matrix rows;
            pace::read(kept, rows);
            step.kept = {rows.data, rows.stride, rows.rows, rows.columns};
        }
        if (const py::object routing = batch.attr("routing"); !routing.is_none()) {
            pace::Matrix rows;
            pace::read(routing, rows);
            step.routing = {rows.data, rows.rows, rows.columns / 2};
        }
        if (const py::object spans = batch.attr("states"); !spans.is_none()) pace::read(spans, states.emplace());
        add_table(batch);
        for (const py::handle other : batch.attr("others")) add_table(other);
    }
    void add_table(py::handle batch) {
        pace::Table& table = tables.emplace_back();
        pace::read_field(batch, "slots", table.slots);
        pace::read_field(batch, "spans", table.spans);
    }
};

void run(Program& program, const KvCache& cache, const Batch& batch,
         const std::vector<std::pair<Address, Address>>& rotations, const std::vector<Address>& inputs, Address logits,
         bool finds_largest) {
    if (int(batch.tables.size()) < cache.groups) {
        throw std::invalid_argument("the cache has " + std::to_string(cache.groups) +
                                    " groups of layers, the batch has tables for " +
                                    std::to_string(batch.tables.size()));
    }
    std::vector<pace::Angles> angles;
    for (const auto& [cos, sin] : rotations) angles.push_back({at<const float>(cos), at<const float>(sin)});
    pace::Step step = batch.step;
    step.cache = cache.layers.data();
    step.angles = angles.data();
    std::vector<const float*> rows;
    for (const Address input : inputs) rows.push_back(at<const float>(input));
    step.inputs = rows.data();
    step.tables = batch.tables.data();
    step.states = batch.states ? &*batch.states : nullptr;
    step.logits = at<float>(logits);
    if (!finds_largest) step.largest = nullptr;
    program.run(step);
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
    py::class_<pace::Preparation>(m, "Preparation")
        .def(py::init<std::optional<HeadsOf>, std::optional<HeadsOf>, Norm, Norm, Norm, pace::Rotation, bool>(),
             py::arg("k"), py::arg("v"), py::arg("query_norm"), py::arg("key_norm"), py::arg("value_norm"),
             py::arg("rotation"), py::arg("norm_last"));
    py::class_<Batch>(m, "Batch")
        .def(py::init<py::handle>(), py::arg("batch"))
        .def_property_readonly("num_tokens", [](const Batch& batch) { return batch.step.tokens; })
        .def_property_readonly("num_logit_rows", [](const Batch& batch) { return batch.step.logit_rows; });
    py::class_<KvCache>(m, "KvCache").def(py::init<const py::list&>(), py::arg("layers"));
    py::class_<Program>(m, "Program")
        .def(py::init<std::vector<int64_t>, const Program*>(), py::arg("widths"), py::arg("neighbour") = nullptr)
        .def("embedding",
             [](Program& program, Value out, const pace::Weight& weight, const std::string& ids, int64_t offset) {
                 program.embedding(out, weight.data, weight.order, find_ids(ids), offset);
             })
        .def("input_rows", &Program::input_rows)
        .def("given_rows", &Program::given_rows)
        .def("place_rows", &Program::place_rows)
        .def("gather_rows", &Program::gather_rows)
        .def("keep_rows", &Program::keep_rows)
        .def("pool",
             [](Program& program, Value out, Columns x, pace::NamedPooling name) { program.pool(out, x, name.kind); })
        .def("concatenate", &Program::concatenate)
        .def("add", &Program::add)
        .def("activation", &Program::activation)
        .def("glu", &Program::glu)
        .def("add_adapters", &Program::add_adapters)
        .def(
            "scale",
            [](Program& program, Columns x, float factor, Array<const float> factors) {
                program.scale(x, factor, factors);
            },
            py::arg("x"), py::arg("factor"), py::arg("factors") = py::none())
        .def("softcap", &Program::softcap)
        .def("norm", &Program::norm)
        .def("linear", linear)
        .def("gate",
             [](Program& program, Columns x, Columns gate, pace::NamedGate name) { program.gate(x, gate, name.kind); })
        .def("gated_norm", &Program::gated_norm)
        .def("causal_conv",
             [](Program& program, Value out, Columns x, int layer, Array<const float> weight, Array<const float> bias,
                bool silu) { program.causal_conv(out, x, layer, {weight, bias, silu}); })
        .def("recurrence", &Program::recurrence)
        .def("route",
             [](Program& program, Value out, Columns logits, pace::Router router, Array<const float> choice_bias,
                Array<const float> expert_scale) {
                 router.choice_bias = choice_bias;
                 router.expert_scale = expert_scale;
                 program.route(out, logits, router);
             })
        .def("experts", experts)
        .def("norm_heads", &Program::norm_heads)
        .def("rotate_heads", &Program::rotate_heads)
        .def("store_kv", &Program::store_kv)
        .def("heads_linear", &Program::heads_linear)
        .def("attention", &Program::attention)
        .def("run", run, release)
        .def("set_profiling", &Program::set_profiling)
        .def("timings", timings)
        .def_property_readonly("num_instructions", &Program::num_instructions)
        .def_property_readonly("barriers", &Program::barriers)
        .def_property_readonly("buffer_bytes", &Program::buffer_bytes);
}
