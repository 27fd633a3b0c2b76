// The instructions of recorded programs: each method points an op at the memory of a step. csrc/program_run.cpp runs
// them, and csrc/ops computes them.
#include "pace/program.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace pace {

namespace {

bool is_result(Value value) { return value.buffer == Value::kLogits; }
bool is_result(Columns columns) { return is_result(columns.value); }

template <class... Operands>
bool any_result(Operands... operands) {
    return (is_result(operands) || ...);
}

const StateSpans& states_of(const Step& step) {
    if (!step.states) throw std::invalid_argument("the model has layers with a state; the batch has no `states`");
    return *step.states;
}

const int64_t* ids_of(const Step& step, Program::Ids ids) {
    if (ids == Program::Ids::Types && !step.types) {
        throw std::invalid_argument("the model has token types; the batch has no `types`");
    }
    return ids == Program::Ids::Tokens ? step.ids : ids == Program::Ids::Positions ? step.positions : step.types;
}

// The columns that an op reads of the step's given rows.
PlaceRowsOp of_given(const GivenRows& given, int64_t first, int64_t columns) {
    if (given.count > 0 && first + columns > given.columns) {
        throw std::invalid_argument("the given rows have " + std::to_string(given.columns) + " columns; columns " +
                                    std::to_string(first) + " to " + std::to_string(first + columns) +
                                    " of them are needed");
    }
    PlaceRowsOp op = {};
    op.rows = given.data + first;
    op.rows_stride = given.stride;
    op.count = given.count;
    op.k = columns;
    return op;
}

// The adapters of the rows of y.
void route_adapters(AdapterProducts& products, const AdapterTable& adapters, Value y, const Step& step) {
    const AdapterRouting& routing = step.routing;
    if (routing.data && routing.rows != step.tokens) {
        throw std::invalid_argument("adapters are routed for " + std::to_string(routing.rows) + " rows; the step has " +
                                    std::to_string(step.tokens) + " tokens");
    }
    products.adapters = adapters;
    products.routing = routing.data;
    products.per_row = routing.per_row;
    products.indices = y.per_token ? nullptr : step.rows;
}

}  // namespace

void Program::embedding(Value out, const void* weight, const int32_t* order, Ids ids, int64_t offset) {
    record<GatherOp>("embedding", true, [=](GatherOp& op, const Frame& frame) {
        op.weight = weight;
        op.ids = ids_of(frame.step, ids);
        op.offset = offset;
        op.order = order;
        op.count = frame.rows_of(out);
        op.out = frame.at(out);
        op.widen = true;
    });
}

void Program::input_rows(Value out, int number) {
    record<PlaceRowsOp>("input rows", true, [=](PlaceRowsOp& op, const Frame& frame) {
        op = {};
        op.rows = frame.step.inputs[number];
        op.rows_stride = out.columns;
        op.count = op.x_rows = frame.step.tokens;
        op.x = frame.at(out);
        op.x_stride = op.k = out.columns;
    });
}

void Program::given_rows(Value out, int64_t first) {
    record<PlaceRowsOp>("given rows", true, [=](PlaceRowsOp& op, const Frame& frame) {
        const GivenRows& given = frame.step.given;
        if (given.count != frame.step.tokens) {
            throw std::invalid_argument(std::to_string(given.count) + " rows are given for " +
                                        std::to_string(frame.step.tokens) + " tokens; this program needs one for each");
        }
        op = of_given(given, first, out.columns);
        op.x = frame.at(out);
        op.x_stride = out.columns;
        op.x_rows = frame.step.tokens;
    });
}

void Program::place_rows(Columns x, int64_t first, bool add) {
    record<PlaceRowsOp>(add ? "add given rows" : "place given rows", true, [=](PlaceRowsOp& op, const Frame& frame) {
        op = of_given(frame.step.given, first, x.count);
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.x_rows = frame.rows_of(x.value);
        op.indices = frame.step.given.at;
        op.add = add;
    });
}

void Program::gather_rows(Value out, Columns x) {
    record<GatherRowsOp>("gather rows", true, [=](GatherRowsOp& op, const Frame& frame) {
        op.x = frame.at(x);
        op.indices = frame.step.rows;
        op.x_stride = x.value.columns;
        op.x_rows = frame.rows_of(x.value);
        op.count = frame.rows_of(out);
        op.k = x.count;
        op.y = frame.at(out);
    });
}

void Program::keep_rows(Columns x, int64_t first) {
    record<PlaceRowsOp>("keep rows", true, [=](PlaceRowsOp& op, const Frame& frame) {
        const KeptRows& kept = frame.step.kept;
        if (kept.rows != frame.step.tokens || kept.columns < first + x.count) {
            throw std::invalid_argument("the step keeps rows [" + std::to_string(frame.step.tokens) + ", " +
                                        std::to_string(first + x.count) + "] or wider; there is room for [" +
                                        std::to_string(kept.rows) + ", " + std::to_string(kept.columns) + "]");
        }
        op.x = kept.data + first;
        op.x_stride = kept.stride;
        op.x_rows = op.count = kept.rows;
        op.k = x.count;
        op.rows = frame.at(x);
        op.rows_stride = x.value.columns;
    });
}

void Program::pool(Value out, Columns x, Pooling pooling) {
    record<PoolOp>("pool", true, [=](PoolOp& op, const Frame& frame) {
        const Spans& spans = frame.step.tables[0].spans;
        if (spans.count != frame.rows_of(out)) {
            throw std::invalid_argument("a program that pools needs a logit row for each span; got " +
                                        std::to_string(frame.rows_of(out)) + " for " + std::to_string(spans.count));
        }
        op.pooling = pooling;
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(x.value);
        op.k = x.count;
        op.starts = spans.query_start;
        op.count = spans.count;
        op.y = frame.at(out);
    });
}

void Program::concatenate(Value out, Columns a, Columns b) {
    int64_t first = 0;
    for (const Columns x : {a, b}) {
        record<PlaceRowsOp>("concatenate", any_result(out, x), [=](PlaceRowsOp& op, const Frame& frame) {
            op.x = frame.at(out) + first;
            op.x_stride = out.columns;
            op.x_rows = op.count = frame.rows_of(out);
            op.k = x.count;
            op.rows = frame.at(x);
            op.rows_stride = x.value.columns;
        });
        first += x.count;
    }
}

void Program::add(Value out, Columns a, Columns b) {
    record<AddOp>("add", any_result(out, a, b), [=](AddOp& op, const Frame& frame) {
        op.a = frame.at(a);
        op.b = frame.at(b);
        op.a_stride = a.value.columns;
        op.b_stride = b.value.columns;
        op.rows = frame.rows_of(out);
        op.k = out.columns;
        op.y = frame.at(out);
    });
}

void Program::activation(Value out, Columns x, const ActivationFunction& activation) {
    record<ActivationOp>("activation", any_result(out, x), [=](ActivationOp& op, const Frame& frame) {
        op.activation = activation;
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(out);
        op.k = x.count;
        op.y = frame.at(out);
    });
}

void Program::glu(Value out, Columns x, const ActivationFunction& activation) {
    record<GluOp>("glu", any_result(out, x), [=](GluOp& op, const Frame& frame) {
        op.activation = activation;
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(out);
        op.k = out.columns;
        op.y = frame.at(out);
    });
}

void Program::add_adapters(Columns y, Columns x, const Norm& norm, const AdapterTable& adapters) {
    const std::string name = "adapters " + std::to_string(y.count) + " x " + std::to_string(x.count);
    record<AddAdaptersOp>(name, true, [=](AddAdaptersOp& op, const Frame& frame) {
        route_adapters(op, adapters, y.value, frame.step);
        op.norm = norm;
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(y.value);
        op.y = frame.at(y);
        op.y_stride = y.value.columns;
    });
}

void Program::scale(Columns x, float factor, const float* factors) {
    record<ScaleOp>("scale", any_result(x), [=](ScaleOp& op, const Frame& frame) {
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(x.value);
        op.k = x.count;
        op.factor = factor;
        op.factors = factors;
    });
}

void Program::softcap(Columns x, float cap) {
    record<SoftcapOp>("softcap", any_result(x), [=](SoftcapOp& op, const Frame& frame) {
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(x.value);
        op.k = x.count;
        op.cap = cap;
    });
}

void Program::norm(Value out, Columns x, const Norm& norm, std::optional<Columns> residual, float factor) {
    const bool varies = any_result(out, x) || (residual && is_result(*residual));
    record<NormOp>("norm", varies, [=](NormOp& op, const Frame& frame) {
        op.norm = norm;
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(out);
        op.k = x.count;
        op.residual = residual ? frame.at(*residual) : nullptr;
        op.residual_stride = residual ? residual->value.columns : 0;
        op.factor = factor;
        op.y = frame.at(out);
    });
}

void Program::linear(Value out, Columns x, const LinearOptions& options, std::optional<Value> residual,
                     const std::optional<AdapterTable>& adapters) {
    const std::string name = "linear " + std::to_string(out.columns) + " x " + std::to_string(x.count);
    const auto bind = [=](LinearOp& op, const Frame& frame) {
        static_cast<LinearOptions&>(op) = options;
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(out);
        op.residual = residual ? frame.at(*residual) : nullptr;
        op.out = frame.at(out);
    };
    if (!adapters) {
        return record<LinearOp>(name, any_result(out, x, residual.value_or(out)),
                                [=](LinearOp& op, const Frame& frame) {
                                    bind(op, frame);
                                    op.largest = is_result(out) ? frame.step.largest : nullptr;
                                });
    }
    record<AdaptedLinearOp>("adapted " + name, true, [=](AdaptedLinearOp& op, const Frame& frame) {
        bind(op.linear, frame);
        route_adapters(op.adapters, *adapters, out, frame.step);
    });
}

void Program::gate(Columns x, Columns gate, Gate kind) {
    record<GateOp>("gate", any_result(x), [=](GateOp& op, const Frame& frame) {
        op.kind = kind;
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(x.value);
        op.k = x.count;
        op.gate = frame.at(gate);
        op.gate_stride = gate.value.columns;
        op.groups = gate.count;
    });
}

void Program::gated_norm(Value out, Columns x, Columns gate, const GatedNorm& norm) {
    record<GatedNormOp>("gated norm", any_result(out, x, gate), [=](GatedNormOp& op, const Frame& frame) {
        op.norm = norm;
        op.x = frame.at(x);
        op.gate = frame.at(gate);
        op.x_stride = x.value.columns;
        op.gate_stride = gate.value.columns;
        op.rows = frame.rows_of(out);
        op.k = x.count;
        op.y = frame.at(out);
    });
}

void Program::route(Value out, Columns logits, const Router& router) {
    record<RouteOp>("route", any_result(out), [=](RouteOp& op, const Frame& frame) {
        op.logits = frame.at(logits);
        op.logits_stride = logits.value.columns;
        op.rows = frame.rows_of(out);
        op.router = router;
        op.routing = frame.at(out);
    });
}

void Program::experts(Value out, Columns x, Value choices, bool chooses, const Mixture& mixture,
                      std::optional<Value> residual) {
    const std::string name = "experts " + std::to_string(mixture.router.top_k) + " of " +
                             std::to_string(mixture.router.experts) + ", " + std::to_string(out.columns) + " x " +
                             std::to_string(x.count);
    record<ExpertsOp>(name, any_result(out, residual.value_or(out)), [=](ExpertsOp& op, const Frame& frame) {
        static_cast<Mixture&>(op) = mixture;
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.rows = frame.rows_of(out);
        op.routing = chooses ? nullptr : frame.at(choices);
        op.logits = chooses ? frame.at(choices) : nullptr;
        op.residual = residual ? frame.at(*residual) : nullptr;
        op.out = frame.at(out);
    });
}

void Program::norm_heads(HeadsOf heads, const Norm& norm) {
    record<HeadNormOp>("head norm", false, [=](HeadNormOp& op, const Frame& frame) {
        op.x = frame.at(heads);
        op.tokens = frame.rows_of(heads.value);
        op.heads = heads.count;
        op.head_dim = heads.head_dim;
        op.norm = norm;
    });
}

void Program::rotate_heads(HeadsOf heads, const Rotation& rotation) {
    record<RotaryOp>("rotary", true, [=](RotaryOp& op, const Frame& frame) {
        op.x = frame.at(heads);
        op.tokens = frame.step.tokens;
        op.heads = heads.count;
        const Angles& angles = frame.step.angles[rotation.table];
        op.cos = angles.cos;
        op.sin = angles.sin;
        op.half = rotation.half;
        op.interleaved = rotation.interleaved;
    });
}

void Program::store_kv(HeadsOf k, HeadsOf v, int layer) {
    record<StoreKvOp>("store", true, [=](StoreKvOp& op, const Frame& frame) {
        const LayerCache& cache = frame.step.cache[layer];
        op.kv = cache.kv;
        op.k = frame.at(k);
        op.v = frame.at(v);
        op.slots = frame.step.tables[cache.group].slots;
        op.tokens = frame.step.tokens;
    });
}

void Program::heads_linear(Value out, HeadsOf x, const ExpertStack& weights) {
    const std::string name = "heads " + std::to_string(x.count) + " x " + std::to_string(out.columns / x.count) +
                             " x " + std::to_string(x.head_dim);
    record<HeadsLinearOp>(name, false, [=](HeadsLinearOp& op, const Frame& frame) {
        op.x = frame.at(x);
        op.rows = frame.rows_of(x.value);
        op.heads = x.count;
        op.weights = weights;
        op.out = frame.at(out);
    });
}

void Program::attention(Value out, HeadsOf q, std::optional<HeadsOf> latent_q, std::optional<Preparation> preparation,
                        int layer, const AttentionOptions& options) {
    record<AttentionOp>("attention", true, [=](AttentionOp& op, const Frame& frame) {
        const KvView& kv = frame.step.cache[layer].kv;
        const Table& table = frame.step.tables[frame.step.cache[layer].group];
        const HeadsView queries = frame.at(q), latents = latent_q ? frame.at(*latent_q) : HeadsView{};
        op.q = queries.data;
        op.args = {options,      queries.token_stride, queries.head_stride, kv, q.count, frame.at(out),
                   latents.data, latents.token_stride, latents.head_stride};
        if (preparation) {
            const Rotation& rotation = preparation->rotation;
            const Angles angles = rotation.half > 0 ? frame.step.angles[rotation.table] : Angles{};
            op.heads = {queries,
                        preparation->k ? frame.at(*preparation->k) : HeadsView{},
                        preparation->v ? frame.at(*preparation->v) : HeadsView{},
                        q.count,
                        preparation->query_norm,
                        preparation->key_norm,
                        preparation->value_norm,
                        preparation->norm_last,
                        angles.cos,
                        angles.sin,
                        rotation.half,
                        rotation.interleaved,
                        kv,
                        table.slots};
        }
        op.tokens = frame.step.tokens;
        op.spans = table.spans;
    });
}

void Program::causal_conv(Value out, Columns x, int layer, const Convolution& convolution) {
    record<CausalConvOp>("convolution", true, [=](CausalConvOp& op, const Frame& frame) {
        op.convolution = convolution;
        op.x = frame.at(x);
        op.x_stride = x.value.columns;
        op.tokens = frame.step.tokens;
        op.slots = frame.step.cache[layer].states;
        op.spans = states_of(frame.step);
        op.out = frame.at(out);
    });
}

void Program::recurrence(Value out, HeadsOf q, HeadsOf k, HeadsOf v, Columns steps, std::optional<Columns> beta,
                         int layer, const Recurrence& recurrence) {
    record<RecurrenceOp>("recurrence", true, [=](RecurrenceOp& op, const Frame& frame) {
        op.recurrence = recurrence;
        op.q = frame.at(q);
        op.k = frame.at(k);
        op.v = frame.at(v);
        op.key_heads = q.count;
        op.tokens = frame.step.tokens;
        op.steps = frame.at(steps);
        op.steps_stride = steps.value.columns;
        op.beta = beta ? frame.at(*beta) : nullptr;
        op.beta_stride = beta ? beta->value.columns : 0;
        op.slots = frame.step.cache[layer].states;
        op.spans = states_of(frame.step);
        op.out = frame.at(out);
    });
}

}  // namespace pace
