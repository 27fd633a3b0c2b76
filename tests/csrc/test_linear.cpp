// Packed weights and linear layers: every table and dtype against float64, for sizes around all tile edges. Places that
// must not be read, or that must be written, contain NaN, and rows are misaligned.
#include "weights.h"

namespace {

using namespace pace;
using check::Inputs;
using check::rounded;

constexpr DType kDtypes[] = {DType::F32, DType::BF16, DType::F16};

// A weight packed from an fp32 matrix, with values that its dtype can represent (test_vec.cpp tests the rounding). Rows
// are `padding` elements further apart than K, and the gap is filled with NaN.
struct Packed {
    int64_t n, k;
    DType dtype;
    bool glu;
    std::vector<double> matrix;  // as stored, [n][k]
    check::Memory memory;

    Packed(int64_t n, int64_t k, DType dtype, bool glu, uint32_t seed)
        : n(n),
          k(k),
          dtype(dtype),
          glu(glu),
          matrix(size_t(n * k)),
          memory(check::empty_weight(n, k, {.dtype = dtype}, glu)) {
        const int64_t stride = k + 3;
        std::vector<float> source(size_t(n * stride) + 1, check::kPoison);
        const std::vector<float> values = check::heavy_tailed(size_t(n * k), seed);
        for (int64_t r = 0; r < n; ++r)
            for (int64_t i = 0; i < k; ++i) {
                const float value = rounded(values[size_t(r * k + i)], dtype);
                source[size_t(1 + r * stride + i)] = value;
                matrix[size_t(r * k + i)] = double(value);
            }
        check::pack_in_pieces(n, [&](int64_t first, int64_t rows) {
            PackOp op = {memory.get(), first, rows, source.data() + 1 + first * stride, DType::F32, stride, 0, 0};
            execute(op);
        });
    }
};

LinearOp make_op(Inputs& x, const Packed& w, std::vector<float>& out) {
    LinearOp op = {};
    op.x = x.row(0);
    op.x_stride = x.stride;
    op.rows = x.rows;
    op.weight = w.memory.get();
    out.assign(size_t(x.rows * (w.glu ? w.n / 2 : w.n)), check::kPoison);
    op.out = out.data();
    return op;
}

// Sums in float64 and their bounds. An fp32 chain of K products in any order has an error of at most (K + 1) eps sum|w
// x| with eps = 2^-24. The factor 2 covers generic, which also rounds the products.
void reference(const KernelTable& table, Inputs& x, const Packed& w, std::vector<double>& sums,
               std::vector<double>& bounds) {
    const bool rounds = table.rounds_inputs && w.dtype == DType::BF16;
    sums.assign(size_t(x.rows * w.n), 0.0);
    bounds.assign(size_t(x.rows * w.n), 0.0);
    for (int64_t r = 0; r < x.rows; ++r) {
        std::vector<double> input(size_t(w.k));
        for (int64_t i = 0; i < w.k; ++i)
            input[size_t(i)] = double(rounds ? rounded(x.row(r)[i], DType::BF16) : x.row(r)[i]);
        for (int64_t n = 0; n < w.n; ++n) {
            double sum = 0, magnitude = 0;
            for (int64_t i = 0; i < w.k; ++i) {
                const double product = input[size_t(i)] * w.matrix[size_t(n * w.k + i)];
                sum += product;
                magnitude += std::fabs(product);
            }
            sums[size_t(r * w.n + n)] = sum;
            bounds[size_t(r * w.n + n)] = 2.0 * double(w.k + 1) * 0x1p-24 * magnitude + 1e-37;
        }
    }
}

// An activation with numbers that are all different.
ActivationFunction numbered(uint32_t kind) {
    ActivationFunction f = Activation(kind);
    f.low = -0.5f;
    f.high = 0.75f;
    f.limit = 0.625f;
    f.alpha_p = 0.625f;
    f.alpha_n = 1.25f;
    f.beta = 0.5f;
    f.eps = -0.03125f;
    return f;
}

double activate(const ActivationFunction& f, double x) {
    switch (f.kind) {
        case Activation::Silu:
            return x / (1.0 + std::exp(-x));
        case Activation::Gelu:
            return 0.5 * x * (1.0 + std::erf(x * std::sqrt(0.5)));
        case Activation::GeluTanh:
            return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
        case Activation::QuickGelu:
            return x / (1.0 + std::exp(-1.702 * x));
        case Activation::Relu:
            return x > 0 ? x : 0.0;
        case Activation::Relu2:
            return x > 0 ? x * x : 0.0;
        case Activation::Tanh:
            return std::tanh(x);
        case Activation::Clamp:
            return std::min(std::max(x, double(f.low)), double(f.high));
        case Activation::Xielu:
            return f.beta * x + (x > 0 ? f.alpha_p * x * x : f.alpha_n * (std::expm1(std::min(x, double(f.eps))) - x));
        default:
            return x;
    }
}

// The slope of every activation is below 1.2, except those with a square. xIELU jumps at 0, by less than eps. Its own arithmetic has an error of a few ulp of the result, or of x if 1
// + tanh or 1 + erf cancels.
double activated_bound(const ActivationFunction& f, double bound, double x, double y) {
    const bool is_square = f.kind == Activation::Relu2 || f.kind == Activation::Xielu;
    const double slope = is_square ? 2 * std::fabs(x) + bound + 2 : 1.2;
    const double jump = f.kind == Activation::Xielu && std::fabs(x) <= bound ? -f.alpha_n * f.eps : 0.0;
    return slope * bound + jump + 8 * 0x1p-24 * (std::fabs(x) + std::fabs(y)) + 1e-37;
}

}  // namespace

TEST_TABLES(linear_is_right_around_all_tile_edges) {
    const int64_t all_rows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 17, 25, 33};
    size_t turn = 0;
    for (const DType dtype : kDtypes)
        for (const int64_t n : {1, 15, 16, 17, 33, 64, 81})
            for (const int64_t k : {1, 2, 3, 16, 31, 32, 33, 65}) {
                const Packed w(n, k, dtype, false, uint32_t(n * 100 + k));
                for (int i = 0; i < 3; ++i) {
                    turn += 1;
                    Inputs x(all_rows[turn % 16], k, false, uint32_t(turn));
                    std::vector<float> out;
                    std::vector<double> sums, bounds;
                    LinearOp op = make_op(x, w, out);
                    execute(op);
                    reference(table, x, w, sums, bounds);
                    CHECK_CLOSE(out.data(), sums.data(), bounds.data(), out.size(),
                                "m " + std::to_string(x.rows) + " n " + std::to_string(n) + " k " + std::to_string(k) +
                                    " dtype " + std::to_string(int(dtype)));
                }
            }
}

TEST_TABLES(linear_is_right_over_several_blocks_of_k) {
    for (const DType dtype : kDtypes) {
        const Packed w(40, 1123, dtype, false, 7);
        for (const int64_t rows : {1, 13, 29}) {
            Inputs x(rows, 1123, false, 8);
            std::vector<float> out;
            std::vector<double> sums, bounds;
            LinearOp op = make_op(x, w, out);
            execute(op);
            reference(table, x, w, sums, bounds);
            CHECK_CLOSE(out.data(), sums.data(), bounds.data(), out.size(), "m " + std::to_string(rows));
        }
    }
}

TEST_TABLES(a_row_is_the_same_bits_alone_in_any_batch_and_with_any_threads) {
    const int before = ThreadPool::instance().num_threads();
    for (const DType dtype : kDtypes) {
        const Packed w(83, 523, dtype, false, 9);
        Inputs x(33, 523, false, 10);
        std::vector<float> all, some;
        ThreadPool::instance().set_num_threads(1);
        LinearOp op = make_op(x, w, all);
        execute(op);
        for (const int threads : {1, 3})
            for (const int64_t rows : {1, 2, 3, 5, 7, 12, 14, 30}) {
                ThreadPool::instance().set_num_threads(threads);
                bool same = true;
                for (int64_t first = 0; first < 33; first += rows) {
                    Inputs part(std::min(rows, 33 - first), 523, false, 0);
                    for (int64_t r = 0; r < part.rows; ++r)
                        std::memcpy(part.row(r), x.row(first + r), 523 * sizeof(float));
                    LinearOp part_op = make_op(part, w, some);
                    execute(part_op);
                    same &= std::memcmp(some.data(), all.data() + first * 83, some.size() * sizeof(float)) == 0;
                }
                CHECK(same);
            }
    }
    ThreadPool::instance().set_num_threads(before);
}

TEST_TABLES(epilogues_follow_their_definition) {
    for (const bool glu : {false, true})
        for (const int64_t n_out : {1, 16, 21, 37})
            for (uint32_t kind = 0; kind < uint32_t(Activation::kCount); ++kind)
                for (const bool with_bias : {false, true}) {
                    if (Activation(kind) == Activation::ClampedSwiglu) continue;  // only for experts: tests/ops
                    const int64_t n = glu ? 2 * n_out : n_out, k = 19, rows = 3;
                    const Packed w(n, k, DType::F32, glu, kind + 1);
                    Inputs x(rows, k, false, kind + 50);
                    const std::vector<float> bias = check::heavy_tailed(size_t(n), kind + 99);
                    std::vector<float> residual = check::heavy_tailed(size_t(rows * n_out), kind + 77), out;
                    LinearOp op = make_op(x, w, out);
                    op.activation = numbered(kind);
                    op.bias = with_bias ? bias.data() : nullptr;
                    op.residual = glu ? nullptr : residual.data();
                    execute(op);

                    std::vector<double> sums, bounds, expected(out.size()), tolerance(out.size());
                    reference(table, x, w, sums, bounds);
                    for (int64_t r = 0; r < rows; ++r)
                        for (int64_t c = 0; c < n_out; ++c) {
                            const size_t gate = size_t(r * n + c), up = gate + size_t(n_out),
                                         at = size_t(r * n_out + c);
                            const double g = sums[gate] + (with_bias ? double(bias[size_t(c)]) : 0.0);
                            const double y = activate(op.activation, g);
                            const double y_bound =
                                activated_bound(op.activation, bounds[gate] + 0x1p-23 * std::fabs(g), g, y);
                            if (glu) {
                                const double u = sums[up] + (with_bias ? double(bias[size_t(n_out + c)]) : 0.0);
                                const double u_bound = bounds[up] + 0x1p-23 * std::fabs(u);
                                expected[at] = y * u;
                                tolerance[at] = y_bound * std::fabs(u) + u_bound * std::fabs(y) + y_bound * u_bound +
                                                0x1p-23 * std::fabs(y * u) + 1e-37;
                            } else {
                                expected[at] = double(residual[at]) + y;
                                tolerance[at] = y_bound + 0x1p-23 * std::fabs(expected[at]);
                            }
                        }
                    CHECK_CLOSE(out.data(), expected.data(), tolerance.data(), out.size(),
                                "activation " + std::to_string(kind) + (glu ? " glu" : "") + " n " + std::to_string(n));
                    if (!glu) {  // instead of the residual
                        std::vector<float> first = out;
                        op.out = residual.data();
                        execute(op);
                        CHECK(std::memcmp(first.data(), residual.data(), first.size() * sizeof(float)) == 0);
                    }
                }
}

TEST_TABLES(activations_of_the_whole_range) {
    std::vector<float> x;
    for (int i = -4000; i <= 4000; ++i) x.push_back(float(i) * 0.003f);
    for (const float large : {-1e18f, -90.0f, -50.0f, 50.0f, 90.0f, 1e18f}) x.push_back(large);
    for (uint32_t kind = 0; kind < uint32_t(Activation::kCount); ++kind) {
        std::vector<float> y(x.size(), check::kPoison);
        ActivationOp op = {numbered(kind), x.data(), int64_t(x.size()), 1, int64_t(x.size()), y.data(), 0, 0};
        execute(op);
        std::vector<double> expected(x.size()), tolerance(x.size());
        for (size_t i = 0; i < x.size(); ++i) {
            expected[i] = activate(op.activation, double(x[i]));
            tolerance[i] = activated_bound(op.activation, 0.0, std::fabs(x[i]) < 100 ? double(x[i]) : 0.0, expected[i]);
        }
        CHECK_CLOSE(y.data(), expected.data(), tolerance.data(), y.size(), "activation " + std::to_string(kind));
    }
}

TEST_TABLES(weights_come_back_bit_for_bit) {
    for (const DType dtype : kDtypes)
        for (const bool glu : {false, true})
            for (const int64_t n : {2, 16, 30, 34, 66})
                for (const int64_t k : {1, 2, 31, 64, 65, 130}) {
                    const Packed w(n, k, dtype, glu, uint32_t(n + k));
                    std::vector<float> wide(size_t(n * k), check::kPoison);
                    GatherOp gather = {w.memory.get(), nullptr, n, wide.data(), true, 0, nullptr, 0, 0};
                    execute(gather);
                    bool same = true;
                    for (size_t i = 0; i < wide.size(); ++i) same &= double(wide[i]) == w.matrix[i];
                    CHECK(same);
                    const std::vector<int64_t> ids = {n - 1, 0, n / 2, n - 1};
                    std::vector<float> rows(ids.size() * size_t(k), check::kPoison);
                    GatherOp some = {
                        w.memory.get(), ids.data(), int64_t(ids.size()), rows.data(), true, 0, nullptr, 0, 0};
                    execute(some);
                    for (size_t i = 0; i < ids.size(); ++i)
                        same &= std::memcmp(rows.data() + i * size_t(k), wide.data() + ids[i] * k, size_t(k) * 4) == 0;
                    CHECK(same);
                }
}

TEST_TABLES(mistakes_are_refused) {
    const Packed w(20, 8, DType::BF16, false, 1);
    float out[8];
    for (const int64_t id : {int64_t(-1), int64_t(20), INT64_MIN}) {
        GatherOp gather = {w.memory.get(), &id, 1, out, true, 0, nullptr, 0, 0};
        CHECK(check::refused([&] { execute(gather); }));
    }
    PackOp pack = {w.memory.get(), 19, 2, out, DType::F32, 8, 0, 0};
    CHECK(check::refused([&] { execute(pack); }));
    alignas(64) char not_a_weight[128] = {};
    LinearOp op = {};
    op.weight = not_a_weight;
    CHECK(check::refused([&] { execute(op); }));
    CHECK(check::refused([] { packed_bytes(0, 4, {.dtype = DType::F32}, false); }));
    CHECK(check::refused([] { packed_bytes(3, 4, {.dtype = DType::F32}, true); }));
    // A weight with another table's layout.
    Inputs x(1, 8, false, 1);
    std::vector<float> result;
    LinearOp foreign = make_op(x, w, result);
    for (const std::string& name : available_isas()) {
        select_isa(name);
        CHECK(check::refused([&] { execute(foreign); }) == (kernels().bf16_layout != table.bf16_layout));
    }
    select_isa(table.name);
}

TEST(emulated_bf16_gives_the_bits_of_the_real_instructions) {
    std::vector<float> results[2];
    int found = 0;
    for (const std::string& name : available_isas()) {
        if (name != "avx512_bf16" && name != "emulated_avx512_bf16") continue;
        const std::string before = kernels().name;
        select_isa(name);
        for (const DType dtype : kDtypes) {
            const Packed w(70, 219, dtype, true, 3);
            Inputs x(14, 219, false, 4);
            std::vector<float> out;
            LinearOp op = make_op(x, w, out);
            op.activation = Activation::Gelu;
            execute(op);
            results[found].insert(results[found].end(), out.begin(), out.end());
        }
        ++found;
        select_isa(before);
    }
    if (found == 2)
        CHECK(results[0].size() == results[1].size() &&
              std::memcmp(results[0].data(), results[1].data(), results[0].size() * 4) == 0);
}
