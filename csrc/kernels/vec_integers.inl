// Integers in lanes, and bit fields of bytes, for the scales of super-blocks and for codes in planes.
//
//   multiply(a, b)                     the low 32 bits of products.
//   add_pairs(total, a, b)             total + a0 b0 + a1 b1, for the two signed 16 bits in each lane.
//   halved<n>(a)                       a / 2^n, rounded down.
//   load_int(p)                        kLanes int8_t at p.
//   pair_of(low, high)                 in each lane, the low 16 bits of `low`, and above them those of `high`.
//   twice(a)                           pair_of(a, a).
//   |                                  on bytes.
//   shifted_field<from, bits, to>(b)   of each byte `bits` bits from bit `from` on, moved to bit `to`; else zeros.
#if PACE_ISA_EMULATED

PACE_INLINE I32 multiply(I32 a, I32 b) {
    for (int i = 0; i < kLanes; ++i) a.v[i] = int32_t(uint32_t(a.v[i]) * uint32_t(b.v[i]));
    return a;
}
PACE_INLINE I32 add_pairs(I32 total, I32 a, I32 b) {
    for (int i = 0; i < kLanes; ++i) total.v[i] += int16_t(a.v[i]) * int16_t(b.v[i]) + (a.v[i] >> 16) * (b.v[i] >> 16);
    return total;
}
template <int n>
PACE_INLINE I32 halved(I32 a) {
    for (int i = 0; i < kLanes; ++i) a.v[i] >>= n;
    return a;
}
PACE_INLINE I32 load_int(const int8_t* p) {
    I32 result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = p[i];
    return result;
}
PACE_INLINE I32 pair_of(I32 low, I32 high) {
    for (int i = 0; i < kLanes; ++i) low.v[i] = int32_t((low.v[i] & 0xffff) | uint32_t(high.v[i]) << 16);
    return low;
}
PACE_INLINE I32 twice(I32 a) { return pair_of(a, a); }
PACE_INLINE Bytes operator|(Bytes a, Bytes b) {
    for (int i = 0; i < 64; ++i) a.v[i] |= b.v[i];
    return a;
}
template <int from, int bits, int to>
PACE_INLINE Bytes shifted_field(Bytes a) {
    for (int i = 0; i < 64; ++i) a.v[i] = uint8_t((a.v[i] >> from & ((1 << bits) - 1)) << to);
    return a;
}

#elif PACE_ISA_LEVEL >= 2

PACE_INLINE I32 multiply(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
#if PACE_ISA_LEVEL >= 3
PACE_INLINE I32 add_pairs(I32 total, I32 a, I32 b) { return {_mm512_dpwssd_epi32(total.v, a.v, b.v)}; }
#else
PACE_INLINE I32 add_pairs(I32 total, I32 a, I32 b) { return {_mm512_add_epi32(total.v, _mm512_madd_epi16(a.v, b.v))}; }
#endif
template <int n>
PACE_INLINE I32 halved(I32 a) {
    return {_mm512_srai_epi32(a.v, n)};
}
PACE_INLINE I32 load_int(const int8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
PACE_INLINE I32 pair_of(I32 low, I32 high) {
    return {_mm512_mask_mov_epi16(low.v, 0xaaaaaaaa, _mm512_slli_epi32(high.v, 16))};
}
PACE_INLINE I32 twice(I32 a) {
    return {_mm512_shuffle_epi8(a.v, _mm512_set4_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100))};
}
PACE_INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int from, int bits, int to>
PACE_INLINE Bytes shifted_field(Bytes a) {
    constexpr int kMask = ((1 << bits) - 1) << to;
    if constexpr (from > to) a.v = _mm512_srli_epi16(a.v, from - to);
    if constexpr (from < to) a.v = _mm512_slli_epi16(a.v, to - from);
    return {_mm512_and_si512(a.v, _mm512_set1_epi8((char)kMask))};
}

#elif PACE_ISA_LEVEL == 1

PACE_INLINE I32 multiply(I32 a, I32 b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
PACE_INLINE I32 add_pairs(I32 total, I32 a, I32 b) { return {_mm256_add_epi32(total.v, _mm256_madd_epi16(a.v, b.v))}; }
template <int n>
PACE_INLINE I32 halved(I32 a) {
    return {_mm256_srai_epi32(a.v, n)};
}
PACE_INLINE I32 load_int(const int8_t* p) { return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))}; }
PACE_INLINE I32 pair_of(I32 low, I32 high) { return {_mm256_blend_epi16(low.v, _mm256_slli_epi32(high.v, 16), 0xaa)}; }
PACE_INLINE I32 twice(I32 a) {
    const __m128i order = _mm_set_epi32(0x0d0c0d0c, 0x09080908, 0x05040504, 0x01000100);
    return {_mm256_shuffle_epi8(a.v, _mm256_broadcastsi128_si256(order))};
}
PACE_INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm256_or_si256(a.v, b.v)}; }
template <int from, int bits, int to>
PACE_INLINE Bytes shifted_field(Bytes a) {
    constexpr int kMask = ((1 << bits) - 1) << to;
    if constexpr (from > to) a.v = _mm256_srli_epi16(a.v, from - to);
    if constexpr (from < to) a.v = _mm256_slli_epi16(a.v, to - from);
    return {_mm256_and_si256(a.v, _mm256_set1_epi8((char)kMask))};
}

#else

// SSE2 multiplies only every other lane.
PACE_INLINE I32 multiply(I32 a, I32 b) {
    const __m128i even = _mm_mul_epu32(a.v, b.v), odd = _mm_mul_epu32(_mm_srli_epi64(a.v, 32), _mm_srli_epi64(b.v, 32));
    return {_mm_unpacklo_epi32(_mm_shuffle_epi32(even, 0x08), _mm_shuffle_epi32(odd, 0x08))};
}
PACE_INLINE I32 add_pairs(I32 total, I32 a, I32 b) { return {_mm_add_epi32(total.v, _mm_madd_epi16(a.v, b.v))}; }
template <int n>
PACE_INLINE I32 halved(I32 a) {
    return {_mm_srai_epi32(a.v, n)};
}
PACE_INLINE I32 load_int(const int8_t* p) {
    int32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    const __m128i four = _mm_cvtsi32_si128(bytes), pairs = _mm_unpacklo_epi8(four, four);
    return {_mm_srai_epi32(_mm_unpacklo_epi16(pairs, pairs), 24)};
}
PACE_INLINE I32 pair_of(I32 low, I32 high) {
    return {_mm_or_si128(_mm_and_si128(low.v, _mm_set1_epi32(0xffff)), _mm_slli_epi32(high.v, 16))};
}
PACE_INLINE I32 twice(I32 a) { return pair_of(a, a); }
PACE_INLINE Bytes operator|(Bytes a, Bytes b) { return {_mm_or_si128(a.v, b.v)}; }
template <int from, int bits, int to>
PACE_INLINE Bytes shifted_field(Bytes a) {
    constexpr int kMask = ((1 << bits) - 1) << to;
    if constexpr (from > to) a.v = _mm_srli_epi16(a.v, from - to);
    if constexpr (from < to) a.v = _mm_slli_epi16(a.v, to - from);
    return {_mm_and_si128(a.v, _mm_set1_epi8((char)kMask))};
}

#endif
