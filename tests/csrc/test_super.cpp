// Weights in super-blocks, of five bits and in parts. Every table gives the bits of the definition in
// kernels/super_blocks.inl. Covers extreme codes and scales, and unpacked rows.
#include <algorithm>

#include "weights.h"

namespace {

using namespace pace;
using check::Inputs;
using check::Memory;
using check::multiply;
using check::zeros;

constexpr int8_t kUneven[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

struct Named {
    const char* name;  // ggml's name
    PackedFormat format;
};

PackedFormat format(Code code, int group, GroupScales scales, bool has_mins, const int8_t* levels = nullptr) {
    return {.code = code,
            .group = group,
            .has_mins = has_mins,
            .levels = levels,
            .offset = has_mins ? 0 : -1,
            .group_scales = scales};
}

const Named kKinds[] = {{"Q2_K", format(Code::U2, 16, GroupScales::NibblePairs, true)},
                        {"Q3_K", format(Code::U3, 16, GroupScales::SixBits, false)},
                        {"Q4_K", format(Code::U4, 32, GroupScales::SixBits, true)},
                        {"Q5_K", format(Code::U5, 32, GroupScales::SixBits, true)},
                        {"Q6_K", format(Code::U6, 16, GroupScales::Bytes, false)},
                        {"IQ4_XS", format(Code::U4, 32, GroupScales::SixBits, false, kUneven)}};

// A packed weight and its unpacked data. With `at_ends`, codes and scales of groups are the smallest or the largest.
struct Super {
    int64_t n, k;
    PackedFormat format;
    int bits;
    int64_t groups, supers;                     // in a row
    std::vector<uint8_t> codes;                 // [n][k]
    std::vector<int8_t> scales, mins;           // [n][groups]
    std::vector<F16> super_scales, super_mins;  // [n][supers]
    Memory memory;

    Super(int64_t n, int64_t k, const PackedFormat& f, bool at_ends, uint32_t seed, bool glu = false)
        : n(n), k(k), format(f), bits(code_bits(f.code)), groups(k / f.group), supers(k / kSuperBlock) {
        std::mt19937 random(seed);
        const auto number = [&](int low, int high) {
            return at_ends ? (random() % 2 ? low : high) : low + int(random() % uint32_t(high - low + 1));
        };
        const int most = f.group_scales == GroupScales::Bytes         ? 127
                         : f.group_scales == GroupScales::NibblePairs ? 15
                         : f.has_mins                                 ? 63
                                                                      : 31;
        for (int64_t i = 0; i < n * k; ++i) codes.push_back(uint8_t(number(0, (1 << bits) - 1)));
        for (int64_t i = 0; i < n * groups; ++i) {
            scales.push_back(int8_t(number(f.has_mins ? 0 : -most - 1, most)));
            mins.push_back(int8_t(number(0, most)));
        }
        for (int64_t i = 0; i < n * supers; ++i)
            for (std::vector<F16>* const values : {&super_scales, &super_mins}) {
                F16 half;
                from_float(float(int(random() % 2001) - 1000) * 0x1p-12f, half);
                values->push_back(half);
            }
        memory = check::empty_weight(n, k, f, glu);
        pack(memory.get(), 0);
    }

    // Packs into rows from `row` on of a weight, in pieces that cut panels.
    void pack(void* weight, int64_t row) const {
        check::pack_in_pieces(n, [&](int64_t first, int64_t rows) {
            PackSuperOp op = {weight,
                              row + first,
                              rows,
                              codes.data() + first * k,
                              k,
                              scales.data() + first * groups,
                              mins.data() + first * groups,
                              super_scales.data() + first * supers,
                              super_mins.data() + first * supers,
                              0,
                              0};
            execute(op);
        });
    }

    int level(int64_t row, int64_t column) const {
        const int code = codes[size_t(row * k + column)];
        return format.levels ? format.levels[code] : code - (format.offset >= 0 ? format.offset : 1 << (bits - 1));
    }
    int scale(int64_t row, int64_t column) const { return scales[size_t(row * groups + column / format.group)]; }
    int min(int64_t row, int64_t column) const { return mins[size_t(row * groups + column / format.group)]; }
    float super_scale(int64_t row, int64_t column) const {
        return to_float(super_scales[size_t(row * supers + column / kSuperBlock)]);
    }
    float super_min(int64_t row, int64_t column) const {
        return to_float(super_mins[size_t(row * supers + column / kSuperBlock)]);
    }
    float value(int64_t row, int64_t column) const {
        const float product = float(level(row, column)) * (float(scale(row, column)) * super_scale(row, column));
        return format.has_mins ? product + float(min(row, column)) * super_min(row, column) : product;
    }
};

// One output, as in DEFINITION of kernels/super_blocks.inl.
float defined(const float* x, const Super& w, int64_t n) {
    float sum = 0.0f;
    for (int64_t begin = 0; begin < w.k; begin += 128) {
        float largest = 0.0f;
        for (int64_t k = begin; k < begin + 128; ++k) largest = std::max(largest, std::fabs(x[k]));
        const float scale = largest / 127.0f;
        int32_t total = 0, total_of_mins = 0;
        for (int64_t k = begin; k < begin + 128 && scale > 0; ++k) {
            const int32_t code = int32_t(std::nearbyint(std::min(127.0f, std::max(-127.0f, x[k] / scale))));
            total += w.scale(n, k) * w.level(n, k) * code;
            total_of_mins += w.min(n, k) * code;
        }
        sum = std::fma(float(total), w.super_scale(n, begin) * scale, sum);
        if (w.format.has_mins) sum = std::fma(float(total_of_mins), w.super_min(n, begin) * scale, sum);
    }
    return sum;
}

void check_definition(Inputs& x, const Super& w, const std::string& what) {
    const std::vector<float> got = multiply(x, w.memory.get(), w.n);
    bool same = true;
    for (int64_t r = 0; r < x.rows; ++r)
        for (int64_t n = 0; n < w.n; ++n)
            same &= float_bits(got[size_t(r * w.n + n)]) == float_bits(defined(x.row(r), w, n));
    if (!same)
        check::fail(__FILE__, __LINE__,
                    what + " m " + std::to_string(x.rows) + " n " + std::to_string(w.n) + " k " + std::to_string(w.k));
}

}  // namespace

TEST_TABLES(products_of_super_blocks_have_the_bits_of_their_definition) {
    const int64_t all_rows[] = {1, 2, 3, 4, 5, 8, 9, 13, 19};
    size_t turn = 0;
    for (const Named& kind : kKinds)
        for (const int64_t n : {1, 16, 50})
            for (const int64_t k : {256, 512, 768, 1280})
                for (const bool at_ends : {false, true}) {
                    turn += 1;
                    const Super w(n, k, kind.format, at_ends, uint32_t(turn));
                    Inputs x(all_rows[turn % 9], k, at_ends, uint32_t(turn));
                    check_definition(x, w, kind.name);
                }
}

// Every sum is as large as possible: all codes, all scales and all inputs are the largest.
TEST_TABLES(sums_of_super_blocks_do_not_overflow) {
    for (const Named& kind : kKinds)
        for (const bool least : {false, true})
            for (const int64_t rows : {1, 11}) {
                Super w(33, 512, kind.format, true, 1);
                std::fill(w.codes.begin(), w.codes.end(), uint8_t(least ? 0 : (1 << w.bits) - 1));
                std::fill(w.scales.begin(), w.scales.end(),
                          least ? *std::min_element(w.scales.begin(), w.scales.end())
                                : *std::max_element(w.scales.begin(), w.scales.end()));
                std::fill(w.mins.begin(), w.mins.end(), *std::max_element(w.mins.begin(), w.mins.end()));
                w.pack(w.memory.get(), 0);
                Inputs x(rows, 512, true, 2);
                check_definition(x, w, kind.name);
            }
}

TEST_TABLES(inputs_of_super_blocks_that_are_not_finite_spoil_their_row) {
    for (const Named& kind : kKinds)
        for (const int64_t rows : {4, 12}) {
            const Super w(20, 512, kind.format, false, 3);
            Inputs x(rows, 512, false, 4);
            const std::vector<float> before = multiply(x, w.memory.get(), 20);
            x.row(0)[300] = __builtin_nanf("");
            x.row(1)[511] = HUGE_VALF;
            std::fill_n(x.row(2), 512, 0.0f);
            const std::vector<float> got = multiply(x, w.memory.get(), 20);
            bool right = true;
            for (size_t n = 0; n < 20; ++n)
                right &= std::isnan(got[n]) && std::isnan(got[20 + n]) && got[40 + n] == 0.0f &&
                         got[60 + n] == before[60 + n];
            CHECK(right);
        }
}

TEST(rows_of_super_blocks_come_back_as_they_are) {
    for (const Named& kind : kKinds)
        for (const bool at_ends : {false, true})
            for (const bool glu : {false, true}) {
                const Super w(34, 512, kind.format, at_ends, 5, glu);
                CHECK(check::rows_come_back(w.memory.get(), 34, 512,
                                            [&](int64_t r, int64_t j) { return w.value(r, j); }));
            }
}

TEST(super_blocks_take_the_bytes_of_ggml) {
    const int64_t bytes[] = {84, 110, 144, 176, 210, 136};
    for (size_t i = 0; i < 6; ++i)
        for (const int64_t k : {256, 512, 4096}) {
            const int64_t got = packed_bytes(32, k, kKinds[i].format, false);
            CHECK(got >= 32 * k / 256 * bytes[i] && got <= 32 * k / 256 * bytes[i] + 64 + 2 * 32);
        }
}

// Each part of a weight gives the same outputs as the part alone; few and many rows, one and many chunks.
TEST_TABLES(parts_of_a_weight_give_what_they_give_alone) {
    const int64_t k = 512;
    const Super first(300, k, kKinds[2].format, false, 1), second(70, k, kKinds[4].format, false, 2),
        third(16, k, kKinds[3].format, false, 3);
    const PackedFormat floats = {.dtype = DType::BF16};
    const std::vector<float> dense = check::heavy_tailed(size_t(20 * k), 9);
    const std::vector<PackedPart> parts = {{300, first.format}, {20, floats}, {70, second.format}, {16, third.format}};
    const Memory whole = zeros(packed_bytes(parts, k, false)), alone = zeros(packed_bytes(20, k, floats, false));
    init_packed(whole.get(), parts, k, false);
    init_packed(alone.get(), 20, k, floats, false);
    first.pack(whole.get(), 0);
    second.pack(whole.get(), 320);
    third.pack(whole.get(), 390);
    PackOp pack = {whole.get(), 300, 20, dense.data(), DType::F32, k, 0, 0};
    execute(pack);
    pack = {alone.get(), 0, 20, dense.data(), DType::F32, k, 0, 0};
    execute(pack);
    const std::vector<float> bias = check::heavy_tailed(406, 5);
    for (const int64_t rows : {1, 3, 9, 40, 200}) {
        Inputs x(rows, k, false, uint32_t(rows));
        const std::vector<float> got = multiply(x, whole.get(), 406, bias.data());
        int64_t column = 0;
        bool same = true;
        const auto compare = [&](const void* weight, int64_t n) {
            const std::vector<float> expected = multiply(x, weight, n, bias.data() + column);
            for (int64_t r = 0; r < rows; ++r)
                same &= std::memcmp(&expected[size_t(r * n)], &got[size_t(r * 406 + column)], size_t(n) * 4) == 0;
            column += n;
        };
        compare(first.memory.get(), 300);
        compare(alone.get(), 20);
        compare(second.memory.get(), 70);
        compare(third.memory.get(), 16);
        if (!same) check::fail(__FILE__, __LINE__, "rows " + std::to_string(rows));
    }
    std::vector<float> values(size_t(2 * k));
    const int64_t ids[] = {319, 391};
    GatherOp gather = {whole.get(), ids, 2, values.data(), true, 0, nullptr, 0, 0};
    execute(gather);
    bool same = true;
    for (int64_t j = 0; j < k; ++j) {
        BF16 rounded;
        from_float(dense[size_t(19 * k + j)], rounded);
        same &= values[size_t(j)] == to_float(rounded) && values[size_t(k + j)] == third.value(1, j);
    }
    CHECK(same);
}

TEST_TABLES(gate_and_up_of_two_kinds_are_multiplied_as_one_weight) {
    const int64_t k = 512;
    for (const int64_t half : {16, 40, 400}) {
        const Super gate(half, k, kKinds[2].format, false, 1), up(half, k, kKinds[4].format, false, 2);
        const std::vector<PackedPart> parts = {{half, gate.format}, {half, up.format}};
        const Memory whole = zeros(packed_bytes(parts, k, true));
        init_packed(whole.get(), parts, k, true);
        gate.pack(whole.get(), 0);
        up.pack(whole.get(), half);
        for (const int64_t rows : {1, 5, 30}) {
            Inputs x(rows, k, false, uint32_t(rows));
            const std::vector<float> of_gate = multiply(x, gate.memory.get(), half),
                                     of_up = multiply(x, up.memory.get(), half), got = multiply(x, whole.get(), half);
            bool same = true;
            for (size_t i = 0; i < got.size(); ++i) same &= got[i] == of_gate[i] * of_up[i];
            CHECK(same);
        }
    }
}

TEST(mistakes_about_super_blocks_and_parts_are_refused) {
    const PackedFormat q4 = kKinds[2].format, q6 = kKinds[4].format;
    PackedFormat by_16 = q4, of_seven = q6, with_mins = q6;
    by_16.group = 16;
    of_seven.code = Code::I8;
    with_mins.has_mins = true;
    CHECK(check::refused([&] { packed_bytes(16, 256, by_16, false); }));
    CHECK(check::refused([&] { packed_bytes(16, 256, of_seven, false); }));
    CHECK(check::refused([&] { packed_bytes(16, 256, with_mins, false); }));
    CHECK(check::refused([&] { packed_bytes(16, 128, q4, false); }));
    CHECK(check::refused([&] { packed_bytes(16, 256, {.code = Code::U3, .group = 16}, false); }));
    CHECK(check::refused([&] { packed_bytes(16, 256, {.code = Code::U5, .group = 16}, false); }));
    CHECK(check::refused([&] { packed_bytes(16, 256, {.code = Code::U2, .group = 16}, false); }));
    CHECK(check::refused([&] { packed_bytes(16, 256, {.code = Code::U2, .token_inputs = true}, false); }));
    CHECK(check::refused(
        [&] { packed_bytes(16, kMaxTokenInputs + 1, {.code = Code::U2, .offset = 1, .token_inputs = true}, false); }));
    CHECK(check::refused([&] { packed_bytes({{16, q4}}, 256, false); }));
    CHECK(check::refused([&] { packed_bytes({{16, q4}, {32, q6}}, 256, true); }));
    const Super w(16, 256, q4, false, 1);
    const std::vector<PackedPart> parts = {{16, q4}, {16, q6}};
    const Memory whole = zeros(packed_bytes(parts, 256, false));
    init_packed(whole.get(), parts, 256, false);
    const auto pack_at = [&](int64_t row) {
        PackSuperOp op = {
            whole.get(),         row, 16, w.codes.data(), 256, w.scales.data(), w.mins.data(), w.super_scales.data(),
            w.super_mins.data(), 0,   0};
        execute(op);
    };
    CHECK(check::refused([&] { pack_at(8); }));   // spans two parts
    CHECK(check::refused([&] { pack_at(24); }));  // beyond the weight
    PackQuantizedOp codes = {w.memory.get(), 0, 1, w.codes.data(), 256, nullptr, nullptr, false, 0, 0};
    CHECK(check::refused([&] { execute(codes); }));
}
