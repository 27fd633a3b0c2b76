// Rows of bf16 and of int8 as columns of pairs and quads: the operands of products that add up neighbours (vec_dot.inl,
// vec_bytes.inl). Attention uses them. Its cache stores rows of 16 elements side by side.
//
//   load_pair_rows(p, q)     16 pairs (p[i], q[i]).     load_pair_rows(p): q is p + 16, or zeros with one row.
//   load_pairs_partial(p, n) the first n elements at p, then zeros; 0 <= n <= 32.
//   round_pairs(a, b)        the 32 lanes of a and b, rounded to nearest even; neighbours are pairs.
//   evens(p), odds(p)        the first and the second elements of pairs, as F32.
//   p & mask                 a pair keeps the bits of its lane.
//
//   load_quad_rows(p, stride)  16 quads (p[i], p[stride + i], p[2 stride + i], p[3 stride + i]).
//   store_bytes_of(p, I32)     the lowest byte of each lane.
//
// NUMERICS  round_pairs as vcvtne2ps2bf16: subnormals count as zero; NaN stays NaN.
#if PACE_ISA_LEVEL >= 4
#if PACE_ISA_EMULATED

PACE_INLINE Pairs load_pair_rows(const BF16* p, const BF16* q) {
    Pairs result;
    for (int i = 0; i < 16; ++i) result.v[i] = uint32_t(q[i].bits) << 16 | p[i].bits;
    return result;
}
template <int kRows>
PACE_INLINE Pairs load_pair_rows(const BF16* p) {
    Pairs result;
    for (int i = 0; i < 16; ++i) result.v[i] = uint32_t(kRows == 2 ? p[16 + i].bits : 0) << 16 | p[i].bits;
    return result;
}
PACE_INLINE Pairs load_pairs_partial(const BF16* p, int n) {
    BF16 elements[32] = {};
    for (int i = 0; i < n; ++i) elements[i] = p[i];
    return load_pairs(elements);
}
PACE_INLINE Pairs round_pairs(F32 a, F32 b) {
    BF16 elements[32];
    for (int i = 0; i < 16; ++i) {
        from_float(flush_subnormal(a.v[i]), elements[i]);
        from_float(flush_subnormal(b.v[i]), elements[16 + i]);
    }
    return load_pairs(elements);
}
PACE_INLINE F32 evens(Pairs a) {
    F32 result;
    for (int i = 0; i < 16; ++i) result.v[i] = bits_float(a.v[i] << 16);
    return result;
}
PACE_INLINE F32 odds(Pairs a) {
    F32 result;
    for (int i = 0; i < 16; ++i) result.v[i] = bits_float(a.v[i] & 0xffff0000u);
    return result;
}
PACE_INLINE Pairs operator&(Pairs a, I32 mask) {
    for (int i = 0; i < 16; ++i) a.v[i] &= uint32_t(mask.v[i]);
    return a;
}
PACE_INLINE void store_pairs(void* p, Pairs a) { memcpy(p, a.v, sizeof a.v); }

#else

// The order that takes two rows of 16, one after the other, to pairs.
PACE_INLINE __m512i interleaved(__m512i rows) {
    alignas(64) static constexpr uint16_t kOrder[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), rows);
}
PACE_INLINE Pairs load_pair_rows(const BF16* p, const BF16* q) {
    const __m512i first = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
    return {interleaved(_mm512_inserti64x4(first, _mm256_loadu_si256((const __m256i*)q), 1))};
}
template <int kRows>
PACE_INLINE Pairs load_pair_rows(const BF16* p) {
    if constexpr (kRows == 2) return {interleaved(_mm512_loadu_si512(p))};
    return {_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p))};
}
PACE_INLINE Pairs load_pairs_partial(const BF16* p, int n) {
    return {_mm512_maskz_loadu_epi16((__mmask32)((uint64_t(1) << n) - 1), p)};
}
PACE_INLINE Pairs round_pairs(F32 a, F32 b) { return {(__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)}; }
PACE_INLINE F32 evens(Pairs a) { return {_mm512_castsi512_ps(_mm512_slli_epi32(a.v, 16))}; }
PACE_INLINE F32 odds(Pairs a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(a.v, _mm512_set1_epi32((int)0xffff0000)))};
}
PACE_INLINE Pairs operator&(Pairs a, I32 mask) { return {_mm512_and_si512(a.v, mask.v)}; }
PACE_INLINE void store_pairs(void* p, Pairs a) { _mm512_storeu_si512(p, a.v); }

#endif
#endif

// Tables whose attention multiplies int8 as it is stored.
#undef PACE_HAS_QUADS
#if PACE_HAS_VNNI && PACE_ISA_LEVEL >= 3
#define PACE_HAS_QUADS 1
#else
#define PACE_HAS_QUADS 0
#endif

#if PACE_HAS_QUADS
#if PACE_ISA_EMULATED

PACE_INLINE Bytes load_quad_rows(const int8_t* p, int64_t stride) {
    Bytes result;
    for (int i = 0; i < 64; ++i) result.v[i] = uint8_t(p[i % 4 * stride + i / 4]);
    return result;
}
PACE_INLINE void store_bytes_of(uint8_t* p, I32 a) {
    for (int i = 0; i < 16; ++i) p[i] = uint8_t(a.v[i]);
}

#else

// Four rows of 16 bytes, one in each 128 bits: first quads of columns move together, then each four rows of four bytes
// are transposed.
PACE_INLINE Bytes transposed_rows(__m512i rows) {
    alignas(64) static constexpr int32_t kOrder[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const __m512i bytes = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return {_mm512_shuffle_epi8(_mm512_permutexvar_epi32(_mm512_load_si512(kOrder), rows), bytes)};
}
PACE_INLINE Bytes load_quad_rows(const int8_t* p, int64_t stride) {
    if (__builtin_constant_p(stride) && stride == 16) return transposed_rows(_mm512_loadu_si512(p));
    const auto row = [&](int i) __attribute__((always_inline)) {
        return _mm_loadu_si128((const __m128i*)(p + i * stride));
    };
    const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(row(0)), row(1), 1);
    const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(row(2)), row(3), 1);
    return transposed_rows(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}
PACE_INLINE void store_bytes_of(uint8_t* p, I32 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }

#endif
#endif
