// The attention kernels of every table against float64. Also, the same bits for every division of the rows.
#include <algorithm>
#include <cstring>

#include "check.h"
#include "pace/attention_ops.h"
#include "pace/convert.h"
#include "pace/threading.h"

using namespace pace;

namespace {

// One sequence in a cache filled with NaN, its blocks in reverse order, and queries for all of its positions.
struct Problem {
    int64_t length, heads, kv_heads, key_dim, value_dim, blocks, padded;
    DType dtype;
    std::vector<float> q, k, v;  // [length][heads][key_dim or value_dim]; k and v as the cache holds them
    std::vector<char> k_memory, v_memory;
    std::vector<int32_t> table;
    std::vector<int32_t> newest;  // of each position; empty: its own
    std::vector<float> out;
    AttentionArgs args;

    // `distort` may change q, k and v before the cache is written.
    Problem(
        int64_t length, int64_t heads, int64_t kv_heads, int64_t head_dim, DType dtype, int64_t window, float softcap,
        void (*distort)(Problem&) = [](Problem&) {}, int64_t width_of_values = 0)
        : length(length),
          heads(heads),
          kv_heads(kv_heads),
          key_dim(head_dim),
          value_dim(width_of_values ? width_of_values : head_dim),
          blocks((length + 15) / 16 + 1),
          padded((value_dim + 15) / 16 * 16),
          dtype(dtype) {
        q = check::heavy_tailed(length * heads * key_dim, 1);
        k = check::heavy_tailed(length * kv_heads * key_dim, 2);
        v = check::heavy_tailed(length * kv_heads * value_dim, 3);
        distort(*this);
        const int64_t scales = dtype == DType::I8 ? 16 * sizeof(float) : 0;
        const int64_t k_stride = kv_heads * (key_dim * 16 + scales), v_stride = kv_heads * (padded * 16 + scales);
        k_memory.assign(blocks * k_stride * dtype_bytes(dtype) + 4,
                        char(0xff));  // all bits set is NaN; in int8 -1, with scales of NaN
        v_memory.assign(blocks * v_stride * dtype_bytes(dtype) + 4, char(0xff));
        for (int64_t b = 0; b < blocks; ++b) table.push_back(int32_t(blocks - 1 - b));
        out.assign(length * heads * value_dim, check::kPoison);
        // 4 bytes off alignment: the kernels must not rely on alignment.
        const KvView kv = {
            k_memory.data() + 4, v_memory.data() + 4, k_stride, v_stride, dtype, blocks, kv_heads, key_dim, value_dim};
        args = {{.scale = 0.3f, .window = window, .softcap = softcap}, heads * key_dim, key_dim, kv, heads, out.data()};
        for (int64_t p = 0; p < length; ++p) {
            kernels().store_kv(&k[p * kv_heads * key_dim], key_dim, &v[p * kv_heads * value_dim], value_dim, kv, 0,
                               kv_heads, table[p / 16] * 16 + p % 16);
        }
        for (size_t head = 0; head < k.size(); head += key_dim) round(&k[head], key_dim);
        for (size_t head = 0; head < v.size(); head += value_dim) round(&v[head], value_dim);
    }

    // Rounds a head as the cache does. In int8 its elements, integer times scale, are also rounded to a float.
    void round(float* head, int64_t dim) const {
        const float scale = dtype == DType::I8 ? int8_scale(head, dim) : 1.0f;
        for (int64_t d = 0; d < dim; ++d) {
            if (dtype == DType::BF16) head[d] = round_to<BF16>(head[d]);
            if (dtype == DType::F16) head[d] = round_to<F16>(head[d]);
            if (dtype == DType::I8) head[d] = scale * int8_of(head[d], scale);
        }
    }
    // The definition in kv_cache.inl, element by element.
    static float int8_scale(const float* head, int64_t head_dim) {
        float largest = 0.0f;
        for (int64_t d = 0; d < head_dim; ++d) {
            if (!std::isfinite(head[d])) return check::kPoison;
            largest = std::max(largest, std::fabs(head[d]));
        }
        return largest / 127.0f;
    }
    static float int8_of(float value, float scale) {
        return scale > 0.0f ? std::clamp(std::nearbyint(value / scale), -127.0f, 127.0f) : 0.0f;
    }
    template <class T>
    static float round_to(float value) {
        T stored;
        from_float(value, stored);
        return to_float(stored);
    }

    // Computes all rows of all heads, `rows_at_once` at a time.
    std::vector<float> run(int rows_at_once) {
        std::fill(out.begin(), out.end(), check::kPoison);
        std::vector<float> scratch(attention_scratch_floats(args), check::kPoison);
        const int64_t rows = length * args.group();
        for (int64_t head = 0; head < kv_heads; ++head) {
            for (int64_t row = 0; row < rows; row += rows_at_once) {
                const int count = int(std::min<int64_t>(rows_at_once, rows - row));
                const float* const queries = &q[head * args.group() * key_dim];
                const int32_t* const ends = newest.empty() ? nullptr : newest.data();
                kernels().attention(args, {queries, 0, 0, table.data(), head, row, count, ends}, scratch.data());
            }
        }
        return out;
    }

    std::vector<float> run_op(int threads) {
        std::fill(out.begin(), out.end(), check::kPoison);
        const int32_t starts[] = {0, int32_t(length)}, lengths[] = {int32_t(length)};
        AttentionOp op = {};
        op.q = q.data();
        op.args = args;
        op.tokens = length;
        op.spans = {1, starts, lengths, table.data(), blocks, newest.empty() ? nullptr : newest.data()};
        op.prepare(threads);
        std::vector<char> workspace(op.workspace_bytes());
        op.set_workspace(workspace.data());
        for (int phase = 0; phase < AttentionOp::kPhases; ++phase) {
            for (int64_t chunk = op.chunks(phase) - 1; chunk >= 0; --chunk) op.run(phase, chunk, 0);
        }
        return out;
    }

    double bias_of(int64_t head, int64_t row, int64_t position) const {
        if (args.biases) {
            const int64_t radius = args.bias_radius, distance = std::clamp(position - row, -radius, radius);
            return args.biases[head * (2 * radius + 1) + radius + distance];
        }
        if (!args.slopes) return 0.0;
        if (!args.bf16_bias) return double(args.slopes[head]) * double(position - row);
        return double(args.scale) * round_to<BF16>(args.slopes[head] * round_to<BF16>(float(position)));
    }

    // Compares with the definition. A score is a chain of key_dim products, and each weight inherits twice its error.
    // The sums of at most `length` weights and values add their own error. (int8 rounds three times more for a score
    // and a value: the factors have room.)
    void check_against_definition(const std::vector<float>& got, const char* what) {
        const double eps = 0x1p-24;
        std::vector<double> expected(got.size()), tolerance(got.size());
        for (int64_t p = 0; p < length; ++p) {
            for (int64_t h = 0; h < heads; ++h) {
                const int64_t begin = std::max<int64_t>(0, p - args.window + 1), kv_head = h / args.group();
                const int64_t last = newest.empty() ? p : newest[p];
                std::vector<double> score(length), magnitude(length);
                double largest = -HUGE_VAL, worst = 0, sum = 0;
                for (int64_t j = begin; j <= last; ++j) {
                    for (int64_t d = 0; d < key_dim; ++d) {
                        const double product = args.scale * double(q[(p * heads + h) * key_dim + d]) *
                                               k[(j * kv_heads + kv_head) * key_dim + d];
                        score[j] += product;
                        magnitude[j] += std::fabs(product);
                    }
                    worst = std::max(worst, (2 * key_dim + 8) * eps * magnitude[j]);
                    if (args.softcap != 0) score[j] = args.softcap * std::tanh(score[j] / args.softcap);
                    if (args.softcap != 0) worst = std::max(worst, 16 * eps * args.softcap);
                    const double bias = bias_of(h, p, j);
                    score[j] += bias;
                    worst = std::max(worst, (2 * key_dim + 8) * eps * magnitude[j] + 8 * eps * std::fabs(bias));
                    largest = std::max(largest, score[j]);
                }
                std::vector<double>& weight = score;
                for (int64_t j = begin; j <= last; ++j) sum += weight[j] = std::exp(score[j] - largest);
                for (int64_t d = 0; d < value_dim; ++d) {
                    double total = 0, absolute = 0,
                           lost = 1e-37;  // a weight below 2^-126 of the largest counts as nothing
                    for (int64_t j = begin; j <= last; ++j) {
                        const double value = v[(j * kv_heads + kv_head) * value_dim + d],
                                     term = weight[j] / sum * value;
                        total += term;
                        absolute += std::fabs(term);
                        lost += 0x1p-126 * std::fabs(value);
                    }
                    expected[(p * heads + h) * value_dim + d] = total;
                    tolerance[(p * heads + h) * value_dim + d] =
                        absolute * (2 * worst + (80 + 2 * length) * eps) + lost;
                }
            }
        }
        CHECK_CLOSE(got.data(), expected.data(), tolerance.data(), got.size(), what);
    }
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace

TEST_TABLES(attention_of_all_shapes_is_close_and_the_same_in_every_cut) {
    (void)table;
    struct Shape {
        int64_t length, heads, kv_heads, head_dim;
        int64_t window;
        float softcap;
        int64_t value_dim = 0;  // 0: same as head_dim
    };
    const Shape shapes[] = {
        {1, 1, 1, 1, kNoWindow, 0},
        {17, 2, 1, 16, kNoWindow, 0},
        {66, 3, 1, 5, kNoWindow, 0},
        {70, 7, 1, 20, kNoWindow, 0},
        {40, 4, 2, 33, 9, 0},
        {30, 2, 2, 48, 1, 4},
        {67, 2, 1, 80, 64, 0},
        {20, 1, 1, 112, kNoWindow, 2},
        {66, 4, 2, 24, kNoWindow, 0, 7},
        {70, 6, 1, 5, 20, 0, 40},
        {67, 1, 1, 48, kNoWindow, 3, 32},
    };
    for (const Shape& s : shapes) {
        for (const DType dtype : {DType::F32, DType::BF16, DType::F16, DType::I8}) {
            const auto as_they_are = [](Problem&) {};
            Problem problem(s.length, s.heads, s.kv_heads, s.head_dim, dtype, s.window, s.softcap, as_they_are,
                            s.value_dim);
            const std::vector<float> whole = problem.run(kMaxQueryRows);
            problem.check_against_definition(whole, "attention");
            for (const int rows : {1, 2, 3, 5, 13}) CHECK(same_bits(problem.run(rows), whole));
        }
    }
}

TEST_TABLES(attention_split_by_partition_is_the_same) {
    (void)table;
    for (const DType dtype : {DType::F32, DType::I8}) {
        Problem problem(1100, 1, 1, 3, dtype, kNoWindow, 0);
        const std::vector<float> whole = problem.run(kMaxQueryRows);
        problem.check_against_definition(whole, "two partitions");
        CHECK(same_bits(problem.run_op(1), whole));
        CHECK(same_bits(problem.run_op(64), whole));  // too few chunks for 64 threads, so rows are split
        problem.args.window = 40;
        const std::vector<float> windowed = problem.run(7);
        CHECK(!same_bits(windowed, whole));
        CHECK(same_bits(problem.run_op(64), windowed));
    }
}

TEST_TABLES(attention_up_to_a_newest_position_is_close_and_the_same_in_every_cut) {
    (void)table;
    struct Shape {
        int64_t length, heads, kv_heads, head_dim, window;
        float softcap;
    };
    for (const Shape& s : {Shape{1, 1, 1, 5, kNoWindow, 0}, Shape{70, 7, 1, 20, kNoWindow, 2},
                           Shape{66, 4, 2, 16, 9, 0}, Shape{130, 2, 1, 3, kNoWindow, 0}}) {
        for (const DType dtype : {DType::F32, DType::BF16, DType::I8}) {
            Problem problem(s.length, s.heads, s.kv_heads, s.head_dim, dtype, s.window, s.softcap);
            const int64_t last = s.length - 1;
            const std::vector<float> causal = problem.run(kMaxQueryRows);
            for (int64_t p = 0; p <= last; ++p) problem.newest.push_back(int32_t(p));
            CHECK(same_bits(problem.run(kMaxQueryRows), causal));
            for (int kind = 0; kind < 3; ++kind) {  // all positions; a symmetric window; any after the oldest
                for (int64_t p = 0; p <= last; ++p) {
                    const int64_t oldest = problem.args.oldest(p);
                    problem.newest[p] = int32_t(kind == 0   ? last
                                                : kind == 1 ? std::min(p + 8, last)
                                                            : oldest + p * 7919 % (last - oldest + 1));
                }
                const std::vector<float> whole = problem.run(kMaxQueryRows);
                problem.check_against_definition(whole, "up to a newest position");
                CHECK(s.length == 1 || !same_bits(whole, causal));
                for (const int rows : {2, 13}) CHECK(same_bits(problem.run(rows), whole));
                for (const int threads : {1, 64}) CHECK(same_bits(problem.run_op(threads), whole));
            }
        }
    }
}

TEST_TABLES(attention_with_slopes_is_close_and_the_same_in_every_cut) {
    (void)table;
    const std::vector<float> slopes = {0.5f, 0.00390625f, 1.40625f, 0.0f, 0.08837890625f, 0.25f};
    for (const int64_t window : {kNoWindow, int64_t(9)}) {
        for (const DType dtype : {DType::F32, DType::BF16, DType::I8}) {
            Problem problem(300, 6, 2, 5, dtype, window, 0);
            const std::vector<float> plain = problem.run(kMaxQueryRows);
            problem.args.slopes = slopes.data();
            for (const bool rounded : {false, true}) {
                problem.args.bf16_bias = rounded;
                const std::vector<float> whole = problem.run(kMaxQueryRows);
                problem.check_against_definition(whole, rounded ? "bias in bf16" : "slopes");
                CHECK(!same_bits(whole, plain));
                for (const int rows : {1, 13}) CHECK(same_bits(problem.run(rows), whole));
                for (const int threads : {1, 64}) CHECK(same_bits(problem.run_op(threads), whole));
            }
        }
    }
}

TEST_TABLES(attention_with_biases_is_close_and_the_same_in_every_cut) {
    (void)table;
    for (const int64_t radius : {int64_t(0), int64_t(3), int64_t(100), int64_t(400)}) {
        const std::vector<float> biases = check::heavy_tailed(6 * (2 * radius + 1), 4);
        const int64_t window = radius == 3 || radius == 100 ? 150 : kNoWindow;
        Problem problem(300, 6, 2, 5, radius == 3 ? DType::I8 : DType::F32, window, 0);
        for (int64_t p = 0; p < 300; ++p) problem.newest.push_back(int32_t(std::min<int64_t>(p + 149, 299)));
        const std::vector<float> plain = problem.run(kMaxQueryRows);
        problem.args.biases = biases.data();
        problem.args.bias_radius = radius;
        const std::vector<float> whole = problem.run(kMaxQueryRows);
        problem.check_against_definition(whole, "biases");
        CHECK(!same_bits(whole, plain));
        for (const int rows : {1, 13}) CHECK(same_bits(problem.run(rows), whole));
        for (const int threads : {1, 64}) CHECK(same_bits(problem.run_op(threads), whole));
    }
}

TEST_TABLES(attention_never_reads_hidden_positions) {
    (void)table;
    for (const DType dtype : {DType::F32, DType::I8}) {
        Problem problem(100, 2, 1, 8, dtype, 20, 0);
        const std::vector<float> clean = problem.run(kMaxQueryRows);
        // Runs only the last 30 positions. Positions that they do not see become NaN, and blocks without visible
        // positions unmapped.
        const KvView& kv = problem.args.kv;
        for (int64_t p = 0; p <= 70 - 20; ++p) {
            const int64_t block = problem.table[p / 16];
            if (dtype == DType::I8)
                kv.key_scales(block, 0)[p % 16] = kv.value_scales(block, 0)[p % 16] = check::kPoison;
            for (int64_t d = 0; d < 16; ++d) {
                if (dtype == DType::F32 && d < 8) kv.keys<float>(block, 0)[d * 16 + p % 16] = check::kPoison;
                if (dtype == DType::F32) kv.values<float>(block, 0)[p % 16 * 16 + d] = check::kPoison;
            }
        }
        for (int64_t block = 0; block < (70 - 20 + 1) / 16; ++block) problem.table[block] = -1;
        std::fill(problem.out.begin(), problem.out.end(), 0.0f);
        std::vector<float> scratch(attention_scratch_floats(problem.args), check::kPoison);
        const float* const queries = &problem.q[70 * problem.heads * problem.key_dim];
        kernels().attention(problem.args, {queries, 70, 70, problem.table.data(), 0, 0, 60}, scratch.data());
        CHECK(std::memcmp(&problem.out[70 * 16], &clean[70 * 16], 30 * 16 * sizeof(float)) == 0);
    }
}

// Worst cases of int8: every element of a head at +-127; heads of zeros; scales from subnormal to 2^100 at neighbouring
// positions. Also elements half-way between two integers.
void extremes(Problem& p) {
    for (float& value : p.k) value = value < 0 ? -0.7f : 0.7f;
    for (float& value : p.v) value = value < 0 ? -3.0f : 3.0f;
}
void zeros(Problem& p) {
    for (size_t head = 0; head < p.k.size(); head += 2 * p.key_dim)
        std::fill_n(&p.k[head], p.key_dim, head % 3 ? 0.0f : -0.0f);
    for (size_t head = 0; head < p.v.size(); head += 3 * p.value_dim) std::fill_n(&p.v[head], p.value_dim, 0.0f);
}
void scales_of_all_sizes(Problem& p) {
    for (size_t i = 0; i < p.k.size(); ++i) p.k[i] = std::ldexp(p.k[i], -int(i / p.key_dim % 5) * 35);
    for (size_t i = 0; i < p.v.size(); ++i) p.v[i] = std::ldexp(p.v[i], 100 - int(i / p.value_dim % 4) * 80);
}
void halves(Problem& p) {
    for (size_t i = 0; i < p.k.size(); ++i) p.k[i] = i % p.key_dim ? float(int(p.k[i] * 100)) + 0.5f : 127.0f;
    for (size_t i = 0; i < p.v.size(); ++i) p.v[i] = i % p.value_dim ? float(int(p.v[i] * 100)) + 0.5f : -127.0f;
}
constexpr void (*kDistortions[])(Problem&) = {[](Problem&) {}, extremes, zeros, scales_of_all_sizes, halves};

TEST_TABLES(attention_over_int8_of_all_groups_and_worst_cases) {
    (void)table;
    for (int group = 1; group <= 16;
         ++group) {  // rows of a decode step: all row counts of a pass, in one to three passes
        Problem problem(65 + group % 3, group, 1, 16 + group % 3, DType::I8, group % 4 == 1 ? 30 : kNoWindow,
                        group % 5 == 2 ? 8.0f : 0.0f, kDistortions[group % std::size(kDistortions)]);
        const std::vector<float> whole = problem.run(kMaxQueryRows);
        problem.check_against_definition(whole, "int8");
        CHECK(same_bits(problem.run(group), whole));
    }
    for (const auto distort : kDistortions) {
        Problem problem(40, 4, 2, 20, DType::I8, kNoWindow, 0, distort);
        const std::vector<float> whole = problem.run(kMaxQueryRows);
        problem.check_against_definition(whole, "a worst case of int8");
        CHECK(same_bits(problem.run(2), whole));
    }
}

// Checks every byte, every bit of a scale, and that no other byte changes.
TEST_TABLES(int8_is_stored_as_defined) {
    constexpr float kTiny = 0x1p-149f, kLargest = 3.4e38f, kInfinity = __builtin_inff();
    for (const int64_t dim : {1, 3, 8, 16, 20, 37, 64}) {
        std::vector<std::vector<float>> heads;
        for (int seed = 0; seed < 8; ++seed) heads.push_back(check::heavy_tailed(dim, seed));
        for (const float value : {0.0f, -0.0f, 1.0f, -5.5f, kTiny, 127 * kTiny, 190 * kTiny, -100000 * kTiny, 0x1p-126f,
                                  kLargest, kInfinity, -kInfinity, check::kPoison}) {
            heads.push_back(std::vector<float>(dim, value));
            heads.push_back(check::heavy_tailed(dim, 9));
            heads.back()[dim - 1] = value;
        }
        for (size_t i = 0; i < heads.size(); ++i) {
            const std::vector<float>&k = heads[i], &v = heads[heads.size() - 1 - i];
            const int64_t padded = (dim + 15) / 16 * 16, k_bytes = dim * 16 + 64, v_bytes = padded * 16 + 64;
            std::vector<char> memory(2 * (k_bytes + v_bytes), 55), expected = memory;
            const KvView kv = {
                memory.data(), memory.data() + 2 * k_bytes, 2 * k_bytes, 2 * v_bytes, DType::I8, 1, 2, dim, dim};
            const int64_t position = int64_t(i) % 16;
            table.store_kv(k.data(), 0, v.data(), 0, kv, 1, 1, position);  // only the second head
            const float k_scale = Problem::int8_scale(k.data(), dim), v_scale = Problem::int8_scale(v.data(), dim);
            char* const keys = &expected[k_bytes];
            char* const values = &expected[2 * k_bytes + v_bytes];
            for (int64_t d = 0; d < dim; ++d) {
                keys[d * 16 + position] = char(Problem::int8_of(k[d], k_scale));
                values[position * padded + d] = char(Problem::int8_of(v[d], v_scale));
            }
            for (const auto& [scales, scale] :
                 {std::pair(keys + dim * 16, k_scale), std::pair(values + padded * 16, v_scale)}) {
                float stored;
                std::memcpy(&stored, scales - expected.data() + memory.data() + position * 4, 4);
                const bool both_nan = std::isnan(scale) && std::isnan(stored);  // payloads may differ
                std::memcpy(scales + position * 4, both_nan ? &stored : &scale, 4);
            }
            CHECK(memory == expected);
        }
    }
}

TEST(attention_refuses_spans_that_do_not_fit) {
    Problem problem(40, 2, 1, 8, DType::F32, kNoWindow, 0);
    const auto message = [&](std::vector<int32_t> starts, int32_t length, int32_t first_block,
                             const int32_t* newest = nullptr) {
        AttentionOp op = {};
        problem.table[0] = first_block;
        op.args = problem.args;
        op.tokens = 40;
        op.spans = {int64_t(starts.size()) - 1,    starts.data(), &length, problem.table.data(),
                    int64_t(problem.table.size()), newest};
        try {
            op.prepare(2);
        } catch (const std::invalid_argument& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    const int32_t good = problem.table[0];
    CHECK(message({0, 40}, 40, good).empty());
    CHECK(message({0, 39}, 40, good).find("query_start") != std::string::npos);
    CHECK(message({0, 40}, 39, good).find("kv_len") != std::string::npos);
    CHECK(message({0, 40}, 65, good).find("blocks hold") != std::string::npos);
    CHECK(message({0, 40}, 40, -1).find("block table") != std::string::npos);
    CHECK(message({0, 40}, 40, int32_t(problem.blocks)).find("block table") != std::string::npos);
    std::vector<int32_t> newest(40, 39);
    CHECK(message({0, 40}, 40, good, newest.data()).empty());
    newest[3] = 40;
    CHECK(message({0, 40}, 40, good, newest.data()) ==
          "span 0: the newest position of token 3 is 40; it must be between 0 and 39");
    problem.args.window = 6;
    newest.assign(40, 34);
    CHECK(message({0, 40}, 40, good, newest.data()).empty());
    newest[39] = 33;
    CHECK(message({0, 40}, 40, good, newest.data()).find("token 39 is 33; it must be between 34 and 39") !=
          std::string::npos);
}
