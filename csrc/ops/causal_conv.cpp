// Cuts causal convolutions into pieces of spans and blocks of channels.
#include <algorithm>
#include <cstring>
#include <limits>

#include "pace/state_ops.h"
#include "pace/threading.h"

namespace pace {

namespace {
constexpr int64_t kUnlimited = std::numeric_limits<int32_t>::max();
constexpr int64_t kBlockChannels = 512;       // a row of a block is two pages of memory at most
constexpr int64_t kChunkElements = 8 * 1024;  // about 2 us of work

void copy(float* to, const float* from, int64_t count) { std::memcpy(to, from, size_t(count) * sizeof(float)); }
}  // namespace

void CausalConvOp::prepare(int) {
    const bool reads_slots = slots.kernel > 1;
    check_spans(spans, tokens, reads_slots ? slots.slots : kUnlimited, reads_slots ? slots.journal_rows : kUnlimited);
    channels_per_block = std::min(slots.channels, kBlockChannels);
    blocks = divide_up(slots.channels, channels_per_block);
    // Later pieces begin beyond the reach of the slot's inputs.
    const int64_t step = std::max(kChunkElements / channels_per_block, slots.kernel);
    pieces.clear();
    for (int64_t span = 0; span < spans.count; ++span) {
        const int64_t count = spans.query_start[span + 1] - spans.query_start[span];
        for (int64_t first = 0; first < count; first += step) {
            pieces.push_back({int32_t(span), first, std::min(count, first + step)});
        }
    }
}

void CausalConvOp::run(int, int64_t chunk, int) const {
    const Piece& piece = pieces[size_t(chunk / blocks)];
    const int64_t channel = chunk % blocks * channels_per_block;
    const int64_t count = std::min(channels_per_block, slots.channels - channel), kernel = slots.kernel;
    const int64_t begin = spans.query_start[piece.span], read = spans.read[piece.span];
    // `kernel` pointers, then the last inputs before the span, the oldest first.
    const size_t pointer_bytes = size_t(round_up(kernel * int64_t(sizeof(float*)), 64));
    char* const scratch =
        static_cast<char*>(thread_scratch(pointer_bytes + size_t((kernel - 1) * count) * sizeof(float)));
    const float** const inputs = reinterpret_cast<const float**>(scratch);
    float* const past = reinterpret_cast<float*>(scratch + pointer_bytes);
    if (piece.first == 0) {
        const int64_t replay = spans.replay[piece.span];
        for (int64_t i = 0; i < kernel - 1; ++i) {
            // Input i of the inputs of the slot and its first `replay` drafts, without the oldest `replay`.
            const int64_t at = i + replay;
            float* const to = past + i * count;
            if (read < 0) {
                std::memset(to, 0, size_t(count) * sizeof(float));
            } else if (at < kernel - 1) {
                copy(to, slots.inputs_of(read) + at * slots.channels + channel, count);
            } else {
                copy(to, slots.journal_inputs_of(read, at - (kernel - 1)) + channel, count);
            }
        }
        if (kernel > 1) write(piece.span, channel, count, past);
    }
    const float* const bias = convolution.bias ? convolution.bias + channel : nullptr;
    for (int64_t t = piece.first; t < piece.end; ++t) {
        for (int64_t j = 0; j < kernel; ++j) {
            const int64_t at = t - (kernel - 1) + j;
            inputs[j] = at < 0 ? past + (at + kernel - 1) * count : x + (begin + at) * x_stride + channel;
        }
        kernels().causal_conv({inputs, convolution.weight + channel, slots.channels, bias, convolution.silu, kernel,
                               count, out + (begin + t) * slots.channels + channel});
    }
}

// Writes what a span writes of `count` channels: its states and its drafts.
void CausalConvOp::write(int64_t span, int64_t channel, int64_t count, const float* past) const {
    const int64_t begin = spans.query_start[span], end = spans.query_start[span + 1], certain = spans.certain[span];
    const int64_t before = slots.kernel - 1;
    const auto write_state = [&](int64_t row, int64_t slot) {  // the inputs before token `row` of the span
        for (int64_t i = 0; i < before; ++i) {
            const int64_t at = row - before + i;
            copy(slots.inputs_of(slot) + i * slots.channels + channel,
                 at < 0 ? past + (at + before) * count : x + (begin + at) * x_stride + channel, count);
        }
    };
    write_state(certain, spans.write[span]);
    for (int64_t m = spans.mark_start[span]; m < spans.mark_start[span + 1]; ++m) {
        write_state(spans.mark_rows[m], spans.mark_slots[m]);
    }
    for (int64_t row = 0; row < end - begin - certain; ++row) {
        copy(slots.journal_inputs_of(spans.write[span], row) + channel,
             x + (begin + certain + row) * x_stride + channel, count);
    }
}

}  // namespace pace
