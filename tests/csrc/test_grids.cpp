// Weights that are points of grids. Every table gives the bits of the definition in kernels/super_blocks.inl, from blocks
// of any bytes. Covers unpacked rows, and points and levels at the ends.
#include <algorithm>

#include "pace/grids.h"
#include "weights.h"

namespace {

using namespace pace;
using check::Inputs;

struct Kind {
    const char* name;
    int number;  // ggml's
    Code code;
};
const Kind kKinds[] = {{"IQ1_S", 19, Code::IQ1S},   {"IQ1_M", 29, Code::IQ1M}, {"IQ2_XXS", 16, Code::IQ2XXS},
                       {"IQ2_XS", 17, Code::IQ2XS}, {"IQ2_S", 22, Code::IQ2S}, {"IQ3_XXS", 18, Code::IQ3XXS},
                       {"IQ3_S", 21, Code::IQ3S}};

PackedFormat format_of(Code code) { return {.code = code, .group = grid_type(code).group}; }

// A weight from blocks of random bytes with ordinary scales, and its unpacked data. `fill` replaces the random bytes.
struct Grid {
    int64_t n, k, groups, row_bytes;
    Kind kind;
    std::vector<uint8_t> blocks, codes;
    std::vector<int8_t> numbers;
    std::vector<F16> scales;
    check::Memory memory;

    Grid(const Kind& kind, int64_t n, int64_t k, uint32_t seed, bool glu = false, int fill = -1)
        : n(n),
          k(k),
          groups(k / grid_type(kind.code).group),
          row_bytes(k / 256 * grid_block_bytes(kind.code)),
          kind(kind) {
        std::mt19937 random(seed);
        for (int64_t i = 0; i < n * row_bytes; ++i) blocks.push_back(uint8_t(fill >= 0 ? fill : int(random() & 255)));
        for (int64_t at = 0; at < n * row_bytes; at += grid_block_bytes(kind.code)) {
            F16 scale;
            from_float(float(int(random() % 2001) - 1000) * 0x1p-12f, scale);
            uint8_t* const block = blocks.data() + at;
            if (kind.code != Code::IQ1M) std::memcpy(block, &scale, sizeof scale);
            for (int i = 0; kind.code == Code::IQ1M && i < 4; ++i)
                block[49 + 2 * i] = uint8_t((block[49 + 2 * i] & 15) | (scale.bits >> 4 * i & 15) << 4);
        }
        codes.resize(size_t(n * k));
        numbers.resize(size_t(n * groups));
        scales.resize(size_t(n * k / 256));
        UnpackBlocksOp unpack = {};
        unpack.source = {kind.number, blocks.data(), row_bytes};
        unpack.rows = n, unpack.k = k;
        unpack.out = {codes.data(), nullptr, nullptr, numbers.data(), nullptr, scales.data(), nullptr};
        execute(unpack);
        memory = check::empty_weight(n, k, format_of(kind.code), glu);
        std::atomic<bool> finite = true;
        check::pack_in_pieces(n, [&](int64_t first, int64_t rows) {
            PackBlocksOp pack = {};
            pack.weight = memory.get();
            pack.row = first, pack.rows = rows;
            pack.source = {kind.number, blocks.data() + first * row_bytes, row_bytes};
            pack.all_finite = &finite;
            execute(pack);
        });
        CHECK(finite);
    }

    int level(int64_t row, int64_t column) const {
        return grid_type(kind.code).levels[codes[size_t(row * k + column)]];
    }
    int number(int64_t row, int64_t column) const { return numbers[size_t(row * groups + column * groups / k)]; }
    float scale(int64_t row, int64_t column) const {
        return to_float(scales[size_t((row * k + column) / 256)]) * grid_unit(kind.code);
    }
};

float defined(const float* x, const Grid& w, int64_t n) {
    float sum = 0.0f;
    for (int64_t begin = 0; begin < w.k; begin += 128) {
        float largest = 0.0f;
        for (int64_t k = begin; k < begin + 128; ++k) largest = std::max(largest, std::fabs(x[k]));
        const float scale = largest / 127.0f;
        int32_t total = 0;
        for (int64_t k = begin; k < begin + 128 && scale > 0; ++k)
            total += w.number(n, k) * w.level(n, k) *
                     int32_t(std::nearbyint(std::min(127.0f, std::max(-127.0f, x[k] / scale))));
        sum = std::fma(float(total), w.scale(n, begin) * scale, sum);
    }
    return sum;
}

void check_definition(Inputs& x, const Grid& w) {
    const std::vector<float> got = check::multiply(x, w.memory.get(), w.n);
    bool same = true;
    for (int64_t r = 0; r < x.rows; ++r)
        for (int64_t n = 0; n < w.n; ++n)
            same &= float_bits(got[size_t(r * w.n + n)]) == float_bits(defined(x.row(r), w, n));
    if (!same)
        check::fail(__FILE__, __LINE__,
                    std::string(w.kind.name) + " m " + std::to_string(x.rows) + " n " + std::to_string(w.n) + " k " +
                        std::to_string(w.k));
}

}  // namespace

TEST_TABLES(products_with_points_of_grids_have_the_bits_of_their_definition) {
    const int64_t all_rows[] = {1, 2, 3, 4, 5, 8, 9, 13, 19};
    size_t turn = 0;
    for (const Kind& kind : kKinds)
        for (const int64_t n : {1, 16, 50})
            for (const int64_t k : {256, 512, 1280}) {
                turn += 1;
                const Grid w(kind, n, k, uint32_t(turn));
                Inputs x(all_rows[turn % 9], k, turn % 2, uint32_t(turn));
                check_definition(x, w);
            }
}

// All points are the first or the last, and all numbers the smallest or the largest, with inputs at their ends.
TEST_TABLES(sums_with_points_of_grids_do_not_overflow) {
    for (const Kind& kind : kKinds)
        for (const int fill : {0, 255})
            for (const int64_t rows : {1, 11}) {
                const Grid w(kind, 33, 512, 1, false, fill);
                Inputs x(rows, 512, true, 2);
                check_definition(x, w);
            }
}

TEST(rows_of_points_of_grids_come_back_as_they_are) {
    for (const Kind& kind : kKinds)
        for (const bool glu : {false, true}) {
            const Grid w(kind, 34, 512, 5, glu);
            const auto value = [&](int64_t r, int64_t j) {
                return float(w.level(r, j) * w.number(r, j)) * w.scale(r, j);
            };
            if (!check::rows_come_back(w.memory.get(), 34, 512, value)) check::fail(__FILE__, __LINE__, kind.name);
        }
}

TEST(points_of_grids_take_the_bytes_of_ggml) {
    for (const Kind& kind : kKinds) {
        const int64_t panel = round_up(512 / 256 * 16 * grid_block_bytes(kind.code), 64);
        CHECK(packed_bytes(32, 512, format_of(kind.code), false) == 64 + 2 * panel);
    }
}

TEST(mistakes_about_grids_are_refused) {
    for (const Kind& kind : kKinds) {
        PackedFormat other_group = format_of(kind.code), with_mins = other_group, with_numbers = other_group;
        other_group.group = 48 - other_group.group;
        with_mins.has_mins = true;
        with_numbers.group_scales = GroupScales::SixBits;
        CHECK(check::refused([&] { packed_bytes(16, 256, other_group, false); }));
        CHECK(check::refused([&] { packed_bytes(16, 256, with_mins, false); }));
        CHECK(check::refused([&] { packed_bytes(16, 256, with_numbers, false); }));
        CHECK(check::refused([&] { packed_bytes(16, 384, format_of(kind.code), false); }));
    }
    const Grid xs(kKinds[3], 16, 256, 1), s(kKinds[4], 16, 256, 1);
    std::atomic<bool> finite = true;
    PackBlocksOp of_another = {};
    of_another.weight = xs.memory.get();
    of_another.rows = 16;
    of_another.source = {s.kind.number, s.blocks.data(), s.row_bytes};
    of_another.all_finite = &finite;
    CHECK(check::refused([&] { execute(of_another); }));
    PackSuperOp of_codes = {};
    of_codes.weight = xs.memory.get();
    of_codes.rows = 16;
    CHECK(check::refused([&] { execute(of_codes); }));
}
