// Rows of bf16 and of int8 as columns of pairs and quads: the operands of products that add up neighbours (vec_dot.inl,
// vec_bytes.inl). Attention uses them. Its cache stores rows of 16 elements side by side.
//
//   load_pair_rows(p, q)     16 pairs (p[i], q[i]). load_pair_rows<2>(p): q is p + 16; <1>: zeros.
//   load_pair_half(p, q, h)  the same from p + 16 h. Both halves of rows of 32 share their loads.
//   load_pairs_partial(p, n) the first n elements at p, then zeros; 0 <= n <= 32.
//   round_pairs(a, b)        the 32 lanes of a and b, rounded to nearest even; neighbours are pairs.
//   evens(p), odds(p)        the first and the second elements of pairs, as F32.
//   p & mask                 a pair keeps the bits of its lane.
//
//   load_quad_rows(p, stride)  16 quads (p[i], p[stride + i], p[2 stride + i], p[3 stride + i]); load_quad_half(.., h).
//   store_bytes_of(p, I32)     the lowest byte of each lane.
//   store_both_bytes(p, I32[4])  of numbers of 0 to 2^15 - 1: 64 low bytes, then 64 high ones.
//
// NUMERICS  round_pairs as vcvtne2ps2bf16: subnormals count as zero; NaN stays NaN.
#if PACE_ISA_LEVEL >= 4
#if PACE_ISA_EMULATED

PACE_INLINE Pairs load_pair_rows(const BF16* p, const BF16* q) {
    Pairs result;
    for (int i = 0; i < 16; ++i) result.v[i] = uint32_t(q[i].bits) << 16 | p[i].bits;
    return result;
}
PACE_INLINE Pairs load_pair_half(const BF16* p, const BF16* q, int half) {
    return load_pair_rows(p + 16 * half, q + 16 * half);
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
PACE_INLINE Pairs load_pair_half(const BF16* p, const BF16* q, int half) {
    alignas(64) static constexpr uint16_t kOrder[2][32] = {
        {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
         8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
         24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    return {_mm512_permutex2var_epi16(_mm512_loadu_si512(p), _mm512_load_si512(kOrder[half]), _mm512_loadu_si512(q))};
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
PACE_INLINE Bytes load_quad_half(const int8_t* p, int64_t stride, int half) {
    return load_quad_rows(p + 16 * half, stride);
}
PACE_INLINE void store_bytes_of(uint8_t* p, I32 a) {
    for (int i = 0; i < 16; ++i) p[i] = uint8_t(a.v[i]);
}
PACE_INLINE void store_both_bytes(uint8_t* p, const I32 (&a)[4]) {
    for (int i = 0; i < 64; ++i) {
        p[i] = uint8_t(a[i / 16].v[i % 16]);
        p[64 + i] = uint8_t(a[i / 16].v[i % 16] >> 8);
    }
}

#else

// Transposes four rows of four bytes in each 128 bits.
PACE_INLINE Bytes transposed_bytes(__m512i rows) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return {_mm512_shuffle_epi8(rows, order)};
}
// Transposes four rows of four quads.
PACE_INLINE __m512i transposed_quads(__m512i rows) {
    alignas(64) static constexpr int32_t kOrder[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return _mm512_permutexvar_epi32(_mm512_load_si512(kOrder), rows);
}
// Four rows of 16 bytes, one in each 128 bits: first the bytes of four columns move together.
PACE_INLINE Bytes transposed_rows(__m512i rows) { return transposed_bytes(transposed_quads(rows)); }
PACE_INLINE __m512i joined(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}
PACE_INLINE Bytes load_quad_rows(const int8_t* p, int64_t stride) {
    if (__builtin_constant_p(stride) && stride == 16) return transposed_rows(_mm512_loadu_si512(p));
    const auto two = [&](int i) __attribute__((always_inline)) {
        const __m128i first = _mm_loadu_si128((const __m128i*)(p + i * stride));
        return _mm256_inserti128_si256(_mm256_castsi128_si256(first),
                                       _mm_loadu_si128((const __m128i*)(p + (i + 1) * stride)), 1);
    };
    return transposed_rows(joined(two(0), two(2)));
}
PACE_INLINE Bytes load_quad_half(const int8_t* p, int64_t stride, int half) {
    alignas(64) static constexpr int32_t kOrder[2][16] = {{0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27},
                                                          {4, 12, 20, 28, 5, 13, 21, 29, 6, 14, 22, 30, 7, 15, 23, 31}};
    const auto row = [&](int i) __attribute__((always_inline)) {
        return _mm256_loadu_si256((const __m256i*)(p + i * stride));
    };
    return transposed_bytes(
        _mm512_permutex2var_epi32(joined(row(0), row(1)), _mm512_load_si512(kOrder[half]), joined(row(2), row(3))));
}
PACE_INLINE void store_bytes_of(uint8_t* p, I32 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a.v)); }
// Packing leaves four neighbours of each vector in each 128 bits.
PACE_INLINE void store_both_bytes(uint8_t* p, const I32 (&a)[4]) {
    const __m512i first = _mm512_packus_epi32(a[0].v, a[1].v), second = _mm512_packus_epi32(a[2].v, a[3].v);
    const __m512i mask = _mm512_set1_epi16(255);
    const __m512i low = _mm512_packus_epi16(_mm512_and_si512(first, mask), _mm512_and_si512(second, mask));
    const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
    _mm512_storeu_si512(p, transposed_quads(low));
    _mm512_storeu_si512(p + 64, transposed_quads(high));
}

#endif
#endif
