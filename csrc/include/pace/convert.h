// Scalar conversions between fp32 and the 16-bit formats. They round to nearest, ties to even, as torch's `.to()`; NaN
// stays NaN. This is baseline code, so that every instruction set may call it.
#pragma once

#include <cstring>

#include "pace/types.h"

namespace pace {

inline uint32_t float_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float bits_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline float to_float(float value) { return value; }

inline float to_float(int8_t value) { return float(value); }

inline float to_float(BF16 value) { return bits_float(uint32_t(value.bits) << 16); }

inline float to_float(F16 value) {
    // Exponent and mantissa move into place, and a factor of 2^112 corrects the bias (15 -> 127). It is a
    // multiplication because that also normalises subnormals. Infinity and NaN (exponent 31) get fp32's exponent 255.
    const uint32_t magnitude = (value.bits & 0x7fffu) << 13;
    const uint32_t sign = (value.bits & 0x8000u) << 16;
    const uint32_t special = magnitude >= (0x7c00u << 13) ? 0x7f800000u : 0u;
    return bits_float(float_bits(bits_float(magnitude) * 0x1p112f) | special | sign);
}

// float8_e4m3fn: 4 bits of exponent, 3 of mantissa, no infinity; NaN if all seven are ones.
inline float float8_to_float(uint8_t bits) {
    const uint32_t magnitude = (bits & 0x7fu) << 20, sign = (bits & 0x80u) << 24;
    const uint32_t special = (bits & 0x7fu) == 0x7fu ? 0x7fc00000u : 0u;
    return bits_float(float_bits(bits_float(magnitude) * 0x1p120f) | special | sign);
}

// Rounds to the nearest number of eleven bits at any exponent, ties to even. A group's scale keeps this precision as
// F16 times a power of two.
inline float eleven_bits(float value) {
    const double wide = value;  // fp32 subnormals are normal in fp64
    uint64_t bits;
    std::memcpy(&bits, &wide, sizeof bits);
    bits = (bits + (1ull << 41) - 1 + (bits >> 42 & 1)) >> 42 << 42;
    double rounded;
    std::memcpy(&rounded, &bits, sizeof rounded);
    return float(rounded);
}

inline void from_float(float value, float& out) { out = value; }

inline void from_float(float value, BF16& out) {
    const uint32_t bits = float_bits(value);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    // Adding 0x7fff, and one more if the kept part is odd, carries into it exactly when round-to-even rounds up.
    out.bits = is_nan ? uint16_t(bits >> 16 | 0x40u) : uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

inline void from_float(float value, F16& out) {
    const uint32_t bits = float_bits(value), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    // Subnormal results: 0.5f has an ulp of 2^-24, the spacing of fp16 subnormals, so the addition rounds for us.
    const uint32_t subnormal = float_bits(bits_float(magnitude) + 0.5f) - float_bits(0.5f);
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const uint32_t finite = magnitude < (113u << 23) ? subnormal : normal;
    const uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;      // NaN or infinity
    out.bits = uint16_t(sign | (magnitude < 0x477ff000u ? finite : special));  // 65520 and above overflow
}

}  // namespace pace
