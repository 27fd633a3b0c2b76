// Cuts the rotary embedding into whole tokens.
#include <algorithm>

#include "pace/row_ops.h"

namespace pace {

namespace {
constexpr int64_t kChunkElements = 8 * 1024;  // about 2 us of work
}

void RotaryOp::prepare(int) {
    tokens_per_chunk = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, heads * half * 2));
    chunk_count = (tokens + tokens_per_chunk - 1) / tokens_per_chunk;
}

void RotaryOp::run(int, int64_t chunk, int) const {
    const auto rotate = kernels().rotary;
    const int64_t end = std::min(tokens, (chunk + 1) * tokens_per_chunk);
    for (int64_t t = chunk * tokens_per_chunk; t < end; ++t) {
        rotate(x.at(t, 0), heads, x.head_stride, cos + t * half, sin + t * half, half, interleaved);
    }
}

}  // namespace pace
