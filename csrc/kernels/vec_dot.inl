// Dot products of pairs of bf16 and of quads of int8 that accumulate into 32-bit lanes.
//
// NUMERICS
//   dot_pairs     acc = (acc + a1 b1) + a0 b0, the second element of each pair first, as in vdpbf16ps. A product of two
//                 bf16 is exact in fp32. Subnormal inputs and results count as zero. (Only in AVX-512_BF16 and AMX
//                 tables.)
//
//   dot_quads     acc + a0 b0 + a1 b1 + a2 b2 + a3 b3, exact. a is unsigned and at most 128. AVX2's maddubs adds two
//                 products in 16 bits, and 2 * 128 * -128 is the last sum that fits.

#if PACE_ISA_LEVEL >= 4
struct Pairs {
#if PACE_ISA_EMULATED
    uint32_t v[16];
#else
    __m512i v;
#endif
};

#if PACE_ISA_EMULATED
PACE_INLINE float flush_subnormal(float f) { return __builtin_fabsf(f) < 0x1p-126f ? f * 0.0f : f; }
PACE_INLINE Pairs load_pairs(const BF16* p) {
    Pairs result;
    memcpy(result.v, p, sizeof result.v);
    return result;
}
PACE_INLINE Pairs broadcast_pair(const BF16* p) {
    Pairs result;
    for (int i = 0; i < 16; ++i) memcpy(&result.v[i], p, 4);
    return result;
}
PACE_INLINE F32 dot_pairs(Pairs a, Pairs b, F32 acc) {
    for (int i = 0; i < 16; ++i) {
        const float a0 = flush_subnormal(bits_float(a.v[i] << 16)), b0 = flush_subnormal(bits_float(b.v[i] << 16));
        const float a1 = flush_subnormal(bits_float(a.v[i] & 0xffff0000u));
        const float b1 = flush_subnormal(bits_float(b.v[i] & 0xffff0000u));
        acc.v[i] = flush_subnormal(__builtin_fmaf(a1, b1, flush_subnormal(acc.v[i])));
        acc.v[i] = flush_subnormal(__builtin_fmaf(a0, b0, acc.v[i]));
    }
    return acc;
}
#else
PACE_INLINE Pairs load_pairs(const BF16* p) { return {_mm512_loadu_si512(p)}; }
PACE_INLINE Pairs broadcast_pair(const BF16* p) {
    int32_t pair;
    memcpy(&pair, p, 4);
    return {_mm512_set1_epi32(pair)};
}
PACE_INLINE F32 dot_pairs(Pairs a, Pairs b, F32 acc) { return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)}; }
#endif
#endif

// kLanes quads of bytes at p.
#if PACE_ISA_EMULATED || PACE_ISA_LEVEL == 0
PACE_INLINE I32 dot_quads(I32 acc, const uint8_t* a, const int8_t* b) {
    int32_t sums[kLanes];
    memcpy(sums, &acc, sizeof sums);
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < 4; ++j) sums[i] += int32_t(a[4 * i + j]) * int32_t(b[4 * i + j]);
    memcpy(&acc, sums, sizeof sums);
    return acc;
}
#elif PACE_ISA_LEVEL == 1 && defined(PACE_ISA_VPDPBUSD)
PACE_INLINE I32 dot_quads(I32 acc, const uint8_t* a, const int8_t* b) {
    const __m256i codes = _mm256_loadu_si256((const __m256i*)a);
    __asm__(PACE_ISA_VPDPBUSD " %2, %1, %0" : "+x"(acc.v) : "x"(codes), "m"(*(const __m256i_u*)b));
    return acc;
}
#elif PACE_ISA_LEVEL == 1
PACE_INLINE I32 dot_quads(I32 acc, const uint8_t* a, const int8_t* b) {
    const __m256i pairs =
        _mm256_maddubs_epi16(_mm256_loadu_si256((const __m256i*)a), _mm256_loadu_si256((const __m256i*)b));
    return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
}
#elif PACE_ISA_LEVEL == 2
PACE_INLINE I32 dot_quads(I32 acc, const uint8_t* a, const int8_t* b) {
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
#else
PACE_INLINE I32 dot_quads(I32 acc, const uint8_t* a, const int8_t* b) {
    return {_mm512_dpbusd_epi32(acc.v, _mm512_loadu_si512(a), _mm512_loadu_si512(b))};
}
#endif
