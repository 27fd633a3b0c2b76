// Quantised weights: every table gives the bits of the definitions in kernels/linear_quantized.inl and
// quantize_input.inl. Covers sizes around all edges, extreme codes, and misaligned rows with NaN between them.
#include <algorithm>
#include <atomic>

#include "weights.h"

namespace {

using namespace pace;
using check::Inputs;

constexpr int8_t kUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kNear[16] = {16, 12, 8, 6, 4, 3, 2, 1, 0, -1, -2, -3, -4, -6, -12, -16};
constexpr int8_t kNotNear[16] = {17, 12, 8, 6, 4, 3, 2, 1, 0, -1, -2, -3, -4, -6, -12, -16};

// A packed weight and its unpacked data. Scales and minima are small integers times 2^-10, which packing represents
// exactly.
struct Quantized {
    int64_t n, k;
    PackedFormat format;
    int64_t groups;
    std::vector<uint8_t> codes;       // [n][k]
    std::vector<float> scales, mins;  // [n][groups]
    check::Memory memory;

    // With `at_ends`: one row of the smallest codes, one of the largest, then both at random.
    Quantized(int64_t n, int64_t k, PackedFormat f, bool at_ends, uint32_t seed, bool glu = false)
        : n(n),
          k(k),
          format(f),
          groups(f.group ? divide_up(k, f.group) : 1),
          codes(size_t(n * k)),
          scales(size_t(n * groups)),
          mins(size_t(n * groups)) {
        std::mt19937 random(seed);
        for (size_t i = 0; i < codes.size(); ++i) {
            uint8_t& code = codes[i];
            code = uint8_t(random());
            const int64_t row = int64_t(i) / k;
            const bool largest = row < 2 ? row == 1 : random() % 2;
            if (is_small()) code &= uint8_t(most());
            if (f.code == Code::F8 && (code & 0x7f) == 0x7f) code = 0x3c;
            if (at_ends && f.code == Code::I8) code = largest ? 0x7f : 0x80;
            if (at_ends && is_small()) code = largest ? uint8_t(most()) : 0;
        }
        for (float& scale : scales) scale = float(1 + random() % 1000) * 0x1p-10f;
        for (float& min : mins) min = (float(random() % 2001) - 1000.0f) * 0x1p-10f;
        memory = check::empty_weight(n, k, f, glu);
        pack();
    }

    // Call it again after changing codes or scales.
    void pack() {
        check::pack_in_pieces(n, [&](int64_t first, int64_t rows) {
            PackQuantizedOp op = {memory.get(),
                                  first,
                                  rows,
                                  codes.data() + first * k,
                                  k,
                                  scales.data() + first * groups,
                                  mins.data() + first * groups,
                                  false,
                                  0,
                                  0};
            execute(op);
        });
    }

    int64_t group() const { return format.group ? format.group : k; }
    int level(int64_t row, int64_t column) const {
        const uint8_t code = codes[size_t(row * k + column)];
        if (format.code == Code::I8) return int8_t(code);
        if (format.code == Code::U1) return 2 * code - 1;
        return format.levels ? format.levels[code] : int(code) - (format.offset >= 0 ? format.offset : most() / 2 + 1);
    }
    // The largest code, for codes that start at zero.
    int most() const { return (1 << code_bits(format.code)) - 1; }
    bool is_small() const { return code_bits(format.code) < 8; }
    float value(int64_t row, int64_t column) const {  // before scaling
        return format.code == Code::F8 ? float8_to_float(codes[size_t(row * k + column)]) : float(level(row, column));
    }
    float scale(int64_t row, int64_t column) const { return scales[size_t(row * groups + column / group())]; }
    float min(int64_t row, int64_t column) const {
        return format.has_mins ? mins[size_t(row * groups + column / group())] : 0.0f;
    }
};

std::vector<float> multiply(Inputs& x, const Quantized& w, const int32_t* order = nullptr) {
    return check::multiply(x, w.memory.get(), w.n, nullptr, order);
}

// A row of inputs in the column order of the codes, quantised as in DEFINITION of kernels/quantize_input.inl.
struct InputRow {
    int64_t group = 128;
    std::vector<int32_t> codes;
    std::vector<float> scales;  // of the groups

    InputRow(const float* x, const Quantized& w) : codes(size_t(w.k)) {
        while (w.format.group % group) group /= 2;
        if (w.format.token_inputs) {
            round_token(x);
            return;
        }
        for (int64_t begin = 0; begin < w.k; begin += group) {
            const int64_t end = std::min(w.k, begin + group);
            float largest = 0.0f;
            for (int64_t k = begin; k < end; ++k) largest = std::max(largest, std::fabs(x[k]));
            const float scale = largest / 127.0f;
            for (int64_t k = begin; k < end && scale > 0; ++k)
                codes[size_t(k)] = int32_t(std::nearbyint(std::min(127.0f, std::max(-127.0f, x[k] / scale))));
            scales.push_back(scale);
        }
    }

    // One scale for the whole row.
    void round_token(const float* x) {
        float largest = 1e-5f;
        for (size_t k = 0; k < codes.size(); ++k) largest = std::max(largest, std::fabs(x[k]));
        const float factor = 1.0f / largest * 127.0f;
        for (size_t k = 0; k < codes.size(); ++k) codes[k] = int32_t(std::nearbyint(x[k] * factor));
        scales.push_back(1.0f / factor);
    }
};

// One output, as in DEFINITION of kernels/linear_quantized.inl.
float defined(const InputRow& x, const Quantized& w, int64_t n) {
    if (w.format.token_inputs) {
        int32_t sum = 0;
        for (int64_t k = 0; k < w.k; ++k) sum += x.codes[size_t(k)] * w.level(n, k);
        return float(sum) * (w.scale(n, 0) * x.scales[0]);
    }
    float sum = 0.0f;
    for (int64_t begin = 0, g = 0; begin < w.k; begin += x.group, ++g) {
        int32_t dot = 0, codes = 0;
        for (int64_t k = begin; k < std::min(w.k, begin + x.group); ++k) {
            dot += x.codes[size_t(k)] * w.level(n, k);
            codes += x.codes[size_t(k)];
        }
        const float scale = x.scales[size_t(g)];
        sum = std::fma(float(dot), w.scale(n, begin) * scale, sum);
        if (w.format.has_mins) sum = std::fma(w.min(n, begin) * scale, float(codes), sum);
    }
    return sum;
}

void check_definition(Inputs& x, const Quantized& w, const std::string& what) {
    const std::vector<float> got = multiply(x, w);
    bool same = true;
    for (int64_t r = 0; r < x.rows; ++r) {
        const InputRow row(x.row(r), w);
        for (int64_t n = 0; n < w.n; ++n)
            same &= float_bits(got[size_t(r * w.n + n)]) == float_bits(defined(row, w, n));
    }
    if (!same)
        check::fail(__FILE__, __LINE__,
                    what + " m " + std::to_string(x.rows) + " n " + std::to_string(w.n) + " k " + std::to_string(w.k));
}

struct Named {
    const char* name;
    PackedFormat format;
};
const PackedFormat kI8 = {.code = Code::I8}, kU4 = {.code = Code::U4},
                   kUnevenU4 = {.code = Code::U4, .levels = kUneven}, kNearU4 = {.code = Code::U4, .levels = kNear},
                   kNotNearU4 = {.code = Code::U4, .levels = kNotNear};

Named with(const char* name, PackedFormat format, int64_t group, bool mins = false) {
    format.group = group;
    format.has_mins = mins;
    return {name, format};
}

std::vector<Named> integer_formats() {
    return {with("int8", kI8, 0),
            with("int8 by 16 with minima", kI8, 16, true),
            with("int8 by 32", kI8, 32),
            with("int8 by 128", kI8, 128),
            with("uint4", kU4, 0),
            with("uint4 by 16", kU4, 16),
            with("uint4 by 32", kU4, 32),
            with("uint4 by 48 with minima", kU4, 48, true),
            with("uint4 by 256", kU4, 256),
            with("uint4 from zero by 32 with minima", {.code = Code::U4, .offset = 0}, 32, true),
            with("uint5 by 32", {.code = Code::U5}, 32),
            with("uint5 by 96", {.code = Code::U5}, 96),
            with("uint5 from zero by 32 with minima", {.code = Code::U5, .offset = 0}, 32, true),
            with("uint1", {.code = Code::U1}, 0),
            with("uint1 by 32", {.code = Code::U1}, 32),
            with("uint1 by 128", {.code = Code::U1}, 128),
            with("uint2", {.code = Code::U2, .offset = 1}, 0),
            with("uint2 by 64", {.code = Code::U2, .offset = 1}, 64),
            with("uint2 by 256", {.code = Code::U2, .offset = 1}, 256),
            with("uint2 from zero by 96 with minima", {.code = Code::U2, .offset = 0}, 96, true),
            with("uint2 of tokens", {.code = Code::U2, .offset = 1, .token_inputs = true}, 0),
            with("levels", kUnevenU4, 0),
            with("levels by 32", kUnevenU4, 32),
            with("near levels", kNearU4, 0),
            with("near levels by 16 with minima", kNearU4, 16, true),
            with("near levels by 32", kNearU4, 32),
            with("levels not quite near by 32", kNotNearU4, 32)};
}

}  // namespace

TEST_TABLES(quantized_products_have_the_bits_of_their_definition) {
    const int64_t all_rows[] = {1, 2, 3, 4, 5, 6, 7, 13, 17, 19, 26};
    size_t turn = 0;
    for (const Named& kind : integer_formats())
        for (const int64_t n : {1, 16, 33, 50})
            for (const int64_t k : {1, 15, 31, 33, 129, 300}) {
                turn += 1;
                const bool at_ends = turn % 4 == 0;
                const Quantized w(n, k, kind.format, at_ends, uint32_t(turn));
                Inputs x(all_rows[turn % 11], k, at_ends, uint32_t(turn));
                check_definition(x, w, kind.name);
            }
}

TEST_TABLES(quantized_products_over_several_blocks_of_k) {
    for (const Named& kind : integer_formats()) {
        const Quantized w(40, 2100, kind.format, false, 7);  // an odd panel at the end
        Inputs x(26, 2100, false, 8);
        check_definition(x, w, kind.name);
    }
}

TEST_TABLES(quantized_products_of_many_panels_and_rows) {
    for (const Named& kind : integer_formats())
        for (const int64_t m : {1, 2, 17, 40}) {
            const Quantized w(163, 49, kind.format, m == 2, uint32_t(m));
            Inputs x(m, 49, m == 2, uint32_t(m));
            check_definition(x, w, kind.name);
        }
}

TEST_TABLES(quantized_products_with_extreme_scales_and_groups_of_zeros) {
    struct Powers {
        int weights, inputs;
    };
    for (const Named& kind : integer_formats())
        for (const Powers power : {Powers{-139, 30}, Powers{-125, 120}, Powers{110, -135}, Powers{117, -30},
                                   Powers{0, -146}, Powers{-100, -45}}) {
            Quantized w(37, 300, kind.format, false, 11);
            for (std::vector<float>* const values : {&w.scales, &w.mins})
                for (size_t i = 0; i < values->size(); ++i)
                    (*values)[i] = i % 5 == 3 ? 0.0f : std::ldexp((*values)[i], power.weights);
            w.pack();
            Inputs x(power.weights > 0 ? 26 : 8, 300, false, 12);
            for (int64_t r = 0; r < x.rows; ++r)
                for (int64_t i = 0; i < x.k; ++i)
                    x.row(r)[i] = (i / 16 + r) % 7 < 2 ? 0.0f : std::ldexp(x.row(r)[i], power.inputs);
            check_definition(x, w,
                             std::string(kind.name) + " times 2^" + std::to_string(power.weights) + ", inputs 2^" +
                                 std::to_string(power.inputs));
        }
}

TEST_TABLES(every_float8_code_is_multiplied_exactly) {
    const int64_t n = 21, k = 256;
    for (const int64_t group : {0, 16})
        for (const int power : {0, 118, -117, -139}) {
            PackedFormat format = {.code = Code::F8};
            format.group = group;
            Quantized w(n, k, format, false, 1);
            for (int64_t r = 0; r < n; ++r)
                for (int64_t i = 0; i < k; ++i) {
                    const uint8_t code = uint8_t(i + 37 * r);
                    w.codes[size_t(r * k + i)] = (code & 0x7f) == 0x7f ? 0x80 : code;  // each row has two NaN
                }
            for (size_t i = 0; i < w.scales.size(); ++i) w.scales[i] = std::ldexp(float(1 + i % 2), power);
            w.codes[size_t(3 * k + 100)] = 0x7f;
            w.codes[size_t(17 * k + 255)] = 0xff;
            w.pack();
            // Rows of the unit matrix select one column each: all of them at once, and some alone.
            Inputs all(k, k, false, 1);
            for (int64_t i = 0; i < k; ++i)
                for (int64_t j = 0; j < k; ++j) all.row(i)[j] = i == j ? 1.0f : 0.0f;
            const std::vector<float> of_all = multiply(all, w);
            bool right = true;
            for (int64_t i = 0; i < k; ++i) {
                std::vector<float> got(of_all.begin() + i * n, of_all.begin() + (i + 1) * n);
                if (i % 32 == 7) {
                    Inputs one(1, k, false, 1);
                    std::memcpy(one.row(0), all.row(i), size_t(k) * sizeof(float));
                    const std::vector<float> alone = multiply(one, w);
                    right &= std::memcmp(alone.data(), got.data(), size_t(n) * sizeof(float)) == 0;
                }
                for (int64_t r = 0; r < n; ++r) {
                    const bool spoilt = r == 3 || r == 17;
                    right &= spoilt ? std::isnan(got[size_t(r)]) : got[size_t(r)] == w.value(r, i) * w.scale(r, i);
                }
            }
            if (!right)
                check::fail(__FILE__, __LINE__,
                            "group " + std::to_string(group) + ", scales around 2^" + std::to_string(power));
        }
}

TEST_TABLES(float8_products_are_within_the_bound_of_their_sums) {
    size_t turn = 0;
    for (const int64_t group : {0, 16, 128})
        for (const int64_t n : {1, 33, 70})
            for (const int64_t k : {1, 15, 33, 300}) {
                PackedFormat format = {.code = Code::F8};
                format.group = group;
                const int64_t rows[] = {1, 3, 13, 26};
                const Quantized w(n, k, format, false, uint32_t(++turn));
                Inputs x(rows[turn % 4], k, false, uint32_t(turn));
                const std::vector<float> got = multiply(x, w);
                std::vector<double> expected(got.size()), bounds(got.size());
                for (int64_t r = 0; r < x.rows; ++r)
                    for (int64_t c = 0; c < n; ++c) {
                        double sum = 0, magnitude = 0;
                        for (int64_t i = 0; i < k; ++i) {
                            const double product = double(x.row(r)[i]) * double(w.value(c, i) * w.scale(c, i));
                            sum += product;
                            magnitude += std::fabs(product);
                        }
                        expected[size_t(r * n + c)] = sum;
                        bounds[size_t(r * n + c)] = 2.0 * double(k + 1) * 0x1p-24 * magnitude + 1e-37;
                    }
                CHECK_CLOSE(got.data(), expected.data(), bounds.data(), got.size(),
                            "group " + std::to_string(group) + " k " + std::to_string(k));
            }
}

TEST_TABLES(quantized_rows_come_back_in_the_order_of_the_input) {
    std::vector<Named> kinds = integer_formats();
    kinds.push_back(with("float8 by 32", {.code = Code::F8}, 32));
    for (const Named& kind : kinds)
        for (const bool glu : {false, true}) {
            const Quantized w(34, 130, kind.format, false, 5, glu);
            CHECK(check::rows_come_back(w.memory.get(), 34, 130, [&](int64_t r, int64_t j) {
                return w.value(r, j) * w.scale(r, j) + w.min(r, j);
            }));
            if (glu) continue;
            const std::vector<int32_t> order = check::some_order(130);
            // x and columns in another order give the same result as both in the original order.
            Inputs x(5, 130, false, 6), moved(5, 130, false, 6);
            for (int64_t r = 0; r < 5; ++r)
                for (int64_t j = 0; j < 130; ++j) moved.row(r)[order[size_t(j)]] = x.row(r)[j];
            const std::vector<float> expected = multiply(x, w), got = multiply(moved, w, order.data());
            CHECK(std::memcmp(expected.data(), got.data(), got.size() * sizeof(float)) == 0);
        }
}

TEST_TABLES(inputs_that_are_not_finite_or_tiny_follow_their_definition) {
    const Quantized w(20, 70, with("", kU4, 32, true).format, false, 3);
    Inputs x(6, 70, false, 4);
    const std::vector<float> before = multiply(x, w);
    x.row(0)[3] = __builtin_nanf("");
    x.row(1)[69] = HUGE_VALF;
    std::fill_n(x.row(2), 70, 0.0f);
    std::fill_n(x.row(3), 70, 1e-44f);
    std::fill_n(x.row(4), 70, 3e38f);
    const std::vector<float> got = multiply(x, w);
    const std::vector<float> large(70, 3e38f);
    const InputRow of_large(large.data(), w);
    bool right = true;
    for (int64_t n = 0; n < 20; ++n) {
        right &= std::isnan(got[size_t(n)]) && std::isnan(got[size_t(20 + n)]) && got[size_t(40 + n)] == 0.0f;
        right &= std::isfinite(got[size_t(60 + n)]) && got[size_t(100 + n)] == before[size_t(100 + n)];
        right &= float_bits(got[size_t(80 + n)]) == float_bits(defined(of_large, w, n));
    }
    CHECK(right);
}

// Scales are stored as F16 times a power of two for the row; 65520 and more would round to infinity.
TEST(scales_that_are_no_fp16_are_rounded) {
    for (const int power : {-140, -20, 0, 100})
        for (const float scale : {65504.0f, 65519.0f, 65520.0f, 65535.0f, 65537.0f, 40000.0f}) {
            Quantized w(17, 64, with("", kI8, 32).format, false, 1);
            std::fill(w.codes.begin(), w.codes.end(), uint8_t(1));
            for (size_t i = 0; i < w.scales.size(); ++i) w.scales[i] = std::ldexp(i % 2 ? scale : -1.0f, power);
            w.pack();
            std::vector<float> row(64, check::kPoison);
            const int64_t last = 16;
            GatherOp gather = {w.memory.get(), &last, 1, row.data(), true, 0, nullptr, 0, 0};
            execute(gather);
            CHECK(row[0] == std::ldexp(-1.0f, power));
            CHECK(std::fabs(row[63] - w.scales[1]) <= w.scales[1] * 0x1p-11f + 0x1p-149f);
        }
}

// Codes and scales of rows, by the definition of int8. A vector's unused lanes at the end of a row must not be written.
TEST_TABLES(rows_are_quantized_within_their_bounds) {
    for (const int64_t k : {1, 15, 16, 17, 64, 100}) {
        const int64_t rows = 700;
        std::vector<float> values = check::heavy_tailed(size_t(rows * k), 7);
        std::vector<float> scales(size_t(rows) + 1, 3.0f);
        std::vector<uint8_t> codes(size_t(rows * k) + 1, 99);
        std::atomic<bool> all_finite{true};
        QuantizeRowsOp op = {};
        op.row.quantizer = Quantizer::Int8;
        op.row.source = values.data();
        op.row.k = op.row.group = k;
        op.row.codes = codes.data();
        op.row.scales = scales.data();
        op.rows = rows;
        op.source_stride = k;
        op.all_finite = &all_finite;
        execute(op);
        bool right = all_finite && scales.back() == 3.0f && codes.back() == 99;
        for (int64_t r = 0; r < rows; ++r) {
            float largest = 0.0f;
            for (int64_t i = 0; i < k; ++i) largest = std::max(largest, std::fabs(values[size_t(r * k + i)]));
            right &= scales[size_t(r)] == largest / 127.0f;
            for (int64_t i = 0; i < k; ++i) {
                const float code =
                    largest == 0.0f ? 0.0f : std::nearbyint(values[size_t(r * k + i)] / largest * 127.0f);
                right &= float(int8_t(codes[size_t(r * k + i)])) == code;
            }
        }
        CHECK(right);
        // The same as 4-bit codes in pairs; the last byte of an odd row has zeros in its high bits.
        std::vector<uint8_t> pairs(size_t(rows * divide_up(k, 2)) + 1, 99);
        op.row.quantizer = Quantizer::Int4;
        op.row.codes = pairs.data();
        op.nibbles = true;
        execute(op);
        CHECK(pairs.back() == 99 && (k % 2 == 0 || pairs[size_t(k / 2)] < 16));
        values.back() = HUGE_VALF;
        execute(op);
        CHECK(!all_finite);
    }
}

TEST(mistakes_about_quantized_weights_are_refused) {
    const Quantized w(20, 32, kI8, false, 1);
    float source[32] = {};
    PackOp dense = {w.memory.get(), 0, 1, source, DType::F32, 32, 0, 0};
    CHECK(check::refused([&] { execute(dense); }));
    PackQuantizedOp outside = {w.memory.get(), 19, 2, w.codes.data(), 32, w.scales.data(), nullptr, false, 0, 0};
    CHECK(check::refused([&] { execute(outside); }));
    PackQuantizedOp pairs_of_bytes = {w.memory.get(), 0, 2, w.codes.data(), 32, w.scales.data(), nullptr, true, 0, 0};
    CHECK(check::refused([&] { execute(pairs_of_bytes); }));
    CHECK(check::refused([&] { packed_bytes(4, 32, with("", kI8, 24).format, false); }));
}
