// What happens to heads before attention, cut by whole tokens.
#include <algorithm>

#include "pace/attention_ops.h"
#include "pace/threading.h"

namespace pace {

namespace {
constexpr int64_t kChunkElements = 8 * 1024;  // some 2 us of work

void normalise_heads(const KernelTable& table, const Norm& norm, float* heads, int64_t count, int64_t head_dim) {
    if (!norm) return;
    for (int64_t h = 0; h < count; ++h) {
        float* const head = heads + h * head_dim;
        table.rms_norm({head, nullptr, norm.weight, nullptr, nullptr, head}, head_dim, norm.eps);
    }
}
}  // namespace

void PrepareHeadsOp::prepare(int) {
    check_slots(slots, tokens, kv);
    const int64_t elements = (query_heads + 2 * kv.kv_heads) * kv.head_dim;
    tokens_per_chunk = std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, elements));
    chunk_count = divide_up(tokens, tokens_per_chunk);
}

void PrepareHeadsOp::run(int, int64_t chunk, int) const {
    const KernelTable& table = kernels();
    const int64_t dim = kv.head_dim;
    const int64_t end = std::min(tokens, (chunk + 1) * tokens_per_chunk);
    for (int64_t t = chunk * tokens_per_chunk; t < end; ++t) {
        float *const queries = q + t * token_stride, *const keys = k + t * token_stride;
        normalise_heads(table, query_norm, queries, query_heads, dim);
        normalise_heads(table, key_norm, keys, kv.kv_heads, dim);
        if (half > 0) {
            const float *const c = cos + t * half, *const s = sin + t * half;
            table.rotary(queries, query_heads, dim, c, s, half, interleaved);
            table.rotary(keys, kv.kv_heads, dim, c, s, half, interleaved);
        }
        table.store_kv(keys, dim, v + t * token_stride, dim, kv, slots[t]);
    }
}

}  // namespace pace
