// Reads fields of ggml's blocks. A field is a few bits of a byte. A run of bytes contains the lowest field of each byte
// first, then the next field of each.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "pace/convert.h"
#include "pace/ops.h"

namespace pace {

using Arrays = UnpackedRows;  // also for one row, or one block

// Extracts fields from kBytes bytes in runs of kRun, shifted up by kShift. Writes them to `out`, or adds them to it.
template <int kBytes, int kRun, int kBits, int kShift = 0, bool kAdd = false>
void unpack_fields(const uint8_t* source, uint8_t* out) {
    constexpr int kMask = (1 << kBits) - 1;
    for (int begin = 0; begin < kBytes; begin += kRun)
        for (int low = 0; low < 8; low += kBits, out += kRun)
            for (int i = 0; i < kRun; ++i) {
                const auto field = uint8_t((source[begin + i] >> low & kMask) << kShift);
                out[i] = kAdd ? uint8_t(out[i] | field) : field;
            }
}

template <int kBytes, int kRun, int kBits, int kShift>
void add_fields(const uint8_t* source, uint8_t* out) {
    unpack_fields<kBytes, kRun, kBits, kShift, true>(source, out);
}

inline F16 half_at(const uint8_t* p) {
    F16 value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

inline F16 negative(F16 value) { return {uint16_t(value.bits ^ 0x8000)}; }

inline bool is_finite(F16 value) { return (value.bits & 0x7c00) != 0x7c00; }

// 2^(byte - 127); NaN for 255.
inline float power_of_two(uint8_t byte) {
    return byte == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0f, int(byte) - 127);
}

// A float of 4 bits of exponent and 3 of mantissa. Its sign is not used, and ggml reads the NaN 127 as zero.
inline float unsigned_e4m3(uint8_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    if (byte == 127) return 0.0f;
    return exponent ? std::ldexp(float(8 + mantissa), exponent - 10) : std::ldexp(float(mantissa), -9);
}

}  // namespace pace
