// The executor of recorded programs: a transformer layer gives the same bits for any number of threads and any division
// of tokens into steps. tests/llm/runners/test_program.py checks the results; here TSan checks that phases do not
// overlap.
#include <cstdlib>
#include <cstring>
#include <memory>

#include "pace/program.h"
#include "weights.h"

using namespace pace;

namespace {

constexpr int64_t kTokens = 70, kVocabulary = 37, kHidden = 32, kInner = 40;
constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadDim = 8, kHalf = kHeadDim / 2, kBlocks = (kTokens + 15) / 16;

using Weight = check::Memory;

Weight make_weight(int64_t n, int64_t k, DType dtype, bool glu = false) {
    Weight weight = check::empty_weight(n, k, {.dtype = dtype}, glu);
    const std::vector<float> values = check::heavy_tailed(size_t(n * k), uint32_t(n + k));
    PackOp pack = {weight.get(), 0, n, values.data(), DType::F32, k, 0, 0};
    execute(pack);
    return weight;
}

Columns whole(Value value) { return {value, 0, value.columns}; }

struct Layer {
    const Weight embedding, qkv, out, gate_up, down;
    const std::vector<float> gain = check::heavy_tailed(kHidden, 1);
    std::vector<float> keys, values, cos, sin;
    LayerCache cache;
    Program program{{kHidden, (kHeads + 2 * kKvHeads) * kHeadDim, kHeads * kHeadDim, kInner, kHidden}};

    explicit Layer(DType dtype)
        : embedding(make_weight(kVocabulary, kHidden, dtype)),
          qkv(make_weight((kHeads + 2 * kKvHeads) * kHeadDim, kHidden, dtype)),
          out(make_weight(kHidden, kHeads * kHeadDim, dtype)),
          gate_up(make_weight(2 * kInner, kHidden, dtype, true)),
          down(make_weight(kHidden, kInner, dtype)),
          keys(kBlocks * kKvHeads * kHeadDim * 16),
          values(kBlocks * kKvHeads * 16 * 16) {
        for (int64_t i = 0; i < kTokens * kHalf; ++i) {
            cos.push_back(std::cos(0.1f * float(i)));
            sin.push_back(std::sin(0.1f * float(i)));
        }
        const Norm none = {}, norm = {Norm::Kind::Rms, gain.data(), nullptr, 1e-5f};
        const Value x = {0, kHidden, true}, heads = {1, (kHeads + 2 * kKvHeads) * kHeadDim, true};
        const Value mixed = {2, kHeads * kHeadDim, true}, inner = {3, kInner, true}, last = {4, kHidden, false};
        const HeadsOf q = {heads, 0, kHeads, kHeadDim, kHeadDim};
        const HeadsOf k = {heads, kHeads * kHeadDim, kKvHeads, kHeadDim, kHeadDim};
        const HeadsOf v = {heads, (kHeads + kKvHeads) * kHeadDim, kKvHeads, kHeadDim, kHeadDim};
        const Preparation preparation = {k, v, none, none, none, {0, kHalf, false}, false};
        program.embedding(x, embedding.get(), nullptr, Program::Ids::Tokens, 0);
        program.linear(heads, whole(x), {norm, qkv.get()}, {});
        program.attention(mixed, q, {}, preparation, 0, {.scale = 0.35f});
        program.linear(x, whole(mixed), {none, out.get()}, x);
        program.linear(inner, whole(x), {norm, gate_up.get(), nullptr, nullptr, Activation::Silu}, {});
        program.linear(x, whole(inner), {none, down.get()}, x);
        program.gather_rows(last, whole(x));
        program.linear({Value::kLogits, kVocabulary, false}, whole(last), {norm, embedding.get()}, {});
        const int64_t k_stride = int64_t(keys.size()) / kBlocks, v_stride = int64_t(values.size()) / kBlocks;
        cache = {{keys.data(), values.data(), k_stride, v_stride, DType::F32, kBlocks, kKvHeads, kHeadDim, kHeadDim},
                 1};
    }

    // The logits of kTokens tokens, `count` of them in each step, starting with an empty cache.
    std::vector<float> run(int64_t count) {
        std::fill(keys.begin(), keys.end(), check::kPoison);
        std::fill(values.begin(), values.end(), check::kPoison);
        std::vector<float> logits(kTokens * kVocabulary, check::kPoison);
        std::vector<int64_t> ids, positions, slots, rows;
        std::vector<int32_t> blocks;
        for (int64_t b = 0; b < kBlocks; ++b) blocks.push_back(int32_t(kBlocks - 1 - b));
        for (int64_t p = 0; p < kTokens; ++p) {
            ids.push_back(p * p % kVocabulary);
            positions.push_back(p);
            slots.push_back(blocks[p / 16] * 16 + p % 16);
            rows.push_back(p);
        }
        for (int64_t p = 0; p < kTokens; p += count) {
            const int64_t tokens = std::min(count, kTokens - p);
            const int32_t query_start[] = {0, int32_t(tokens)}, length = int32_t(p + tokens);
            const Angles angles = {&cos[p * kHalf], &sin[p * kHalf]};
            const Spans spans = {1, query_start, &length, blocks.data(), kBlocks};
            const Table tables[] = {{}, {&slots[p], spans}};  // the layer belongs to the second group
            program.run({&cache, tokens, tokens, &ids[p], &positions[p], &angles, rows.data(), tables,
                         &logits[p * kVocabulary]});
        }
        return logits;
    }
};

}  // namespace

TEST_TABLES(a_program_gives_the_same_bits_with_any_threads_and_steps) {
    ThreadPool& pool = ThreadPool::instance();
    const int before = pool.num_threads();
    for (const DType dtype : {DType::F32, DType::BF16}) {
        Layer layer(dtype);
        pool.set_num_threads(1);
        const std::vector<float> whole = layer.run(kTokens);
        for (const float logit : whole) CHECK(std::isfinite(logit));
        for (const int64_t count : {1, 7, 70})
            for (const int threads : {1, 3, 1, 8}) {  // several steps of the same shape in a row
                pool.set_num_threads(threads);
                CHECK(std::memcmp(layer.run(count).data(), whole.data(), whole.size() * sizeof(float)) == 0);
            }
    }
    pool.set_num_threads(before);
}
