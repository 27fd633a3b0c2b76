// Preparation of heads before attention.
#include <algorithm>
#include <cstring>

#include "pace/attention_ops.h"

namespace pace {

namespace {

constexpr int64_t kChunkElements = 8 * 1024;  // about 2 us of work

// Normalises and rotates `count` heads of one token in place, from number `first` on.
void prepare(const HeadsArgs& args, const Norm& norm, int64_t token, int64_t first, float* heads, int64_t stride,
             int64_t count) {
    const auto normalise = [&] {
        for (int64_t h = 0; h < count; ++h) norm_head(norm, first + h, heads + h * stride, args.kv.key_dim);
    };
    if (norm && !args.norm_last) normalise();
    if (args.half > 0) {
        const int64_t angles = token * args.half;
        kernels().rotary(heads, count, stride, args.cos + angles, args.sin + angles, args.half, args.interleaved);
    }
    if (norm && args.norm_last) normalise();
}

}  // namespace

void prepare_heads(const HeadsArgs& args, int64_t first_token, int64_t tokens, int64_t first_head, int64_t kv_heads) {
    const int64_t group = args.query_heads / args.kv.kv_heads;
    const HeadsView &q = args.q, &k = args.k, &v = args.v;
    for (int64_t t = first_token; t < first_token + tokens; ++t) {
        float* const queries = q.at(t, first_head * group);
        prepare(args, args.query_norm, t, first_head * group, queries, q.head_stride, kv_heads * group);
        if (!args.stores()) continue;
        float* const keys = k.at(t, first_head);
        prepare(args, args.key_norm, t, first_head, keys, k.head_stride, kv_heads);
        for (int64_t h = first_head; args.value_norm && h < first_head + kv_heads; ++h)
            norm_head(args.value_norm, h, v.at(t, h), args.kv.value_dim);
        kernels().store_kv(keys, k.head_stride, v.at(t, first_head), v.head_stride, args.kv, first_head, kv_heads,
                           args.slots[t]);
    }
}

void prepare_queries(const HeadsArgs& args, int64_t token, int64_t kv_head, float* queries) {
    const int64_t group = args.query_heads / args.kv.kv_heads, dim = args.kv.key_dim;
    for (int64_t h = 0; h < group; ++h)
        std::memcpy(queries + h * dim, args.q.at(token, kv_head * group + h), dim * sizeof(float));
    prepare(args, args.query_norm, token, kv_head * group, queries, dim, group);
}

void store_key_value(const HeadsArgs& args, int64_t token, int64_t kv_head, float* own) {
    const int64_t key_dim = args.kv.key_dim, value_dim = args.kv.value_dim;
    float *const key = own, *value = args.v.at(token, kv_head);
    std::memcpy(key, args.k.at(token, kv_head), key_dim * sizeof(float));
    prepare(args, args.key_norm, token, kv_head, key, key_dim, 1);
    if (args.value_norm) {
        std::memcpy(own + key_dim, value, value_dim * sizeof(float));
        value = own + key_dim;
        norm_head(args.value_norm, kv_head, value, value_dim);
    }
    kernels().store_kv(key, key_dim, value, value_dim, args.kv, kv_head, 1, args.slots[token]);
}

int64_t prepared_tokens_per_chunk(const HeadsArgs& args) {
    const int64_t elements =
        (args.query_heads + args.kv.kv_heads) * args.kv.key_dim + args.kv.kv_heads * args.kv.value_dim;
    return std::max<int64_t>(1, kChunkElements / std::max<int64_t>(1, elements));
}

}  // namespace pace
