// Quantised weights: from codes and scales to panels, and rows of them back to numbers. Every table reads the same bytes, so this is
// plain C++. The layout is drawn in pace/types.h and kernels/linear_quantized.inl.
//
// NUMERICS  Scales and minima of groups become F16 times a power of two, one for each row: the one that takes the largest of them to
//           2^15 or more, so that what was F16 stays exact. Others are off by 2^-11 of themselves, or, where they are 2^29 times smaller
//           than the largest, by 2^-40 of that. Scales of whole rows stay fp32.
#include "quantized_weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "pace/convert.h"

namespace pace {

namespace {

// Not less, so that 2^exponent is a normal number and 2^-149, the least fp32, an F16 times it.
constexpr int kLeastExponent = -126;

// The exponent e with largest * 2^-e in [2^15, 65520), from where F16 rounds to infinity.
int row_exponent(const float* scales, const float* mins, int64_t groups) {
    float largest = 0.0f;
    for (int64_t g = 0; g < groups; ++g) {
        if (std::isfinite(scales[g])) largest = std::max(largest, std::fabs(scales[g]));
        if (mins && std::isfinite(mins[g])) largest = std::max(largest, std::fabs(mins[g]));
    }
    int exponent;
    const float fraction = std::frexp(largest, &exponent);  // in [0.5, 1)
    return std::max(kLeastExponent, exponent - 16 + (fraction * 65536.0f >= 65520.0f));
}

F16 scaled_f16(float value, int exponent) {
    F16 out;
    from_float(std::ldexp(value, -exponent), out);
    return out;
}

uint32_t load_four(const uint8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, sizeof four);
    return four;
}

// `count` codes of one row into its places of a panel, from `panel` on. What lies beyond them stays zero.
void pack_codes(const PackedHeader& h, const uint8_t* codes, int64_t count, int64_t row, uint8_t* panel) {
    if (h.layout == Layout::PanelF8) {
        for (int64_t k = 0; k < count; ++k) panel[k * kPanelRows + row] = codes[k];
        return;
    }
    const int64_t step = h.layout == Layout::PanelU4 ? 8 : 4;
    for (int64_t k = 0; k < count; k += step, panel += 4 * kPanelRows) {
        uint8_t some[8] = {};
        std::memcpy(some, codes + k, size_t(std::min(step, count - k)));
        const uint32_t four = step == 4 ? load_four(some) : load_four(some) | load_four(some + 4) << 4;
        std::memcpy(panel + 4 * row, &four, sizeof four);
    }
}

// The number that code k of a row stands for; `panel` has the codes from k = 0 on.
float level_of(const PackedHeader& h, const uint8_t* panel, int64_t row, int64_t k) {
    if (h.layout == Layout::PanelF8) return float8_to_float(panel[k * kPanelRows + row]);
    if (h.layout == Layout::PanelI8) return float(int8_t(panel[k / 4 * 64 + row * 4 + k % 4]));
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
            if (h.has_mins) min = to_float(scales[2 * kPanelRows]) * power;
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
    const PackedHeader& h = packed_header(weight);
    if (!h.quantized()) throw std::invalid_argument("a dense weight is packed from a matrix, not from codes");
    if (row < 0 || rows < 0 || row + rows > h.n) throw std::invalid_argument("rows to pack lie outside of the weight");
    rows_per_chunk = rows_of_chunk(h);
    chunk_count = divide_up(rows, rows_per_chunk);
}

void PackQuantizedOp::run(int, int64_t chunk, int) const {
    const PackedHeader& h = packed_header(weight);
    const auto writable = [&](const char* p) { return static_cast<char*>(weight) + (p - static_cast<const char*>(weight)); };
    const int64_t groups = h.groups(), end = std::min(rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r) {
        const Place place = place_of(h, row + r);
        char* const panel = writable(h.panel(place.panel));
        const int64_t index = place.panel * kPanelRows + place.row;
        const float* const row_scales = scales + r * groups;
        const float* const row_mins = h.has_mins ? mins + r * groups : nullptr;
        if (h.group) {
            const int exponent = row_exponent(row_scales, row_mins, groups);
            reinterpret_cast<int8_t*>(writable(h.row_scales()))[index] = int8_t(exponent);
            for (int64_t g = 0; g < groups; ++g) {
                F16* const place_of_scale = reinterpret_cast<F16*>(panel + h.scales_offset(g)) + place.row;
                *place_of_scale = scaled_f16(row_scales[g], exponent);
                if (row_mins) place_of_scale[2 * kPanelRows] = scaled_f16(row_mins[g], exponent);
            }
        } else {
            reinterpret_cast<float*>(writable(h.row_scales()))[index] = row_scales[0];
        }
        const int64_t pair = h.group ? 2 * int64_t(h.group) : h.k;  // columns whose codes lie in one piece
        for (int64_t k = 0; k < h.k; k += pair)
            pack_codes(h, codes + r * codes_stride + k, std::min(pair, h.k - k), place.row,
                       reinterpret_cast<uint8_t*>(panel) + h.codes_offset(k));
    }
}

}  // namespace pace
