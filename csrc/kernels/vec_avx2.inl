// vec.inl for AVX2 + FMA + F16C: 8 lanes.
constexpr int kLanes = 8;

struct F32 {
    __m256 v;
};
struct I32 {
    __m256i v;
};
struct Mask {
    __m256 v;
};

PACE_INLINE F32 broadcast(float f) { return {_mm256_set1_ps(f)}; }
PACE_INLINE I32 broadcast_int(int32_t i) { return {_mm256_set1_epi32(i)}; }
PACE_INLINE F32 load(const float* p) { return {_mm256_loadu_ps(p)}; }
PACE_INLINE void store(float* p, F32 a) { _mm256_storeu_ps(p, a.v); }

PACE_INLINE F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.v, b.v)}; }
PACE_INLINE F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.v, b.v)}; }
PACE_INLINE F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.v, b.v)}; }
PACE_INLINE F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.v, b.v)}; }
PACE_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
PACE_INLINE F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.v, b.v)}; }
PACE_INLINE F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.v, b.v)}; }
PACE_INLINE F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.v)}; }

PACE_INLINE Mask less(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)}; }
PACE_INLINE Mask less_equal(F32 a, F32 b) { return {_mm256_cmp_ps(a.v, b.v, _CMP_LE_OQ)}; }
PACE_INLINE Mask is_nan(F32 a) { return {_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q)}; }
PACE_INLINE F32 select(Mask m, F32 a, F32 b) { return {_mm256_blendv_ps(b.v, a.v, m.v)}; }
PACE_INLINE bool any(Mask m) { return _mm256_movemask_ps(m.v) != 0; }
PACE_INLINE Mask operator&(Mask a, Mask b) { return {_mm256_and_ps(a.v, b.v)}; }

PACE_INLINE I32 bits(F32 a) { return {_mm256_castps_si256(a.v)}; }
PACE_INLINE F32 from_bits(I32 a) { return {_mm256_castsi256_ps(a.v)}; }
PACE_INLINE I32 to_int(F32 a) { return {_mm256_cvtps_epi32(a.v)}; }
PACE_INLINE F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.v)}; }
PACE_INLINE I32 operator+(I32 a, I32 b) { return {_mm256_add_epi32(a.v, b.v)}; }
PACE_INLINE I32 operator-(I32 a, I32 b) { return {_mm256_sub_epi32(a.v, b.v)}; }
PACE_INLINE I32 operator&(I32 a, I32 b) { return {_mm256_and_si256(a.v, b.v)}; }
PACE_INLINE I32 operator|(I32 a, I32 b) { return {_mm256_or_si256(a.v, b.v)}; }
PACE_INLINE I32 operator^(I32 a, I32 b) { return {_mm256_xor_si256(a.v, b.v)}; }
template <int n>
PACE_INLINE I32 shift_left(I32 a) {
    return {_mm256_slli_epi32(a.v, n)};
}
template <int n>
PACE_INLINE I32 shift_right(I32 a) {
    return {_mm256_srli_epi32(a.v, n)};
}

// The lane numbers of each set of lanes, a byte each.
struct LaneLists {
    uint64_t of[256];
    constexpr LaneLists() : of() {
        for (int set = 0; set < 256; ++set) {
            for (int lane = 0, place = 0; lane < 8; ++lane) {
                if (set >> lane & 1) of[set] |= uint64_t(lane) << 8 * place++;
            }
        }
    }
};
PACE_INLINE int store_where(int32_t* p, I32 a, Mask m) {
    static constexpr LaneLists kLists;
    const int set = _mm256_movemask_ps(m.v);
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&kLists.of[set]));
    _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(a.v, lanes));
    return __builtin_popcount(unsigned(set));
}

PACE_INLINE float reduce_add(F32 a) {
    const __m128 quads = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 pairs = _mm_add_ps(quads, _mm_movehl_ps(quads, quads));
    return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}
PACE_INLINE float reduce_max(F32 a) {
    const __m128 quads = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    const __m128 pairs = _mm_max_ps(quads, _mm_movehl_ps(quads, quads));
    return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}

// A mask with all ones in the lanes below n.
PACE_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
PACE_INLINE F32 load_partial(const float* p, int n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
PACE_INLINE void store_partial(float* p, F32 a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }

PACE_INLINE F32 load(const BF16* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16))};
}
PACE_INLINE F32 load(const F16* p) { return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p))}; }
PACE_INLINE F32 load(const int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)))};
}
PACE_INLINE void store(BF16* p, F32 a) {
    // As from_float(BF16) of convert.h. The NaN mask sets a mantissa bit that survives the cut.
    const __m256i raw = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(raw, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(raw, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(raw, _mm256_set1_epi32(0x400000));
    const __m256i high = _mm256_srli_epi32(
        _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), is_nan(a).v)),
        16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
}
PACE_INLINE void store(F16* p, F32 a) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
PACE_INLINE __m128i to_shorts(F32 a) {
    const __m256i v = to_int(a).v;
    return _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
}
PACE_INLINE void store(int16_t* p, F32 a) { _mm_storeu_si128((__m128i*)p, to_shorts(a)); }
PACE_INLINE void store(int8_t* p, F32 a) {
    const __m128i shorts = to_shorts(a);
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(shorts, shorts));
}
