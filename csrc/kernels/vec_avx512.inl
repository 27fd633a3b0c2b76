// vec.inl for AVX-512 F, BW, DQ, VL: 16 lanes.
constexpr int kLanes = 16;

struct F32 {
    __m512 v;
};
struct I32 {
    __m512i v;
};
struct Mask {
    __mmask16 v;
};

PACE_INLINE F32 broadcast(float f) { return {_mm512_set1_ps(f)}; }
PACE_INLINE I32 broadcast_int(int32_t i) { return {_mm512_set1_epi32(i)}; }
PACE_INLINE F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
PACE_INLINE void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }

PACE_INLINE F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
PACE_INLINE F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
PACE_INLINE F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
PACE_INLINE F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
PACE_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
PACE_INLINE F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
PACE_INLINE F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
PACE_INLINE F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.v)}; }

PACE_INLINE Mask less(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
PACE_INLINE Mask less_equal(F32 a, F32 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LE_OQ)}; }
PACE_INLINE Mask is_nan(F32 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
PACE_INLINE F32 select(Mask m, F32 a, F32 b) { return {_mm512_mask_blend_ps(m.v, b.v, a.v)}; }
PACE_INLINE bool any(Mask m) { return m.v != 0; }
PACE_INLINE Mask operator&(Mask a, Mask b) { return {(__mmask16)(a.v & b.v)}; }

PACE_INLINE I32 bits(F32 a) { return {_mm512_castps_si512(a.v)}; }
PACE_INLINE F32 from_bits(I32 a) { return {_mm512_castsi512_ps(a.v)}; }
PACE_INLINE I32 to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
PACE_INLINE F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
PACE_INLINE I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
PACE_INLINE I32 operator-(I32 a, I32 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
PACE_INLINE I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.v, b.v)}; }
PACE_INLINE I32 operator|(I32 a, I32 b) { return {_mm512_or_si512(a.v, b.v)}; }
PACE_INLINE I32 operator^(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int n>
PACE_INLINE I32 shift_left(I32 a) {
    return {_mm512_slli_epi32(a.v, n)};
}
template <int n>
PACE_INLINE I32 shift_right(I32 a) {
    return {_mm512_srli_epi32(a.v, n)};
}

// Compresses in a register: the instruction is microcoded on Zen if it writes to memory.
PACE_INLINE int store_where(int32_t* p, I32 a, Mask m) {
    _mm512_storeu_si512(p, _mm512_maskz_compress_epi32(m.v, a.v));
    return __builtin_popcount(m.v);
}

PACE_INLINE float reduce_add(F32 a) {
    const __m256 eights = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 quads = _mm_add_ps(_mm256_castps256_ps128(eights), _mm256_extractf128_ps(eights, 1));
    const __m128 pairs = _mm_add_ps(quads, _mm_movehl_ps(quads, quads));
    return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}
PACE_INLINE float reduce_max(F32 a) {
    const __m256 eights = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    const __m128 quads = _mm_max_ps(_mm256_castps256_ps128(eights), _mm256_extractf128_ps(eights, 1));
    const __m128 pairs = _mm_max_ps(quads, _mm_movehl_ps(quads, quads));
    return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}

PACE_INLINE __mmask16 first_lanes(int n) { return (__mmask16)((1u << n) - 1); }
PACE_INLINE F32 load_partial(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
PACE_INLINE void store_partial(float* p, F32 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

PACE_INLINE F32 load(const BF16* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
PACE_INLINE F32 load(const F16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
PACE_INLINE F32 load(const int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
PACE_INLINE void store(BF16* p, F32 a) {
    // Not vcvtneps2bf16: it flushes subnormals, and torch does not. As from_float(BF16) of convert.h.
    const __m512i raw = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(raw, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(raw, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i kept = _mm512_mask_or_epi32(rounded, is_nan(a).v, raw, _mm512_set1_epi32(0x400000));
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
PACE_INLINE void store(F16* p, F32 a) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PACE_INLINE void store(int8_t* p, F32 a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(to_int(a).v)); }
PACE_INLINE void store(int16_t* p, F32 a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(to_int(a).v)); }
