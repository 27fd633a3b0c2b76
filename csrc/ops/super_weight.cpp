// Weights in super-blocks: from codes and the scales of groups and super-blocks to panels, and rows back to numbers.
// Every table reads the same bytes, so this is plain C++. The layout is drawn in pace/types.h and kernels/planes.inl.
//
// NUMERICS  All values are stored exactly. An unpacked element is rounded once, when a minimum is added; the products
//           before that are exact in fp32.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pace/convert.h"
#include "quantized_weight.h"

namespace pace {

namespace {

constexpr int kUnits = int(kSuperBlock) / kUnit;

// The number of bits in the low planes.
constexpr int low_bits(int bits) { return bits == 1 ? 1 : bits <= 3 ? 2 : 4; }

// The position of a step's low or high code bits in a unit.
struct Field {
    int line, shift, mask;
};
struct Fields {
    Field low, high;
    int low_bits;
};
constexpr Fields fields_of_step(int bits, int step) {
    const int low = low_bits(bits), high = bits - low;
    return {{step * low / 8, step * low % 8, (1 << low) - 1},
            {low + step * high / 8, step * high % 8, (1 << high) - 1},
            low};
}

// Four words of four codes.
using Words = uint32_t __attribute__((vector_size(16)));

constexpr uint32_t every_byte(uint32_t byte) { return byte * 0x01010101; }

// Converts eight words of codes to `bits` lines, with fields of `bits` bits. Consecutive fields lie side by side in a
// line's bytes, the first lowest. Line i is in lane i of four, or 2 i of two.
template <int bits>
Words gather_fields(Words first, Words second, int shift) {
    constexpr uint32_t kMask = every_byte((1 << bits) - 1);
    first = first >> shift & kMask, second = second >> shift & kMask;
    const Words even = __builtin_shuffle(first, second, Words{0, 2, 4, 6});
    const Words odd = __builtin_shuffle(first, second, Words{1, 3, 5, 7});
    Words lines = even | odd << bits;
    if constexpr (bits <= 2) lines |= __builtin_shuffle(lines, Words{1, 0, 3, 2}) << 2 * bits;
    if constexpr (bits == 1) lines |= __builtin_shuffle(lines, Words{2, 3, 0, 1}) << 4;
    return lines;
}

// Packs one row's codes of a unit; `out` is the row's first byte in the panel. The four codes of a step form the bytes
// of a word.
template <int bits>
void pack_unit_of(const uint8_t* codes, uint8_t* out) {
    constexpr int kLow = low_bits(bits), kHigh = bits - kLow;
    Words first, second;
    std::memcpy(&first, codes, sizeof first), std::memcpy(&second, codes + 16, sizeof second);
    const auto store = [&](const Words& lines, int count, int line) {
        for (int i = 0; i < count; ++i) {
            const uint32_t word = lines[i * (4 / count)];
            std::memcpy(out + 64 * (line + i), &word, sizeof word);
        }
    };
    store(gather_fields<kLow>(first, second, 0), kLow, 0);
    if constexpr (kHigh) store(gather_fields<kHigh>(first, second, kLow), kHigh, kLow);
}

// Packs the integers of a super-block's groups, scales before minima, from one row into every sixteenth byte of a panel
// from `out` on. unpack_group_scales() is the inverse.
void pack_group_scales(const PackedHeader& h, const int8_t* scales, const int8_t* mins, uint8_t* out) {
    const int groups = int(kSuperBlock / h.group);
    if (h.group_scales == GroupScales::Bytes) {
        for (int g = 0; g < groups; ++g) out[16 * g] = uint8_t(scales[g]);
    } else if (h.group_scales == GroupScales::NibblePairs) {
        for (int g = 0; g < groups; ++g) out[16 * g] = uint8_t((scales[g] & 15) | mins[g] << 4);
    } else {
        const int numbers = groups * (1 + h.has_mins), quarter = numbers / 4;
        const auto number = [&](int j) { return (j < groups ? scales[j] : mins[j - groups]) & 63; };
        for (int row = 0; row < 3; ++row)
            for (int q = 0; q < quarter; ++q)
                out[16 * (row * quarter + q)] =
                    uint8_t(number(row * quarter + q) | (number(3 * quarter + q) >> 2 * row & 3) << 6);
    }
}

void unpack_group_scales(const PackedHeader& h, const uint8_t* bytes, int* scales, int* mins) {
    const int groups = int(kSuperBlock / h.group);
    for (int g = 0; g < groups; ++g) mins[g] = 0;
    if (h.group_scales == GroupScales::Bytes) {
        for (int g = 0; g < groups; ++g) scales[g] = int8_t(bytes[16 * g]);
    } else if (h.group_scales == GroupScales::NibblePairs) {
        for (int g = 0; g < groups; ++g) scales[g] = bytes[16 * g] & 15, mins[g] = bytes[16 * g] >> 4;
    } else {
        const int numbers = groups * (1 + h.has_mins), quarter = numbers / 4;
        for (int j = 0; j < numbers; ++j) {
            int number = 0;
            if (j < 3 * quarter) {
                number = bytes[16 * j] & 63;
            } else {
                for (int row = 0; row < 3; ++row) number |= bytes[16 * (row * quarter + j % quarter)] >> 6 << 2 * row;
            }
            if (!h.has_mins) number = (number ^ 32) - 32;
            (j < groups ? scales[j] : mins[j - groups]) = number;
        }
    }
}

}  // namespace

PackUnit pack_unit(int bits) {
    constexpr PackUnit kPackUnit[] = {nullptr,         pack_unit_of<1>, pack_unit_of<2>, pack_unit_of<3>,
                                      pack_unit_of<4>, pack_unit_of<5>, pack_unit_of<6>};
    return kPackUnit[bits];
}

int code_of_unit(const uint8_t* unit, int bits, int k) {
    const Fields f = fields_of_step(bits, k / 4);
    const uint8_t* const at = unit + k % 4;
    const int low = at[64 * f.low.line] >> f.low.shift & f.low.mask;
    return f.high.mask ? low | (at[64 * f.high.line] >> f.high.shift & f.high.mask) << f.low_bits : low;
}

void unpack_super_row(const PackedHeader& h, Place place, const int32_t* order, float* out) {
    const bool even = h.has_even_levels();
    const int groups = int(kSuperBlock / h.group);
    const char* block = h.panel(place.panel);
    for (int64_t first = 0; first < h.k; first += kSuperBlock, block += h.super_block_bytes()) {
        const F16* const supers = reinterpret_cast<const F16*>(block) + place.row;
        const float super_scale = to_float(*supers), super_min = h.has_mins ? to_float(supers[kPanelRows]) : 0.0f;
        const uint8_t* const numbers = reinterpret_cast<const uint8_t*>(block) + h.super_scales_bytes();
        const uint8_t* const codes = numbers + h.group_scales_bytes() + 4 * place.row;
        int scales[16], mins[16];
        unpack_group_scales(h, numbers + place.row, scales, mins);
        for (int g = 0; g < groups; ++g) {
            const float scale = float(scales[g]) * super_scale, min = float(mins[g]) * super_min;
            for (int k = g * int(h.group); k < (g + 1) * int(h.group); ++k) {
                const int code = code_of_unit(codes + k / kUnit * 64 * h.bits, h.bits, k % kUnit);
                float value = float(h.bits == 4 && !even ? h.levels[code] : code - h.offset) * scale;
                if (h.has_mins) value += min;
                out[order ? order[first + k] : first + k] = value;
            }
        }
    }
}

void PackSuperOp::prepare(int) {
    const PackedHeader& h = part_of_rows(weight, row, rows);
    if (h.layout != Layout::PanelSuper) throw std::invalid_argument("this weight does not hold super-blocks of codes");
    weight = const_cast<PackedHeader*>(&h);
    rows_per_chunk = rows_of_chunk(h);
    chunk_count = divide_up(rows, rows_per_chunk);
}

void pack_super_block(const PackedHeader& h, int64_t row, const SuperBlock& from, uint8_t* block) {
    reinterpret_cast<F16*>(block)[row] = from.scale;
    if (h.has_mins) reinterpret_cast<F16*>(block)[kPanelRows + row] = from.min;
    uint8_t* const numbers = block + h.super_scales_bytes();
    pack_group_scales(h, from.group_scales, from.group_mins, numbers + row);
    uint8_t* const units = numbers + h.group_scales_bytes() + 4 * row;
    const PackUnit pack = pack_unit(h.bits);
    for (int u = 0; u < kUnits; ++u) pack(from.codes + u * kUnit, units + u * 64 * h.bits);
}

void PackSuperOp::run(int, int64_t chunk, int) const {
    const PackedHeader& h = *static_cast<const PackedHeader*>(weight);
    const int64_t groups = kSuperBlock / h.group, supers = h.k / kSuperBlock;
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r) {
        const Place place = place_of(h, row + r);
        uint8_t* block = panel_at(h, weight, place.panel);
        for (int64_t b = 0; b < supers; ++b, block += h.super_block_bytes()) {
            const int64_t super = r * supers + b;
            const SuperBlock from = {codes + r * codes_stride + b * kSuperBlock, group_scales + super * groups,
                                     h.has_mins ? group_mins + super * groups : nullptr, scales[super],
                                     h.has_mins ? mins[super] : F16{}};
            pack_super_block(h, place.row, from, block);
        }
    }
}

}  // namespace pace
