// Python objects that functions of `_C` take directly: tensors, and records of pace.ops and pace.batch. A call reads
// their attributes by name, before it releases the GIL. It stores addresses of tensors and checks no shapes.
#pragma once

#include <map>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "bindings.h"
#include "pace/adapter_ops.h"
#include "pace/attention_ops.h"
#include "pace/expert_ops.h"
#include "pace/program.h"
#include "pace/state_ops.h"

namespace pace {

// A contiguous tensor, or null for None.
template <class T>
void read(py::handle from, T*& to) {
    to = from.is_none() ? nullptr : at<T>(from.attr("data_ptr")().cast<Address>());
}

template <class T>
void read_field(py::handle record, const char* name, T& to) {
    const py::object value = record.attr(name);
    if constexpr (requires { read(value, to); }) {
        read(value, to);
    } else {
        to = value.cast<T>();
    }
}

inline std::string text(py::handle record, const char* name) { return record.attr(name).cast<std::string>(); }

// Reads a field; None leaves `to` unchanged.
template <class T>
void read_optional(py::handle record, const char* name, T& to) {
    if (const py::object value = record.attr(name); !value.is_none()) to = value.cast<T>();
}

// A contiguous tensor of T, or null for None.
template <class T>
struct Array {
    T* data;
    operator T*() const { return data; }
};

template <class T>
void read(py::handle from, Array<T>& to) {
    read(from, to.data);
}

// float32 [rows][columns], with contiguous rows.
struct Matrix {
    float* data;
    int64_t stride, rows, columns;
};

inline void read(py::handle tensor, Matrix& to) {
    const auto [rows, columns] = tensor.attr("shape").cast<std::pair<int64_t, int64_t>>();
    to = {nullptr, tensor.attr("stride")(0).cast<int64_t>(), rows, columns};
    read(tensor, to.data);
}

// float32 [tokens][heads][dim], with contiguous heads.
struct HeadsTensor : HeadsView {
    int64_t tokens, heads, dim;
};

inline void read(py::handle tensor, HeadsTensor& to) {
    const py::tuple shape = tensor.attr("shape"), strides = tensor.attr("stride")();
    read(tensor, to.data);
    to.token_stride = strides[0].cast<int64_t>();
    to.head_stride = strides[1].cast<int64_t>();
    to.tokens = shape[0].cast<int64_t>();
    to.heads = shape[1].cast<int64_t>();
    to.dim = shape[2].cast<int64_t>();
}

inline Activation find_activation(py::handle name) {
    // gelu_new, gelu_tanh and gelu_fast are the same function.
    static const std::map<std::string, Activation> kNames = {
        {"silu", Activation::Silu},          {"gelu", Activation::Gelu},          {"gelu_new", Activation::GeluTanh},
        {"gelu_tanh", Activation::GeluTanh}, {"gelu_fast", Activation::GeluTanh}, {"quick_gelu", Activation::QuickGelu},
        {"relu", Activation::Relu},          {"relu2", Activation::Relu2},        {"tanh", Activation::Tanh}};
    const auto found = kNames.find(py::str(name));
    if (found == kNames.end()) {
        std::string known;
        for (const auto& [each, _] : kNames) known += (known.empty() ? "" : ", ") + each;
        throw std::invalid_argument("unknown activation " + std::string(py::repr(name)) + "; known: " + known);
    }
    return found->second;
}

// None, a name, or a Clamp, Xielu or ClampedSwiglu of pace/ops.
inline void read(py::handle from, ActivationFunction& to) {
    to = {};
    if (from.is_none()) return;
    if (py::hasattr(from, "alpha_p")) {
        to.kind = Activation::Xielu;
        read_field(from, "alpha_p", to.alpha_p);
        read_field(from, "alpha_n", to.alpha_n);
        read_field(from, "beta", to.beta);
        read_field(from, "eps", to.eps);
    } else if (py::hasattr(from, "alpha")) {
        to.kind = Activation::ClampedSwiglu;
        read_field(from, "alpha", to.alpha);
        read_field(from, "limit", to.limit);
    } else if (py::hasattr(from, "low")) {
        to.kind = Activation::Clamp;
        read_field(from, "low", to.low);
        read_field(from, "high", to.high);
    } else {
        to.kind = find_activation(from);
    }
}

// NormParameters of pace/ops/kernels/norm.py, or None.
inline void read(py::handle record, Norm& to) {
    to = {};
    if (record.is_none()) return;
    to.kind = text(record, "kind") == "layer" ? Norm::Kind::Layer : Norm::Kind::Rms;
    read_field(record, "weight", to.weight);
    read_field(record, "bias", to.bias);
    read_field(record, "eps", to.eps);
    const py::object weight = record.attr("weight");
    if (to.weight && weight.attr("ndim").cast<int>() == 2) to.head_stride = weight.attr("stride")(0).cast<int64_t>();
}

// Rotation of pace/graph/recorded/heads.py, or None.
inline void read(py::handle record, Rotation& to) {
    to = {};
    if (record.is_none()) return;
    read_field(record, "table", to.table);
    read_field(record, "half", to.half);
    read_field(record, "interleaved", to.interleaved);
}

// PackedWeight of pace/ops/weight.py.
struct Weight {
    const void* data;
    const int32_t* order;
};

inline void read(py::handle record, Weight& to) {
    to.data = at<const void>(record.attr("address").cast<Address>());
    to.order = at<const int32_t>(record.attr("order_address").cast<Address>());
}

inline void read(py::handle record, ExpertStack& to) {
    to.weights = at<const void>(record.attr("address").cast<Address>());
    read_field(record, "stride", to.stride);
    read_field(record, "is_mapped", to.mapped);
}

// AdapterTable of pace/ops/adapters.py.
inline void read(py::handle record, AdapterTable& to) {
    to = {};
    read_field(record, "addresses", to.addresses);
    read_field(record, "scales", to.scales);
    read_field(record, "starts", to.starts);
    std::tie(to.slots, to.parts) = record.attr("scales").attr("shape").cast<std::pair<int64_t, int64_t>>();
    read_field(record, "k", to.k);
    read_field(record, "max_rank", to.max_rank);
    to.dtype = DType(record.attr("dtype_code").cast<int>());
}

// Router of pace/ops/experts.py; its two vectors are separate parameters.
inline void read(py::handle record, Router& to) {
    static const char* const kScores[] = {"softmax", "sigmoid", "softmax_of_chosen", "sparsemixer",
                                          "sigmoid_of_chosen"};  // in the order of Router::Score
    to = {};
    for (int i = 0; i < int(std::size(kScores)); ++i)
        if (text(record, "score") == kScores[i]) to.score = Router::Score(i);
    to.group_top2 = text(record, "group_score") == "top2";
    read_field(record, "num_experts", to.experts);
    read_field(record, "top_k", to.top_k);
    read_field(record, "groups", to.groups);
    read_field(record, "kept_groups", to.kept_groups);
    read_field(record, "normalise", to.normalise);
    read_field(record, "eps", to.eps);
    read_field(record, "least_sum", to.least_sum);
    read_field(record, "scale", to.scale);
    read_field(record, "jitter", to.jitter);
}

inline void read(py::handle record, ExpertOptions& to) {
    read_field(record, "activation", to.activation);
    read_field(record, "gate_up_bias", to.gate_up_bias);
    read_field(record, "down_bias", to.down_bias);
    read_field(record, "weigh_inputs", to.weigh_inputs);
}

inline void read(py::handle record, AttentionOptions& to) {
    to = {};
    read_field(record, "scale", to.scale);
    read_optional(record, "window", to.window);
    read_field(record, "chunked", to.chunked);
    read_field(record, "causal", to.causal);
    read_optional(record, "softcap", to.softcap);
    read_field(record, "sinks", to.sinks);
    read_field(record, "slopes", to.slopes);
    read_field(record, "bf16_bias", to.bf16_bias);
    read_field(record, "biases", to.biases);
    if (to.biases) to.bias_radius = record.attr("biases").attr("shape").cast<std::pair<int64_t, int64_t>>().second / 2;
}

inline void read(py::handle record, Spans& to) {
    read_field(record, "query_start", to.query_start);
    read_field(record, "kv_len", to.kv_len);
    read_field(record, "block_table", to.block_table);
    read_field(record, "newest", to.newest);
    read_field(record, "oldest", to.oldest);
    std::tie(to.count, to.table_stride) = record.attr("block_table").attr("shape").cast<std::pair<int64_t, int64_t>>();
}

// The function of a gate: its name, or None.
struct NamedGate {
    Gate kind;
};

inline void read(py::handle name, NamedGate& to) {
    static const char* const kNames[] = {"None", "sigmoid", "silu", "softplus"};  // in the order of Gate
    const std::string wanted = py::str(name);
    for (int i = 0; i < int(std::size(kNames)); ++i) {
        if (wanted == kNames[i]) return void(to.kind = Gate(i));
    }
    throw std::invalid_argument("a gate is sigmoid, silu, softplus or None; got " + std::string(py::repr(name)));
}

// One of POOLINGS of pace/ops/pooling.py.
struct NamedPooling {
    Pooling kind;
};

inline void read(py::handle name, NamedPooling& to) {
    static const char* const kNames[] = {"cls",          "max",      "mean", "mean_sqrt_len_tokens",
                                         "weightedmean", "lasttoken"};  // in the order of Pooling
    const std::string wanted = py::str(name);
    for (int i = 0; i < int(std::size(kNames)); ++i) {
        if (wanted == kNames[i]) return void(to.kind = Pooling(i));
    }
    throw std::invalid_argument("unknown pooling " + std::string(py::repr(name)));
}

// GatedNormParameters of pace/ops/kernels/norm.py.
inline void read(py::handle record, GatedNorm& to) {
    NamedGate gate;
    read_field(record, "activation", gate);
    to.kind = gate.kind;
    read_field(record, "norm_first", to.norm_first);
    read_field(record, "groups", to.groups);
    read_field(record, "weight", to.weight);
    read_field(record, "weight_stride", to.weight_stride);
    read_field(record, "eps", to.eps);
}

// StateSlots of pace/states.py.
inline void read(py::handle record, StateSlots& to) {
    to = {};
    const py::object state = record.attr("state");
    read_field(state, "channels", to.channels);
    read_field(state, "kernel", to.kernel);
    read_field(state, "heads", to.heads);
    read_field(state, "key_dim", to.key_dim);
    read_field(state, "value_dim", to.value_dim);
    read_field(state, "decay_dim", to.decay_dim);
    read_field(record, "inputs", to.inputs);
    read_field(record, "matrix", to.matrix);
    read_field(record, "journal_inputs", to.journal_inputs);
    read_field(record, "journal", to.journal);
    for (const char* const name : {"inputs", "matrix", "journal_inputs", "journal"}) {
        const py::object part = record.attr(name);
        if (part.is_none()) continue;
        const py::tuple shape = part.attr("shape");
        to.slots = shape[0].cast<int64_t>();
        to.stride = part.attr("stride")(0).cast<int64_t>();
        if (name[0] == 'j') to.journal_rows = shape[1].cast<int64_t>();
    }
}

inline void read(py::handle record, StateSpans& to) {
    read_field(record, "query_start", to.query_start);
    read_field(record, "read", to.read);
    read_field(record, "replay", to.replay);
    read_field(record, "write", to.write);
    read_field(record, "certain", to.certain);
    read_field(record, "mark_start", to.mark_start);
    read_field(record, "mark_rows", to.mark_rows);
    read_field(record, "mark_slots", to.mark_slots);
    to.count = int64_t(py::len(record.attr("read")));
    to.marks = int64_t(py::len(record.attr("mark_slots")));
}

// RecurrenceOptions of pace/ops/protocol.py.
inline void read(py::handle record, Recurrence& to) {
    to = {};
    read_field(record, "rates", to.rates);
    read_field(record, "step_bias", to.step_bias);
    read_field(record, "delta", to.delta);
    read_field(record, "tiled", to.tiled);
    read_field(record, "lower_bound", to.lower_bound);
    read_field(record, "beta_scale", to.beta_scale);
    read_field(record, "skip", to.skip);
    std::tie(to.min_step, to.max_step) = record.attr("step_limits").cast<std::pair<float, float>>();
}

template <class T>
concept Record = std::is_class_v<T> && requires(py::handle from, T& to) { read(from, to); };

}  // namespace pace

template <pace::Record T>
struct pybind11::detail::type_caster<T> {
    PYBIND11_TYPE_CASTER(T, const_name("object"));
    bool load(handle from, bool) {
        read(from, value);
        return true;
    }
};
