// ggml's blocks of 1 and 2 bits without super-blocks: weights and bytes in a block, and `unpack`, which returns true if
// its scale is finite. Codes of TQ1_0 and TQ2_0 are 0 to 2, and those of Q2_0 0 to 3, for -1 and up.
#pragma once

#include "ggml_fields.h"

namespace pace {

struct Q1_0 {
    static constexpr int kWeights = 128, kBytes = 18;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<16, 1, 1>(b + 2, out.codes);
        *out.scales = to_float(half_at(b));
        return is_finite(half_at(b));
    }
};

template <int weights>
struct Q2_0 {
    static constexpr int kWeights = weights, kBytes = 2 + weights / 4;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<weights / 4, 1, 2>(b + 2, out.codes);
        *out.scales = to_float(half_at(b));
        return is_finite(half_at(b));
    }
};

// Extracts five digits of base 3 from each of kBytes bytes, as runs of kBytes: the first digits of all, then the second
// ones. A byte is a fraction of 256, and 3 times it has the next digit in front of the point.
template <int kBytes, int kDigits>
uint8_t* unpack_digits(const uint8_t* source, uint8_t* out) {
    uint8_t rest[kBytes];
    std::memcpy(rest, source, kBytes);
    for (int digit = 0; digit < kDigits; ++digit)
        for (int i = 0; i < kBytes; ++i) {
            const int times = 3 * rest[i];
            *out++ = uint8_t(times >> 8);
            rest[i] = uint8_t(times);
        }
    return out;
}

struct TQ1_0 {
    static constexpr int kWeights = 256, kBytes = 54;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        uint8_t* codes = unpack_digits<32, 5>(b, out.codes);
        codes = unpack_digits<16, 5>(b + 32, codes);
        unpack_digits<4, 4>(b + 48, codes);
        *out.scales = to_float(half_at(b + 52));
        return is_finite(half_at(b + 52));
    }
};

struct TQ2_0 {
    static constexpr int kWeights = 256, kBytes = 66;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<64, 32, 2>(b, out.codes);
        *out.scales = to_float(half_at(b + 64));
        return is_finite(half_at(b + 64));
    }
};

}  // namespace pace
