// What is done to heads before attention.
#include <algorithm>
#include <cstring>

#include "pace/attention_ops.h"

namespace pace {

namespace {

constexpr int64_t kChunkElements = 8 * 1024;  // some 2 us of work

// Normalises and rotates `count` heads of one token in place.
void prepare(const HeadsArgs& args, const Norm& norm, int64_t token, float* heads, int64_t count) {
    const KernelTable& table = kernels();
    const int64_t dim = args.kv.head_dim;
    if (norm) {
        for (int64_t h = 0; h < count; ++h) {
            float* const head = heads + h * dim;
            table.rms_norm({head, nullptr, norm.weight, nullptr, nullptr, head}, dim, norm.eps);
        }
    }
    if (args.half > 0) {
        const int64_t angles = token * args.half;
        table.rotary(heads, count, dim, args.cos + angles, args.sin + angles, args.half, args.interleaved);
    }
}

}  // namespace

void prepare_heads(const HeadsArgs& args, int64_t first, int64_t count) {
    const int64_t dim = args.kv.head_dim, kv_heads = args.kv.kv_heads;
    for (int64_t t = first; t < first + count; ++t) {
        float *const queries = args.q + t * args.token_stride, *const keys = args.k + t * args.token_stride;
        prepare(args, args.query_norm, t, queries, args.query_heads);
        prepare(args, args.key_norm, t, keys, kv_heads);
        kernels().store_kv(keys, dim, args.v + t * args.token_stride, dim, args.kv, 0, kv_heads, args.slots[t]);
    }
}

void prepare_queries(const HeadsArgs& args, int64_t token, int64_t kv_head, float* queries) {
    const int64_t group = args.query_heads / args.kv.kv_heads, floats = group * args.kv.head_dim;
    std::memcpy(queries, args.q + token * args.token_stride + kv_head * floats, floats * sizeof(float));
    prepare(args, args.query_norm, token, queries, group);
}

void store_key_value(const HeadsArgs& args, int64_t token, int64_t kv_head, float* key) {
    const int64_t dim = args.kv.head_dim, head = token * args.token_stride + kv_head * dim;
    std::memcpy(key, args.k + head, dim * sizeof(float));
    prepare(args, args.key_norm, token, key, 1);
    kernels().store_kv(key, dim, args.v + head, dim, args.kv, kv_head, 1, args.slots[token]);
}

int64_t prepared_tokens_per_chunk(const HeadsArgs& args) {
    const int64_t elements = (args.query_heads + 2 * args.kv.kv_heads) * args.kv.head_dim;
    return std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, elements));
}

}  // namespace pace
