// The vector wrapper of every instruction set that this CPU has. Math functions are compared with double, conversions
// with every 16-bit value and every rounding case. Dot products are compared with integers, and partial loads and
// stores have poisoned neighbours.
#include <algorithm>
#include <cstring>

#include "../../csrc/isa/prelude.h"
#include "check.h"

namespace {

using namespace pace;

enum class Function { Exp, Expm1BelowZero, Tanh, Erf, Sigmoid, Sqrt, Negate, Abs, Round };

struct Probe {
    int level;
    bool emulated;
    int lanes;
    void (*apply)(Function, const float*, float*, int count);
    float (*sum)(const float*);
    float (*largest)(const float*);
    void (*to_bf16)(const float*, BF16*, int count);
    void (*to_f16)(const float*, F16*, int count);
    void (*to_int8)(const float*, int8_t*, int count);
    void (*from_bf16)(const BF16*, float*, int count);
    void (*from_f16)(const F16*, float*, int count);
    void (*from_int8)(const int8_t*, float*, int count);
    void (*dot_bytes)(const uint8_t*, const int8_t*, int32_t* sums);  // lanes * 4 bytes
    bool (*pairs)(const BF16*, const BF16*, float* sums);             // returns false if the level has none
    void (*fused)(const float* a, const float* b, float* c);          // c = a * b + c, rounded once
};

#define PACE_ISA_LEVEL 0
#define PACE_ISA_EMULATED 0
namespace probe_generic {
#include "vec_probe.inl"
}
#undef PACE_ISA_LEVEL
#undef PACE_ISA_EMULATED

#define PACE_ISA_LEVEL 4
#define PACE_ISA_EMULATED 1
namespace probe_emulated {
#include "vec_probe.inl"
}
#undef PACE_ISA_LEVEL
#undef PACE_ISA_EMULATED

#define PACE_ISA_LEVEL 1
#define PACE_ISA_EMULATED 0
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
namespace probe_avx2 {
#include "vec_probe.inl"
}
#pragma GCC pop_options
#undef PACE_ISA_LEVEL

#define PACE_ISA_LEVEL 2
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace probe_avx512 {
#include "vec_probe.inl"
}
#pragma GCC pop_options
#undef PACE_ISA_LEVEL

#define PACE_ISA_LEVEL 3
#pragma GCC push_options
#pragma GCC target("avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace probe_avx512_vnni {
#include "vec_probe.inl"
}
#pragma GCC pop_options
#undef PACE_ISA_LEVEL

#define PACE_ISA_LEVEL 4
#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace probe_avx512_bf16 {
#include "vec_probe.inl"
}
#pragma GCC pop_options

const Probe* const kProbes[] = {&probe_generic::probe, &probe_emulated::probe,    &probe_avx2::probe,
                                &probe_avx512::probe,  &probe_avx512_vnni::probe, &probe_avx512_bf16::probe};

// The probe for a table; the amx tables use the vectors of avx512_bf16.
const Probe& probe_of(const KernelTable& table) {
    for (const Probe* probe : kProbes)
        if (probe->emulated == table.emulated && probe->level == std::min(table.level, 4)) return *probe;
    throw std::logic_error("no probe");
}

// Dense values over the interesting range, with both signs, and tiny, huge and special values.
std::vector<float> sweep(float limit) {
    std::vector<float> x = {0.0f,      -0.0f,      1e-30f,    -1e-30f, 1e30f, -1e30f,
                            HUGE_VALF, -HUGE_VALF, 0x1p-126f, 88.7f,   -86.8f};
    constexpr int kPoints = 40001;
    for (int i = 0; i < kPoints; ++i) x.push_back(limit * (2.0f * float(i) / (kPoints - 1) - 1.0f));
    for (float small = 1e-8f; small < 1.0f; small *= 1.01f) x.push_back(small), x.push_back(-small);
    return x;
}

// |error| <= ulps * 2^-23 * |expected| + floor.
void check_function(const Probe& probe, Function function, double (*expected)(double), float limit, double ulps,
                    double floor, const char* name) {
    const std::vector<float> x = sweep(limit);
    std::vector<float> got(x.size(), check::kPoison);
    probe.apply(function, x.data(), got.data(), int(x.size()));
    std::vector<double> want(x.size()), tolerance(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
        want[i] = double(float(expected(double(x[i]))));  // overflows where fp32 overflows
        tolerance[i] = ulps * 0x1p-23 * (std::isfinite(want[i]) ? std::fabs(want[i]) : 0.0) + floor;
    }
    CHECK_CLOSE(got.data(), want.data(), tolerance.data(), x.size(), name);
    float result = 0.0f;
    probe.apply(function, &check::kPoison, &result, 1);
    CHECK(std::isnan(result));
}

}  // namespace

TEST_TABLES(vec_math_is_within_a_few_ulp) {
    const Probe& probe = probe_of(table);
    // exp flushes results below 2^-125; sigmoid inherits that.
    check_function(probe, Function::Exp, [](double x) { return std::exp(x); }, 100.0f, 2.0, 0x1p-125, "exp");
    check_function(
        probe, Function::Expm1BelowZero, [](double x) { return std::expm1(-std::fabs(x)); }, 40.0f, 3.0, 0.0, "expm1");
    check_function(probe, Function::Tanh, [](double x) { return std::tanh(x); }, 12.0f, 4.0, 0.0, "tanh");
    check_function(probe, Function::Erf, [](double x) { return std::erf(x); }, 5.0f, 4.0, 0.0, "erf");
    check_function(
        probe, Function::Sigmoid, [](double x) { return 1.0 / (1.0 + std::exp(-x)); }, 100.0f, 4.0, 0x1p-125,
        "sigmoid");
    check_function(probe, Function::Abs, [](double x) { return std::fabs(x); }, 10.0f, 0.0, 0.0, "abs");
    check_function(probe, Function::Negate, [](double x) { return -x; }, 10.0f, 0.0, 0.0, "negate");
}

TEST_TABLES(vec_rounds_to_even) {
    const std::vector<float> x = {0.5f, 1.5f, 2.5f, -0.5f, -1.5f, 2.4999998f, 7.0f};
    std::vector<float> got(x.size());
    probe_of(table).apply(Function::Round, x.data(), got.data(), int(x.size()));
    CHECK((got == std::vector<float>{0.0f, 2.0f, 2.0f, 0.0f, -2.0f, 2.0f, 7.0f}));
}

TEST_TABLES(vec_reductions_follow_one_tree) {
    const Probe& probe = probe_of(table);
    std::vector<float> x = check::heavy_tailed(size_t(probe.lanes), 1), tree = x;
    for (int half = probe.lanes / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) tree[i] += tree[i + half];
    CHECK(probe.sum(x.data()) == tree[0]);
    CHECK(probe.largest(x.data()) == *std::max_element(x.begin(), x.end()));
    for (float& value : x) value = -std::fabs(value) - 1.0f;
    CHECK(probe.largest(x.data()) == *std::max_element(x.begin(), x.end()));
}

TEST_TABLES(vec_widens_every_16_bit_value) {
    const Probe& probe = probe_of(table);
    std::vector<BF16> bf16(65536);
    std::vector<F16> f16(65536);
    for (int i = 0; i < 65536; ++i) bf16[i].bits = f16[i].bits = uint16_t(i);
    std::vector<float> from_bf16(65536), from_f16(65536);
    probe.from_bf16(bf16.data(), from_bf16.data(), 65536);
    probe.from_f16(f16.data(), from_f16.data(), 65536);
    int wrong = 0;
    for (int i = 0; i < 65536; ++i) {
        const int exponent = i >> 10 & 31, mantissa = i & 1023;
        const double sign = i & 0x8000 ? -1.0 : 1.0;
        const double value =
            exponent == 0 ? sign * mantissa * 0x1p-24 : sign * std::ldexp(1024.0 + mantissa, exponent - 25);
        const bool special = exponent == 31;
        wrong += special && mantissa ? !std::isnan(from_f16[i]) : from_f16[i] != (special ? sign * HUGE_VAL : value);
        wrong += float_bits(from_bf16[i]) != uint32_t(i) << 16;
    }
    CHECK(wrong == 0);
}

TEST_TABLES(vec_converts_every_byte_and_rounds_to_even) {
    const Probe& probe = probe_of(table);
    for (int offset = 0; offset < 4; ++offset) {  // whole vectors at all alignments, and tails
        std::vector<int8_t> bytes(256 + offset), back(256 + offset, 99);
        std::vector<float> floats(256 + offset, check::kPoison);
        for (int i = 0; i < 256; ++i) bytes[i + offset] = int8_t(i - 128);
        probe.from_int8(bytes.data() + offset, floats.data(), 256);
        bool right = offset == 0 || std::isnan(floats[256]);
        for (int i = 0; i < 256; ++i) right &= floats[i] == float(i - 128);
        probe.to_int8(floats.data(), back.data() + offset, 255);  // ends within a vector
        for (int i = 0; i < 255; ++i) right &= back[i + offset] == i - 128;
        CHECK(right && back[255 + offset] == 99);
    }
    const std::vector<float> x = {0.5f,    1.5f,       -0.5f,       -1.5f,       126.5f,
                                  -126.5f, 126.49999f, 0.50000006f, -2.4999998f, -0.0f};
    std::vector<int8_t> rounded(x.size());
    probe.to_int8(x.data(), rounded.data(), int(x.size()));
    CHECK((rounded == std::vector<int8_t>{0, 2, 0, -2, 126, -126, 126, 1, -2, 0}));
}

TEST_TABLES(vec_rounds_to_16_bits_as_the_definition) {
    const Probe& probe = probe_of(table);
    // Midpoints between neighbouring values, and points one fp32 step away from them.
    std::vector<float> x = {HUGE_VALF, -HUGE_VALF, check::kPoison, 3.4e38f,  65519.99f,
                            65520.0f,  1e-45f,     2e-8f,          0x1p-25f, -0.0f};
    std::mt19937 random(3);
    for (int i = 0; i < 20000; ++i) {
        const uint32_t bits = uint32_t(random());
        x.push_back(bits_float(bits));
        x.push_back(bits_float((bits & 0xffff0000u) | 0x8000u));                                  // bf16 tie
        x.push_back(to_float(F16{uint16_t(bits & 0x7bff)}) + to_float(F16{1}) * 0.5f);            // fp16 subnormal tie
        x.push_back(bits_float((float_bits(to_float(F16{uint16_t(bits & 0x7bff)})) + 0x1000u)));  // fp16 tie
        x.push_back(bits_float((float_bits(to_float(F16{uint16_t(bits & 0x7bff)})) + 0x0fffu)));
    }
    std::vector<BF16> bf16(x.size());
    std::vector<F16> f16(x.size());
    probe.to_bf16(x.data(), bf16.data(), int(x.size()));
    probe.to_f16(x.data(), f16.data(), int(x.size()));
    // 1 + 2^-11 lies between 1 and the next fp16. Bochs 2.7 rounds such ties up: there, only the other values are
    // compared.
    const float tie = 1.0f + 0x1p-11f;
    F16 rounded_tie;
    probe.to_f16(&tie, &rounded_tie, 1);
    const bool broken_ties = rounded_tie.bits == 0x3c01;
    if (broken_ties) std::printf("  note: this CPU does not round fp16 ties to even (a known error of emulators)\n");
    int wrong_bf16 = 0, wrong_f16 = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        BF16 b;
        F16 f;
        from_float(x[i], b);
        from_float(x[i], f);
        if (std::isnan(x[i])) {
            wrong_bf16 += !std::isnan(to_float(bf16[i]));
            wrong_f16 += !std::isnan(to_float(f16[i]));
        } else {
            wrong_bf16 += bf16[i].bits != b.bits;
            const bool is_tie = std::fabs(double(to_float(F16{uint16_t(f.bits + 1)})) - double(x[i])) ==
                                    std::fabs(double(to_float(f)) - double(x[i])) ||
                                std::fabs(double(to_float(F16{uint16_t(f.bits - 1)})) - double(x[i])) ==
                                    std::fabs(double(to_float(f)) - double(x[i]));
            if (!(broken_ties && is_tie)) wrong_f16 += f16[i].bits != f.bits;
        }
    }
    CHECK(wrong_bf16 == 0);
    CHECK(wrong_f16 == 0);
}

// The scalar definition itself, by distance: no value of the format is nearer, and ties go to the even value.
TEST(scalar_conversions_take_the_nearest_even_value) {
    std::mt19937 random(4);
    int wrong = 0;
    for (int i = 0; i < 200000; ++i) {
        const float x = i % 2 ? bits_float(uint32_t(random()))
                              : to_float(F16{uint16_t(random() & 0x7bff)}) + float(random() % 3) * 0x1p-25f;
        if (!std::isfinite(x)) continue;
        F16 half;
        from_float(x, half);
        const double error = std::fabs(double(to_float(half)) - double(x));
        if (std::fabs(x) >= 65520.0f) {
            wrong += !std::isinf(to_float(half));
            continue;
        }
        for (const int step : {-1, 1}) {
            const F16 neighbour = {uint16_t(half.bits + step)};
            const float other = to_float(neighbour);
            if (!std::isfinite(other) || (half.bits & 0x7fff) == 0) continue;
            const double distance = std::fabs(double(other) - double(x));
            wrong += distance < error || (distance == error && half.bits % 2 == 1);
        }
    }
    CHECK(wrong == 0);
}

TEST_TABLES(vec_partial_touches_only_its_lanes) {
    const Probe& probe = probe_of(table);
    for (int offset = 0; offset < 4; ++offset)
        for (int count = 0; count <= 2 * probe.lanes + 1; ++count) {
            std::vector<float> x(64, check::kPoison), y(64, 7.0f);
            for (int i = 0; i < count; ++i) x[offset + i] = float(i + 1);
            probe.apply(Function::Negate, x.data() + offset, y.data() + offset, count);
            bool right = true;
            for (int i = 0; i < 64; ++i) {
                const bool inside = i >= offset && i < offset + count;
                right &= y[i] == (inside ? -float(i - offset + 1) : 7.0f);
            }
            CHECK(right);
            std::vector<F16> narrow(64, F16{0x1234});
            probe.to_f16(x.data() + offset, narrow.data() + offset, count);
            right = true;
            for (int i = 0; i < 64; ++i)
                right &= (i >= offset && i < offset + count) ? to_float(narrow[i]) == float(i - offset + 1)
                                                             : narrow[i].bits == 0x1234;
            CHECK(right);
        }
}

TEST_TABLES(vec_fused_fma_rounds_once) {
    const Probe& probe = probe_of(table);
    std::mt19937 random(7);
    const auto check = [&](float a, float b, float c) {
        std::vector<float> as(size_t(probe.lanes), a), bs(as.size(), b), got(as.size(), c);
        probe.fused(as.data(), bs.data(), got.data());
        const float expected = std::fma(a, b, c);
        for (const float g : got) {
            if (float_bits(g) == float_bits(expected) || (std::isnan(g) && std::isnan(expected))) continue;
            char text[160];
            std::snprintf(text, sizeof text, "%a * %a + %a is %a, not %a", double(a), double(b), double(c), double(g),
                          double(expected));
            return check::fail(__FILE__, __LINE__, text);
        }
    };
    const auto sign = [&] { return random() % 2 ? 1.0f : -1.0f; };
    // The product is almost half a unit in the last place of c. fp64 rounds the sum to the midpoint of two fp32, so a
    // second rounding would be wrong.
    for (int round = 0; round < 2000; ++round) {
        const float near_one = float(1 + random() % 30) * 0x1p-23f,
                    c = sign() * (1.0f + float(random() % (1 << 23)) * 0x1p-23f);
        const int power = int(random() % 60) - 30;
        check(sign() * std::ldexp(1.0f + near_one, power), sign() * (1.0f - near_one), std::ldexp(c, power + 24));
        check(sign() * std::ldexp(1.0f + near_one, power), sign() * (1.0f - near_one), std::ldexp(c, power + 23));
    }
    const std::vector<float> values = check::heavy_tailed(6000, 8);
    for (size_t i = 0; i + 2 < values.size(); i += 3) check(values[i], values[i + 1], values[i + 2]);
    const float ends[] = {0.0f,
                          1.0f,
                          -3.5f,
                          0x1p-149f,
                          -0x1.fffffcp-127f,
                          0x1p-126f,
                          0x1p-75f,
                          -0x1.fffffep127f,
                          0x1p64f,
                          HUGE_VALF,
                          __builtin_nanf("")};
    for (const float a : ends)
        for (const float b : ends)
            for (const float c : ends) check(a, b, c);
}

TEST_TABLES(vec_dot_of_bytes_is_exact) {
    const Probe& probe = probe_of(table);
    std::mt19937 random(5);
    for (int round = 0; round < 200; ++round) {
        std::vector<uint8_t> a(size_t(probe.lanes) * 4);
        std::vector<int8_t> b(a.size());
        std::vector<int32_t> sums(size_t(probe.lanes)), expected(sums.size());
        for (size_t i = 0; i < a.size(); ++i) {
            a[i] = round == 0 ? 128 : uint8_t(random() % 129);  // 128 * -128 twice is the limit of 16 bits
            b[i] = round == 0 ? -128 : int8_t(random());
        }
        for (size_t i = 0; i < sums.size(); ++i) {
            expected[i] = sums[i] = int32_t(random() % 1000) - 500;
            for (size_t j = 0; j < 4; ++j) expected[i] += int32_t(a[4 * i + j]) * int32_t(b[4 * i + j]);
        }
        probe.dot_bytes(a.data(), b.data(), sums.data());
        CHECK(sums == expected);
    }
}

TEST_TABLES(vec_dot_of_pairs_adds_the_second_product_first) {
    const Probe& probe = probe_of(table);
    std::mt19937 random(6);
    for (int round = 0; round < 500; ++round) {
        std::vector<BF16> a(32), b(32);
        std::vector<float> sums = check::heavy_tailed(16, uint32_t(random())), expected = sums;
        for (size_t i = 0; i < 32; ++i) {
            from_float(float(int32_t(random())) * 0x1p-30f, a[i]);
            from_float(float(int32_t(random())) * 0x1p-30f, b[i]);
        }
        for (size_t i = 0; i < 16; ++i) {
            expected[i] = std::fmaf(to_float(a[2 * i + 1]), to_float(b[2 * i + 1]), expected[i]);
            expected[i] = std::fmaf(to_float(a[2 * i]), to_float(b[2 * i]), expected[i]);
        }
        if (!probe.pairs(a.data(), b.data(), sums.data())) return;
        CHECK(sums == expected);
    }
}
