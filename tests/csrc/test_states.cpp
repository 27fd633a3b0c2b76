// Recurrences and convolutions of every table against float64, at vector edges, within their memory; and the ops on
// threads, with drafts, replays and marks.
#include <algorithm>
#include <cstring>

#include "check.h"
#include "pace/ops.h"
#include "pace/state_ops.h"

using namespace pace;

namespace {

constexpr double kEps = 0x1p-24;
constexpr int64_t kSlots = 6, kRows = 3, kTokens = 21;

using Floats = std::vector<float>;

// Forms of a recurrence: the delta rule with a decay of each head or each row, the same with bounded decays, Mamba-2.
enum Form { kByHead, kByRow, kBounded, kMamba };
constexpr Form kForms[] = {kByHead, kByRow, kBounded, kMamba};

// A layer of two key heads and four value heads, and 70 channels, with the arguments of kTokens tokens.
struct Layer {
    int64_t key_dim, value_dim, decay_dim, channels = 70, kernel = 4, heads = 4;
    bool delta;
    float lower_bound;
    Floats q, k, v, steps, beta, rates, bias, x, weight;

    Layer(int64_t key_dim, int64_t value_dim, Form form)
        : key_dim(key_dim),
          value_dim(value_dim),
          decay_dim(form == kByRow || form == kBounded ? key_dim : 1),
          delta(form != kMamba),
          lower_bound(form == kBounded ? -5.0f : 0.0f),
          q(check::heavy_tailed(size_t(kTokens * 2 * key_dim), 1)),
          k(check::heavy_tailed(size_t(kTokens * 2 * key_dim), 2)),
          v(check::heavy_tailed(size_t(kTokens * heads * value_dim), 3)),
          steps(check::heavy_tailed(size_t(kTokens * heads * decay_dim), 4)),
          beta(check::heavy_tailed(size_t(kTokens * heads), 5)),
          rates{-0.5f, -0.01f, -2.0f, 0.0f},
          bias(size_t(heads * decay_dim), 0.25f),
          x(check::heavy_tailed(size_t(kTokens * channels), 6)),
          weight(check::heavy_tailed(size_t(kernel * channels), 7)) {}

    int64_t journal_dim() const { return decay_dim + key_dim + value_dim; }
};

// The slots of a layer's recurrence, and of its convolution: a slot is a state and its journal.
struct Memory {
    Floats of_matrices, of_inputs;
    StateSlots matrices = {}, inputs = {};

    explicit Memory(const Layer& layer) {
        const int64_t state = layer.heads * layer.key_dim * layer.value_dim;
        matrices.slots = inputs.slots = kSlots;
        matrices.journal_rows = inputs.journal_rows = kRows;
        matrices.heads = layer.heads;
        matrices.key_dim = layer.key_dim;
        matrices.value_dim = layer.value_dim;
        matrices.decay_dim = layer.decay_dim;
        matrices.stride = state + kRows * layer.heads * layer.journal_dim();
        of_matrices.assign(size_t(kSlots * matrices.stride), check::kPoison);
        matrices.matrix = of_matrices.data();
        matrices.journal = of_matrices.data() + state;
        inputs.channels = layer.channels;
        inputs.kernel = layer.kernel;
        inputs.stride = (layer.kernel - 1 + kRows) * layer.channels;
        of_inputs.assign(size_t(kSlots * inputs.stride), check::kPoison);
        inputs.inputs = of_inputs.data();
        inputs.journal_inputs = of_inputs.data() + (layer.kernel - 1) * layer.channels;
    }
};

struct Span {
    int64_t first, end;
    int32_t read, write, certain, replay;
    std::vector<std::pair<int32_t, int32_t>> marks = {};
};

// Runs one span of a layer; returns rows of both ops.
std::pair<Floats, Floats> run(const Layer& layer, const Memory& memory, const Span& span) {
    const int64_t count = span.end - span.first;
    const int32_t query_start[] = {0, int32_t(count)}, mark_start[] = {0, int32_t(span.marks.size())};
    std::vector<int32_t> rows, slots;
    for (const auto& [row, slot] : span.marks) rows.push_back(row), slots.push_back(slot);
    const StateSpans spans = {query_start, &span.read,  &span.replay, &span.write, &span.certain,
                              mark_start,  rows.data(), slots.data(), 1,           int64_t(rows.size())};
    Floats states(size_t(count * layer.heads * layer.value_dim)), sums(size_t(count * layer.channels));
    const auto heads = [&](const Floats& values, int64_t number, int64_t dim) {
        return HeadsView{const_cast<float*>(values.data()) + span.first * number * dim, number * dim, dim};
    };
    RecurrenceOp recurrence = {};
    recurrence.recurrence = {
        layer.rates.data(), layer.bias.data(), layer.delta, false, layer.lower_bound, 1, nullptr, 0, 1e30f};
    recurrence.q = heads(layer.q, 2, layer.key_dim);
    recurrence.k = heads(layer.k, 2, layer.key_dim);
    recurrence.v = heads(layer.v, layer.heads, layer.value_dim);
    recurrence.key_heads = 2;
    recurrence.tokens = count;
    recurrence.steps_stride = layer.heads * layer.decay_dim;
    recurrence.steps = layer.steps.data() + span.first * recurrence.steps_stride;
    recurrence.beta = layer.delta ? layer.beta.data() + span.first * layer.heads : nullptr;
    recurrence.beta_stride = layer.heads;
    recurrence.slots = memory.matrices;
    recurrence.spans = spans;
    recurrence.out = states.data();
    execute(recurrence);
    CausalConvOp convolution = {};
    convolution.convolution = {layer.weight.data(), nullptr, true};
    convolution.x = layer.x.data() + span.first * layer.channels;
    convolution.x_stride = layer.channels;
    convolution.tokens = count;
    convolution.slots = memory.inputs;
    convolution.spans = spans;
    convolution.out = sums.data();
    execute(convolution);
    return {states, sums};
}

double softplus(double x) { return std::log1p(std::exp(-std::fabs(x))) + std::max(x, 0.0); }

// The rows of head `h` over all tokens, in float64.
std::vector<double> expected_head(const Layer& layer, int64_t h) {
    const int64_t dk = layer.key_dim, dv = layer.value_dim;
    std::vector<double> s(size_t(dk * dv)), q(static_cast<size_t>(dk)), k(q), decay(q), delta(static_cast<size_t>(dv)),
        out;
    for (int64_t t = 0; t < kTokens; ++t) {
        double queries = 1e-6, keys = 1e-6, step = 0;
        for (int64_t i = 0; i < dk; ++i) {
            q[i] = layer.q[(t * 2 + h / 2) * dk + i];
            k[i] = layer.k[(t * 2 + h / 2) * dk + i];
            queries += q[i] * q[i];
            keys += k[i] * k[i];
            const int64_t d = layer.decay_dim > 1 ? i : 0;
            const double x = double(layer.steps[(t * layer.heads + h) * layer.decay_dim + d]) + 0.25;
            step = softplus(x);
            const double bounded = layer.lower_bound / (1 + std::exp(layer.rates[h] * x));
            decay[i] = std::exp(layer.lower_bound < 0 ? bounded : layer.rates[h] * step);
        }
        if (layer.delta)
            for (int64_t i = 0; i < dk; ++i) q[i] /= std::sqrt(queries * double(dk)), k[i] /= std::sqrt(keys);
        for (int64_t c = 0; c < dv; ++c) {
            const double v = layer.v[(t * layer.heads + h) * dv + c];
            double known = 0, y = 0;
            for (int64_t i = 0; i < dk; ++i) known += decay[i] * s[i * dv + c] * k[i];
            delta[c] = layer.delta ? (v - known) / (1 + std::exp(-layer.beta[t * layer.heads + h])) : step * v;
            for (int64_t i = 0; i < dk; ++i) {
                s[i * dv + c] = decay[i] * s[i * dv + c] + k[i] * delta[c];
                y += q[i] * s[i * dv + c];
            }
            out.push_back(y);
        }
    }
    return out;
}

}  // namespace

TEST_TABLES(recurrences_of_every_width) {
    for (const auto& [key_dim, value_dim] : {std::pair{1, 1}, {5, 3}, {16, 17}, {33, 64}, {8, 130}}) {
        for (const Form form : kForms) {
            const Layer layer(key_dim, value_dim, form);
            const Memory memory(layer);
            const Floats got = run(layer, memory, {0, kTokens, -1, 0, kTokens, 0}).first;
            for (int64_t h = 0; h < layer.heads; ++h) {
                const std::vector<double> expected = expected_head(layer, h);
                double largest = 0;
                for (const double y : expected) largest = std::max(largest, std::fabs(y));
                // A token adds a rounding for each row, and 16 for decay, units and delta (tests/ops/states).
                const std::vector<double> tolerance(size_t(value_dim), kEps * kTokens * (key_dim + 16) * largest);
                for (int64_t t = 0; t < kTokens; ++t)
                    CHECK_CLOSE(got.data() + (t * layer.heads + h) * value_dim, expected.data() + t * value_dim,
                                tolerance.data(), size_t(value_dim), "recurrence");
            }
        }
    }
}

TEST_TABLES(convolutions_of_every_width) {
    for (const int64_t channels : {1, 3, 8, 17, 70}) {
        for (const int64_t kernel : {1, 2, 4, 7}) {
            const Floats x = check::heavy_tailed(size_t(kernel * channels), 1);
            const Floats weight = check::heavy_tailed(size_t(kernel * channels), 2);
            Floats out(static_cast<size_t>(channels));
            std::vector<const float*> inputs;
            for (int64_t j = 0; j < kernel; ++j) inputs.push_back(x.data() + j * channels);
            table.causal_conv({inputs.data(), weight.data(), channels, nullptr, false, kernel, channels, out.data()});
            std::vector<double> expected(static_cast<size_t>(channels)), tolerance(expected);
            for (int64_t c = 0; c < channels; ++c) {
                for (int64_t j = 0; j < kernel; ++j) {
                    const double term = double(x[j * channels + c]) * weight[j * channels + c];
                    expected[c] += term;
                    tolerance[c] += 2 * kEps * double(kernel) * std::fabs(term);
                }
            }
            CHECK_CLOSE(out.data(), expected.data(), tolerance.data(), size_t(channels), "convolution");
        }
    }
}

// A prefill in one step against steps with marks and drafts, some of them accepted, on several threads.
TEST(states_have_one_form) {
    ThreadPool& pool = ThreadPool::instance();
    const int before = pool.num_threads();
    for (const Form form : kForms) {
        const Layer layer(12, 40, form);
        const Memory whole(layer), parts(layer);
        pool.set_num_threads(1);
        const auto [states, sums] = run(layer, whole, {0, kTokens, -1, 0, kTokens, 0});
        run(layer, whole, {0, 7, -1, 1, 7, 0});
        pool.set_num_threads(4);
        const Span steps[] = {
            {0, 9, -1, 2, 8, 0, {{7, 3}}}, {8, 12, 2, 2, 1, 0}, {11, 14, 2, 4, 3, 2}, {14, kTokens, 4, 4, 7, 0}};
        for (const Span& span : steps) {
            const auto [some_states, some_sums] = run(layer, parts, span);
            CHECK(std::equal(some_states.begin(), some_states.end(),
                             states.begin() + span.first * layer.heads * layer.value_dim));
            CHECK(std::equal(some_sums.begin(), some_sums.end(), sums.begin() + span.first * layer.channels));
        }
        for (const auto& [of_whole, of_parts] :
             {std::pair{whole.matrices, parts.matrices}, {whole.inputs, parts.inputs}}) {
            const int64_t floats = of_whole.matrix ? layer.heads * layer.key_dim * layer.value_dim : 3 * layer.channels;
            const auto state = [&](const StateSlots& slots, int64_t slot) {
                return slots.matrix ? slots.matrix_of(slot, 0) : slots.inputs_of(slot);
            };
            CHECK(std::equal(state(of_whole, 0), state(of_whole, 0) + floats, state(of_parts, 4)));
            CHECK(std::equal(state(of_whole, 1), state(of_whole, 1) + floats, state(of_parts, 3)));
        }
    }
    pool.set_num_threads(before);
}
