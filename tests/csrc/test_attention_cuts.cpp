// A step of AttentionOp, with preparation of heads, has the same bits for every number of threads and every order of
// chunks. The expected bits are those of one query row at a time.
#include <algorithm>
#include <cstring>

#include "check.h"
#include "pace/attention_ops.h"

using namespace pace;

namespace {

struct Model {
    int64_t group, kv_heads, head_dim;
    DType dtype;
    int64_t window = kNoWindow;
    float softcap = 0;
    bool has_newest = false;  // rows see up to positions before and after their own
};

struct Span {
    int64_t tokens, kv_len;
};

// Spans whose new tokens are not yet prepared and stored. The cache contains the positions before them; all its other
// positions are NaN.
class Step {
  public:
    Step(const Model& model, const std::vector<Span>& spans) : model_(model), starts_{0} {
        const int64_t heads = model.group * model.kv_heads, dim = model.head_dim, padded = (dim + 15) / 16 * 16;
        int64_t longest = 0;
        for (const Span& span : spans) {
            starts_.push_back(int32_t(starts_.back() + span.tokens));
            lengths_.push_back(int32_t(span.kv_len));
            longest = std::max(longest, span.kv_len);
        }
        stride_ = divide_up(longest, 16);
        const int64_t blocks = stride_ * int64_t(spans.size()), scales = model.dtype == DType::I8 ? 64 : 0;
        const int64_t k_stride = model.kv_heads * (dim * 16 + scales),
                      v_stride = model.kv_heads * (padded * 16 + scales);
        for (int64_t b = 0; b < blocks; ++b) table_.push_back(int32_t(blocks - 1 - b));
        k_memory_.assign(blocks * k_stride * dtype_bytes(model.dtype), char(0xff));
        v_memory_.assign(blocks * v_stride * dtype_bytes(model.dtype), char(0xff));
        kv_ = {k_memory_.data(), v_memory_.data(), k_stride, v_stride, model.dtype, blocks, model.kv_heads, dim, dim};
        for (size_t s = 0; s < spans.size(); ++s) fill(int64_t(s), spans[s]);
        for (const Span& span : spans) {
            for (int64_t p = span.kv_len - span.tokens; p < span.kv_len; ++p) {
                const int64_t oldest = p < model.window ? 0 : p - model.window + 1;
                newest_.push_back(int32_t(p % 2 ? span.kv_len - 1 : oldest + (p - oldest) / 2));
            }
        }
        // Queries, keys and values of a token side by side, as the output of one product.
        width_ = (heads + 2 * model.kv_heads) * dim;
        fused_ = check::heavy_tailed(starts_.back() * width_, 1);
        norm_ = check::heavy_tailed(dim, 2);
        cos_ = check::heavy_tailed(starts_.back() * (dim / 2), 3);
        sin_ = check::heavy_tailed(starts_.back() * (dim / 2), 4);
        out_.assign(starts_.back() * heads * dim, check::kPoison);
    }
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

    AttentionOp op() {
        const int64_t heads = model_.group * model_.kv_heads, dim = model_.head_dim;
        const HeadsView q = {fused_.data(), width_, dim}, k = {q.at(0, heads), width_, dim},
                        v = {k.at(0, model_.kv_heads), width_, dim};
        const Norm norm = {Norm::Kind::Rms, norm_.data(), nullptr, 1e-6f};
        AttentionOp op = {};
        op.q = q.data;
        op.args = {
            {.scale = 0.1f, .window = model_.window, .softcap = model_.softcap}, width_, dim, kv_, heads, out_.data()};
        op.heads = {q,     k,           v,           heads,   norm,  norm, {},
                    false, cos_.data(), sin_.data(), dim / 2, false, kv_,  slots_.data()};
        op.tokens = starts_.back();
        op.spans = {int64_t(lengths_.size()), starts_.data(), lengths_.data(), table_.data(), stride_, newest()};
        return op;
    }

    // Runs the op as cut for `threads` threads. Returns the number of chunks in the phase that computes attention.
    int64_t run(int threads, bool backwards) {
        AttentionOp op = this->op();
        op.prepare(threads);
        std::vector<char> workspace(op.workspace_bytes());
        op.set_workspace(workspace.data());
        for (int phase = 0; phase < AttentionOp::kPhases; ++phase) {
            const int64_t chunks = op.chunks(phase);
            for (int64_t i = 0; i < chunks; ++i) op.run(phase, backwards ? chunks - 1 - i : i, 0);
        }
        return op.chunks(1);
    }

    // Prepares all heads first, then computes every query row alone.
    void run_row_by_row() {
        const AttentionOp op = this->op();
        std::vector<float> scratch(attention_scratch_floats(op.args), check::kPoison);
        prepare_heads(op.heads, 0, op.tokens, 0, model_.kv_heads);
        for (int64_t s = 0; s < op.spans.count; ++s) {
            const int64_t begin = starts_[s], tokens = starts_[s + 1] - begin;
            for (int64_t head = 0; head < model_.kv_heads; ++head) {
                const float* const queries = op.heads.q.at(begin, head * model_.group);
                for (int64_t row = 0; row < tokens * model_.group; ++row) {
                    const int32_t* const blocks = &table_[s * stride_];
                    const int32_t* const ends = newest() ? newest() + begin : nullptr;
                    kernels().attention(op.args, {queries, begin, lengths_[s] - tokens, blocks, head, row, 1, ends},
                                        scratch.data());
                }
            }
        }
    }

    bool is_finite() const {
        return std::all_of(out_.begin(), out_.end(), [](float x) { return std::isfinite(x); });
    }

    // Compares the outputs, and the bytes of the cache.
    bool operator==(const Step& other) const {
        return std::memcmp(out_.data(), other.out_.data(), out_.size() * sizeof(float)) == 0 &&
               k_memory_ == other.k_memory_ && v_memory_ == other.v_memory_;
    }

  private:
    const int32_t* newest() const { return model_.has_newest ? newest_.data() : nullptr; }
    void fill(int64_t span, const Span& size) {
        const int64_t dim = model_.head_dim, old = size.kv_len - size.tokens;
        const std::vector<float> heads =
            check::heavy_tailed(8 * 1024, 5 + uint32_t(span));  // starts anywhere in these values
        for (int64_t p = 0; p < size.kv_len; ++p) {
            const int64_t slot = table_[span * stride_ + p / 16] * 16 + p % 16;
            const float* const k = &heads[p * 61 % (7 * 1024)];
            if (p < old) kernels().store_kv(k, dim, k + model_.kv_heads * dim, dim, kv_, 0, model_.kv_heads, slot);
            if (p >= old) slots_.push_back(slot);
        }
    }

    Model model_;
    std::vector<int32_t> starts_, lengths_, table_, newest_;
    std::vector<int64_t> slots_;
    int64_t stride_, width_;
    std::vector<char> k_memory_, v_memory_;
    KvView kv_;
    std::vector<float> fused_, norm_, cos_, sin_, out_;
};

void check_all_cuts(const Model& model, const std::vector<Span>& spans) {
    Step rows(model, spans);
    rows.run_row_by_row();
    CHECK(rows.is_finite());
    for (const int threads : {1, 2, 3, 8, 16}) {
        Step step(model, spans);
        step.run(threads, threads % 2 == 0);
        CHECK(step == rows);
    }
}

}  // namespace

// Covers every pair of head size, group and cache dtype, though not every triple.
TEST_TABLES(a_decode_step_is_the_same_for_every_number_of_threads) {
    const DType dtypes[] = {DType::F32, DType::BF16, DType::I8};
    const int64_t dims[] = {64, 80, 96, 128, 256}, groups[] = {1, 3, 7, 8, 16};
    for (int i = 0; i < 5; ++i) {
        for (int j = 0; j < 5; ++j) {
            const int number = 5 * i + j;
            const int64_t window = number % 3 == 1 ? 250 : kNoWindow;
            check_all_cuts({groups[j], 1, dims[i], dtypes[(i + j) % 3], window, number % 4 == 0 ? 3.0f : 0.0f},
                           {{1, 300}});
        }
    }
}

TEST_TABLES(steps_of_several_spans_are_the_same_for_every_number_of_threads) {
    for (const DType dtype : {DType::F32, DType::BF16, DType::I8}) {
        check_all_cuts({7, 2, 64, dtype}, {{1, 1}, {1, 140}, {1, 600}});
        check_all_cuts({7, 1, 64, dtype}, {{5, 1026}, {1, 200}});                // across two partitions
        check_all_cuts({3, 1, 64, dtype, 1500, 4.0f}, {{1, 2100}});              // across three partitions
        check_all_cuts({7, 1, 64, dtype, 150}, {{3, 1100}, {40, 160}, {0, 0}});  // the second span has several tiles
    }
}

TEST_TABLES(steps_up_to_newest_positions_are_the_same_for_every_number_of_threads) {
    for (const DType dtype : {DType::F32, DType::BF16, DType::I8}) {
        check_all_cuts({7, 1, 64, dtype, kNoWindow, 0, true}, {{1, 1}, {5, 140}, {40, 600}});
        check_all_cuts({3, 2, 64, dtype, 150, 4.0f, true}, {{3, 1100}, {40, 160}, {0, 0}});
        check_all_cuts({3, 1, 64, dtype, kNoWindow, 0, true}, {{1, 2051}});  // it sees two partitions before its own
        check_all_cuts({3, 1, 64, dtype, kNoWindow, 0, true}, {{8, 2101}});  // the last row sees fewer than others
    }
}

// Proves that rows are cut at all; otherwise the tests above would compare equal runs.
TEST(rows_are_cut_where_threads_would_be_idle) {
    const auto chunks = [](const Model& model, const Span& span, int threads) {
        return Step(model, {span}).run(threads, false);
    };
    const Model model = {7, 1, 64, DType::BF16};
    CHECK(chunks(model, {1, 512}, 1) == 1);
    CHECK(chunks(model, {1, 512}, 2) == 2);
    CHECK(chunks(model, {1, 512}, 3) == 3);
    CHECK(chunks(model, {1, 512}, 16) == 7);
    CHECK(chunks(model, {1, 400}, 2) == 1);  // saves less than the time of a barrier
    CHECK(chunks(model, {1, 100}, 16) == 1);
    CHECK(chunks(model, {1, 3000}, 3) == 3);  // partitions are enough
    CHECK(chunks(model, {1, 3000}, 8) == 6);  // 3 partitions in 2 pieces
    CHECK(chunks({7, 2, 64, DType::BF16}, {1, 512}, 2) == 2);
    CHECK(chunks({7, 2, 64, DType::BF16}, {1, 512}, 16) == 14);
    CHECK(chunks({2, 1, 128, DType::BF16}, {1, 512}, 2) == 1);
    CHECK(chunks({1, 2, 64, DType::BF16}, {1, 512}, 16) == 2);
}
