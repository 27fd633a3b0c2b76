// Quantised weights: from codes and scales to panels, and rows back to numbers. Every table reads the same bytes, so
// this is plain C++. The layout is drawn in pace/types.h and kernels/linear_quantized.inl.
//
// NUMERICS  Scales and minima of groups become F16 times a power of two, one power for each row. It brings the largest
//           of them to 2^15 or more, so that values which were F16 stay exact. Others have a relative error of 2^-11;
//           if they are 2^29 times smaller than the largest, the error is 2^-40 of the largest. Scales of whole rows
//           stay fp32.
#include "quantized_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

#include "pace/convert.h"

namespace pace {

namespace {

// Lower bound of exponents: 2^exponent is a normal number, and 2^-149, the smallest fp32, is an F16 times it.
constexpr int kMinExponent = -126;

// The exponent e with largest * 2^-e in [2^15, 65520); from 65520 on F16 rounds to infinity.
int row_exponent(const float* scales, const float* mins, int64_t groups) {
    float largest = 0.0f;
    for (int64_t g = 0; g < groups; ++g) {
        if (std::isfinite(scales[g])) largest = std::max(largest, std::fabs(scales[g]));
        if (mins && std::isfinite(mins[g])) largest = std::max(largest, std::fabs(mins[g]));
    }
    int exponent;
    const float fraction = std::frexp(largest, &exponent);  // in [0.5, 1)
    return std::max(kMinExponent, exponent - 16 + (fraction * 65536.0f >= 65520.0f));
}

uint32_t load_four(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    return four;
}

// ---- Codes of rows, as in PackQuantizedOp, are packed to words of panels: one word of each row, row after row.

// A word is four bytes, unchanged.
struct ByteWords {
    static constexpr int kBytes = 4;
    static uint32_t word(const uint8_t* codes) { return load_four(codes); }
};

// Eight codes, a byte each; the first four become the low nibbles.
struct NibbleWords {
    static constexpr int kBytes = 8;
    static uint32_t word(const uint8_t* codes) { return load_four(codes) | load_four(codes + 4) << 4; }
};

// Eight codes, two in a byte; the first four become the low nibbles.
struct PairedNibbleWords {
    static constexpr int kBytes = 4;
    static uint32_t spread(uint32_t four) {
        four = (four | four << 8) & 0x00ff00ff;
        return (four | four << 4) & 0x0f0f0f0f;
    }
    static uint32_t word(const uint8_t* codes) {
        return spread(load_four(codes) & 0xffff) | spread(load_four(codes) >> 16) << 4;
    }
};

// Some bytes of each of several rows that are consecutive in a panel; `first` is the first row's index in it.
struct CodeRows {
    const uint8_t* codes;
    int64_t stride, bytes, rows, first;
};

// A stage holds one cache line of each row at a time, so that neither rows nor the panel are accessed with large
// strides.
constexpr int64_t kStageWords = 16;

// Bytes beyond the end of a row become zeros.
template <class Words>
void pack_words(const CodeRows& from, uint8_t* panel) {
    uint32_t stage[kPanelRows][kStageWords];
    constexpr int64_t kStep = kStageWords * Words::kBytes;
    for (int64_t start = 0; start < from.bytes; start += kStep, panel += kStageWords * kPanelRows * 4) {
        const int64_t bytes = std::min(kStep, from.bytes - start), words = divide_up(bytes, Words::kBytes);
        for (int64_t r = 0; r < from.rows; ++r) {
            const uint8_t* codes = from.codes + r * from.stride + start;
            uint8_t last[kStep];
            if (bytes % Words::kBytes) {
                std::memset(last, 0, sizeof last);
                codes = static_cast<const uint8_t*>(std::memcpy(last, codes, size_t(bytes)));
            }
            for (int64_t w = 0; w < words; ++w) stage[r][w] = Words::word(codes + w * Words::kBytes);
        }
        uint32_t* const out = reinterpret_cast<uint32_t*>(panel) + from.first;
        if (from.rows == kPanelRows) {
            for (int64_t w = 0; w < words; ++w)
                for (int64_t r = 0; r < kPanelRows; ++r) out[w * kPanelRows + r] = stage[r][w];
        } else {
            for (int64_t w = 0; w < words; ++w)
                for (int64_t r = 0; r < from.rows; ++r) out[w * kPanelRows + r] = stage[r][w];
        }
    }
}

// Codes of `bits` bits, in units of kernels/planes.inl.
void pack_units(const CodeRows& from, int bits, uint8_t* panel) {
    const PackUnit pack = pack_unit(bits);
    for (int64_t start = 0; start < from.bytes; start += kUnit, panel += bits * 64)
        for (int64_t r = 0; r < from.rows; ++r) {
            uint8_t codes[kUnit] = {};
            std::memcpy(codes, from.codes + r * from.stride + start,
                        size_t(std::min<int64_t>(kUnit, from.bytes - start)));
            pack(codes, panel + 4 * (from.first + r));
        }
}

void pack_bytes(const CodeRows& from, uint8_t* panel) {
    constexpr int64_t kStep = 64;
    for (int64_t start = 0; start < from.bytes; start += kStep)
        for (int64_t k = start; k < std::min(from.bytes, start + kStep); ++k)
            for (int64_t r = 0; r < from.rows; ++r)
                panel[k * kPanelRows + from.first + r] = from.codes[r * from.stride + k];
}

// The limit leaves room for the kernels' factor kFloat8Unit. A float8 is up to 448, so finite weights have scales below
// this.
void check_float8_scales(const PackQuantizedOp& op, const PackedHeader& h) {
    for (int64_t i = 0; i < op.rows * h.groups(); ++i)
        if (std::isfinite(op.scales[i]) && std::fabs(op.scales[i]) >= 0x1p120f)
            throw std::invalid_argument("a scale of float8 weights is less than 2^120; got " +
                                        std::to_string(op.scales[i]));
}

// True if one of `count` float8 codes is NaN.
bool has_nan(const uint8_t* codes, int64_t count) {
    uint8_t any = 0;
    for (int64_t i = 0; i < count; ++i) any |= uint8_t((codes[i] & 0x7f) == 0x7f);
    return any;
}

// Packs scales, and minima, of row r of an op. Kernels read a float8 NaN as a number. So its group's scale becomes NaN,
// which makes the same output NaN.
void pack_scales(const PackQuantizedOp& op, const PackedHeader& h, int64_t r, Place place) {
    const auto writable = [&](const char* p) {
        return static_cast<char*>(op.weight) + (p - static_cast<const char*>(op.weight));
    };
    const int64_t groups = h.groups(), index = place.panel * kPanelRows + place.row;
    const float* const row_scales = op.scales + r * groups;
    const uint8_t* const codes = op.codes + r * op.codes_stride;
    const auto scale = [&](int64_t g) {
        const int64_t first = g * int64_t(h.group), count = h.group ? std::min(int64_t(h.group), h.k - first) : h.k;
        return h.layout == Layout::PanelF8 && has_nan(codes + first, count) ? std::numeric_limits<float>::quiet_NaN()
                                                                            : row_scales[g];
    };
    if (!h.group) {
        reinterpret_cast<float*>(writable(h.row_scales()))[index] = scale(0);
        return;
    }
    const float* const row_mins = h.has_mins ? op.mins + r * groups : nullptr;
    const int exponent = row_exponent(row_scales, row_mins, groups);
    reinterpret_cast<int8_t*>(writable(h.row_scales()))[index] = int8_t(exponent);
    const float power = std::ldexp(1.0f, -exponent);  // normal, so a product is rounded once, as by ldexp()
    for (int64_t g = 0; g < groups; ++g) {
        F16* const place_of_scale =
            reinterpret_cast<F16*>(writable(h.panel(place.panel)) + h.scales_offset(g)) + place.row;
        from_float(scale(g) * power, *place_of_scale);
        if (row_mins) from_float(row_mins[g] * power, place_of_scale[PackedHeader::kPairScales]);
    }
}

// Packs codes of rows [r, r + count) of an op; the first row goes to `place`.
void pack_codes(const PackQuantizedOp& op, const PackedHeader& h, int64_t r, int64_t count, Place place) {
    uint8_t* const panel =
        static_cast<uint8_t*>(op.weight) + (h.panel(place.panel) - static_cast<const char*>(op.weight));
    const int64_t piece = h.group ? 2 * int64_t(h.group) : h.k;  // columns whose codes are contiguous
    for (int64_t k = 0; k < h.k; k += piece) {
        const int64_t columns = std::min(piece, h.k - k);
        uint8_t* const out = panel + h.codes_offset(k);
        const uint8_t* const from = op.codes + r * op.codes_stride + (op.paired ? k / 2 : k);
        const CodeRows piece_rows = {from, op.codes_stride, op.paired ? divide_up(columns, 2) : columns, count,
                                     place.row};
        if (h.layout == Layout::PanelF8) {
            pack_bytes(piece_rows, out);
        } else if (h.layout == Layout::PanelPlanes) {
            pack_units(piece_rows, h.bits, out);
        } else if (h.layout == Layout::PanelI8) {
            pack_words<ByteWords>(piece_rows, out);
        } else if (op.paired) {
            pack_words<PairedNibbleWords>(piece_rows, out);
        } else {
            pack_words<NibbleWords>(piece_rows, out);
        }
    }
}

// The level of code k of a row, before scaling; `panel` has the codes from k = 0 on.
float level_of(const PackedHeader& h, const uint8_t* panel, int64_t row, int64_t k) {
    if (h.layout == Layout::PanelF8) return float8_to_float(panel[k * kPanelRows + row]);
    if (h.layout == Layout::PanelI8) return float(int8_t(panel[k / 4 * 64 + row * 4 + k % 4]));
    if (h.layout == Layout::PanelPlanes) {
        const int code = code_of_unit(panel + k / kUnit * h.bits * 64 + row * 4, h.bits, int(k % kUnit));
        return float((h.bits == 1 ? 2 * code : code) - h.offset);
    }
    const uint8_t both = panel[k / 8 * 64 + row * 4 + k % 4];
    return float(h.levels[k % 8 < 4 ? both & 15 : both >> 4]);
}

}  // namespace

void unpack_quantized_row(const PackedHeader& h, Place place, const int32_t* order, float* out) {
    const char* const panel = h.panel(place.panel);
    const int64_t index = place.panel * kPanelRows + place.row, group = h.group ? h.group : h.k;
    for (int64_t g = 0; g < h.groups(); ++g) {
        float scale, min = 0.0f;
        if (h.group) {
            const F16* const scales = reinterpret_cast<const F16*>(panel + h.scales_offset(g)) + place.row;
            const float power = std::ldexp(1.0f, reinterpret_cast<const int8_t*>(h.row_scales())[index]);
            scale = to_float(*scales) * power;
            if (h.has_mins) min = to_float(scales[PackedHeader::kPairScales]) * power;
        } else {
            scale = reinterpret_cast<const float*>(h.row_scales())[index];
        }
        const int64_t first = g * group, count = std::min(group, h.k - first);
        const uint8_t* const codes = reinterpret_cast<const uint8_t*>(panel) + h.codes_offset(first);
        for (int64_t k = 0; k < count; ++k) {
            float value = level_of(h, codes, place.row, k) * scale;
            if (h.has_mins) value += min;
            out[order ? order[first + k] : first + k] = value;
        }
    }
}

void PackQuantizedOp::prepare(int) {
    const PackedHeader& h = part_of_rows(weight, row, rows);
    if (!h.quantized()) throw std::invalid_argument("a dense weight is packed from a matrix, not from codes");
    if (h.in_super_blocks()) throw std::invalid_argument("a weight in super-blocks is packed from super-blocks");
    weight = const_cast<PackedHeader*>(&h);
    if (h.layout == Layout::PanelF8) check_float8_scales(*this, h);
    if (paired && (h.layout != Layout::PanelU4 || h.k % 2))
        throw std::invalid_argument("codes come in pairs only if they have 4 bits and k is even");
    rows_per_chunk = rows_of_chunk(h);
    chunk_count = divide_up(rows, rows_per_chunk);
}

void PackQuantizedOp::run(int, int64_t chunk, int) const {
    const PackedHeader& h = packed_header(weight);
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end;) {
        const Place place = place_of(h, row + r);
        const int64_t count = rows_in_panel(h, row + r, end - r);
        for (int64_t i = 0; i < count; ++i) pack_scales(*this, h, r + i, {place.panel, place.row + i});
        pack_codes(*this, h, r, count, place);
        r += count;
    }
}

}  // namespace pace
