// Cuts recurrences into spans and heads, and the heads of long spans into columns.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "pace/state_ops.h"
#include "pace/threading.h"

namespace pace {

namespace {

constexpr int64_t kChunksPerThread = 4;
constexpr int64_t kLongSpan = 32;    // tokens; each piece of a head's columns prepares them again
constexpr int64_t kStreamRows = 16;  // a few pages of rows, which are read and written as one stream

// An odd number of cache lines: rows at a power of two would compete for a few sets of the cache.
int64_t row_stride(int64_t columns) { return (divide_up(columns, 16) | 1) * 16; }

void copy_rows(Strided<float> to, Strided<const float> from, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; ++i)
        std::memcpy(to.data + i * to.stride, from.data + i * from.stride, size_t(columns) * sizeof(float));
}

}  // namespace

// Some columns of one head of a span, and the scratch of their chunk.
struct RecurrenceOp::Columns {
    int64_t span, head, first, count;
    PreparedTokens prepared;
    Strided<float> copy;   // of the matrix
    float *deltas, *sums;  // deltas [kStateTokens][deltas_stride]
    int64_t deltas_stride;
    Strided<float> from, to;  // the matrix before and after the next tokens: the copy, or parts of slots

    static size_t scratch_floats(const StateSlots& slots, int64_t columns) {
        const int64_t stride = round_up(slots.key_dim, 16), wide = round_up(columns, 16);
        return size_t(kStateTokens * ((slots.decay_dim > 1 ? 4 : 3) * stride + 16 + wide) + 2 * wide +
                      slots.key_dim * row_stride(columns));
    }
    void use(float* scratch, const StateSlots& slots) {
        const auto take = [&](int64_t floats) { return std::exchange(scratch, scratch + floats); };
        const int64_t stride = round_up(slots.key_dim, 16), wide = round_up(count, 16);
        prepared.stride = stride;
        for (float** rows : {&prepared.key, &prepared.read_key, &prepared.read_query})
            *rows = take(kStateTokens * stride);
        prepared.decay_stride = slots.decay_dim > 1 ? stride : 1;
        prepared.decay = take(kStateTokens * (slots.decay_dim > 1 ? stride : 1));
        prepared.gain = take(kStateTokens);
        prepared.dot = take(kStateTokens);
        sums = take(2 * wide);
        deltas_stride = wide;
        deltas = take(kStateTokens * wide);
        copy = {take(slots.key_dim * row_stride(count)), row_stride(count)};
    }
};

void RecurrenceOp::prepare(int threads) {
    check_spans(spans, tokens, slots.slots, slots.journal_rows);
    panel = 4 * kernels().lanes;
    order.resize(size_t(spans.count));
    std::iota(order.begin(), order.end(), 0);
    const auto length = [&](int32_t span) { return spans.query_start[span + 1] - spans.query_start[span]; };
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return length(a) > length(b); });
    first_chunk.assign(1, 0);
    for (const int32_t span : order) {
        // Drafts write the keys of the journal, which other pieces of the head might still replay.
        const bool cuts = length(span) >= kLongSpan && spans.certain[span] == length(span);
        const int64_t wanted = divide_up(kChunksPerThread * threads, slots.heads);
        const int64_t pieces = cuts ? std::min(divide_up(slots.value_dim, panel), wanted) : 1;
        first_chunk.push_back(first_chunk.back() + slots.heads * pieces);
    }
}

void RecurrenceOp::run(int, int64_t chunk, int) const {
    const int64_t place = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk) - first_chunk.begin() - 1;
    const int64_t pieces = (first_chunk[size_t(place + 1)] - first_chunk[size_t(place)]) / slots.heads;
    const int64_t index = chunk - first_chunk[size_t(place)], piece = index % pieces;
    const int64_t panels = divide_up(slots.value_dim, panel);
    Columns columns = {};
    columns.span = order[size_t(place)];
    columns.head = index / pieces;
    columns.first = panels * piece / pieces * panel;
    columns.count = std::min(slots.value_dim, panels * (piece + 1) / pieces * panel) - columns.first;
    columns.use(static_cast<float*>(thread_scratch(Columns::scratch_floats(slots, columns.count) * sizeof(float))),
                slots);

    const int64_t span = columns.span, begin = spans.query_start[span], count = spans.query_start[span + 1] - begin;
    const int64_t certain = spans.certain[span], read = spans.read[span], replayed = spans.replay[span];
    const auto in_slot = [&](int64_t slot) {
        return Strided<float>{slots.matrix_of(slot, columns.head) + columns.first, slots.value_dim};
    };
    const auto copy_to = [&](Strided<float> to, Strided<float> from) {
        copy_rows(to, {from.data, from.stride}, slots.key_dim, columns.count);
    };
    const int64_t write = spans.write[span];
    columns.from = columns.to = columns.copy;
    if (read >= 0 && count == 1 && replayed == 0) {
        columns.from = in_slot(read);
        columns.to = in_slot(write);
    } else if (read >= 0) {
        copy_to(columns.copy, in_slot(read));
    } else {
        std::memset(columns.copy.data, 0, size_t(slots.key_dim * columns.copy.stride) * sizeof(float));
    }
    replay(columns, read, replayed);
    int64_t mark = spans.mark_start[span];
    const int64_t end_mark = spans.mark_start[span + 1];
    for (int64_t t = 0; t < count;) {
        int64_t end = std::min(count, t + kStateTokens);
        if (t < certain) end = std::min(end, certain);
        if (mark < end_mark) end = std::min<int64_t>(end, spans.mark_rows[mark]);
        const bool drafts = t >= certain;
        sweep(columns, begin + t, end - t,
              drafts ? Strided<float>{slots.journal_of(write, t - certain, columns.head) + slots.decay_dim +
                                          slots.key_dim + columns.first,
                                      slots.heads * slots.journal_dim()}
                     : Strided<float>{columns.deltas, columns.deltas_stride});
        for (int64_t row = t; drafts && row < end; ++row) {
            float* const journal = slots.journal_of(write, row - certain, columns.head);
            const PreparedTokens& from = columns.prepared;
            std::memcpy(journal, from.decay + (row - t) * from.decay_stride, size_t(slots.decay_dim) * sizeof(float));
            std::memcpy(journal + slots.decay_dim, from.key + (row - t) * from.stride,
                        size_t(slots.key_dim) * sizeof(float));
        }
        if (end == certain && !drafts && columns.to.data != in_slot(write).data) copy_to(in_slot(write), columns.to);
        for (; mark < end_mark && spans.mark_rows[mark] == end; ++mark) {
            copy_to(in_slot(spans.mark_slots[mark]), columns.to);
        }
        columns.from = columns.to;
        t = end;
    }
}

// Applies the first rows of the journal of a slot to the copy.
void RecurrenceOp::replay(const Columns& columns, int64_t slot, int64_t rows) const {
    const auto& [data, stride] = columns.copy;
    for (int64_t c = 0; rows > 0 && c < columns.count; c += panel) {
        for (int64_t row = 0; row < rows; ++row) {
            const float* const decay = slots.journal_of(slot, row, columns.head);
            const float *const key = decay + slots.decay_dim, *const delta = key + slots.key_dim + columns.first;
            kernels().update_matrix({slots.key_dim,
                                     slots.decay_dim,
                                     std::min(panel, columns.count - c),
                                     {data + c, stride},
                                     {data + c, stride},
                                     decay,
                                     key,
                                     delta + c});
        }
    }
}

// Computes `count` tokens from first_token on.
void RecurrenceOp::sweep(const Columns& columns, int64_t first_token, int64_t count, Strided<float> deltas) const {
    kernels().prepare_tokens(inputs_of(first_token, count, columns.head), columns.prepared);
    // In a slot, rows are read in order. A copy is swept panel by panel, each in the first-level cache.
    const bool streams = columns.to.data != columns.copy.data;
    const int64_t step = streams ? columns.count : panel;
    const int64_t block_rows = streams ? kStreamRows : slots.key_dim;
    for (int64_t c = 0; c < columns.count; c += step) {
        const int64_t column = columns.head * slots.value_dim + columns.first + c;
        kernels().sweep_tokens({
            .tokens = columns.prepared,
            .count = count,
            .key_dim = slots.key_dim,
            .decay_dim = slots.decay_dim,
            .columns = std::min(step, columns.count - c),
            .delta = recurrence.delta,
            .block_rows = block_rows,
            .from = {columns.from.data + c, columns.from.stride},
            .to = {columns.to.data + c, columns.to.stride},
            .v = {v.at(first_token, columns.head) + columns.first + c, v.token_stride},
            .out = {out + first_token * slots.heads * slots.value_dim + column, slots.heads * slots.value_dim},
            .deltas = {deltas.data + c, deltas.stride},
            .skip = recurrence.skip ? recurrence.skip + columns.head : nullptr,
            .sums = columns.sums,
        });
    }
}

TokenInputs RecurrenceOp::inputs_of(int64_t first_token, int64_t count, int64_t head) const {
    const int64_t key_head = recurrence.tiled ? head % key_heads : head / (slots.heads / key_heads);
    return {
        .count = count,
        .key_dim = slots.key_dim,
        .decay_dim = slots.decay_dim,
        .delta = recurrence.delta,
        .q = q.at(first_token, key_head),
        .k = k.at(first_token, key_head),
        .steps = steps + first_token * steps_stride + head * slots.decay_dim,
        .beta = beta ? beta + first_token * beta_stride + head : nullptr,
        .q_stride = q.token_stride,
        .k_stride = k.token_stride,
        .steps_stride = steps_stride,
        .beta_stride = beta_stride,
        .rate = recurrence.rates[head],
        .lower_bound = recurrence.lower_bound,
        .beta_scale = recurrence.beta_scale,
        .min_step = recurrence.min_step,
        .max_step = recurrence.max_step,
        .step_bias = recurrence.step_bias + head * slots.decay_dim,
    };
}

}  // namespace pace
