// vec.inl for SSE2, the baseline of x86-64: 4 lanes, no FMA, 16-bit floats by integer arithmetic.
constexpr int kLanes = 4;

struct F32 {
    __m128 v;
};
struct I32 {
    __m128i v;
};
struct Mask {
    __m128 v;
};

PACE_INLINE F32 broadcast(float f) { return {_mm_set1_ps(f)}; }
PACE_INLINE I32 broadcast_int(int32_t i) { return {_mm_set1_epi32(i)}; }
PACE_INLINE F32 load(const float* p) { return {_mm_loadu_ps(p)}; }
PACE_INLINE void store(float* p, F32 a) { _mm_storeu_ps(p, a.v); }

PACE_INLINE F32 operator+(F32 a, F32 b) { return {_mm_add_ps(a.v, b.v)}; }
PACE_INLINE F32 operator-(F32 a, F32 b) { return {_mm_sub_ps(a.v, b.v)}; }
PACE_INLINE F32 operator*(F32 a, F32 b) { return {_mm_mul_ps(a.v, b.v)}; }
PACE_INLINE F32 operator/(F32 a, F32 b) { return {_mm_div_ps(a.v, b.v)}; }
PACE_INLINE F32 fma(F32 a, F32 b, F32 c) { return {_mm_add_ps(_mm_mul_ps(a.v, b.v), c.v)}; }
PACE_INLINE F32 min(F32 a, F32 b) { return {_mm_min_ps(a.v, b.v)}; }
PACE_INLINE F32 max(F32 a, F32 b) { return {_mm_max_ps(a.v, b.v)}; }
PACE_INLINE F32 sqrt(F32 a) { return {_mm_sqrt_ps(a.v)}; }

PACE_INLINE Mask less(F32 a, F32 b) { return {_mm_cmplt_ps(a.v, b.v)}; }
PACE_INLINE Mask less_equal(F32 a, F32 b) { return {_mm_cmple_ps(a.v, b.v)}; }
PACE_INLINE Mask is_nan(F32 a) { return {_mm_cmpunord_ps(a.v, a.v)}; }
PACE_INLINE F32 select(Mask m, F32 a, F32 b) { return {_mm_or_ps(_mm_and_ps(m.v, a.v), _mm_andnot_ps(m.v, b.v))}; }
PACE_INLINE bool any(Mask m) { return _mm_movemask_ps(m.v) != 0; }
PACE_INLINE Mask operator&(Mask a, Mask b) { return {_mm_and_ps(a.v, b.v)}; }

PACE_INLINE I32 bits(F32 a) { return {_mm_castps_si128(a.v)}; }
PACE_INLINE F32 from_bits(I32 a) { return {_mm_castsi128_ps(a.v)}; }
PACE_INLINE I32 to_int(F32 a) { return {_mm_cvtps_epi32(a.v)}; }
PACE_INLINE F32 to_f32(I32 a) { return {_mm_cvtepi32_ps(a.v)}; }
PACE_INLINE I32 operator+(I32 a, I32 b) { return {_mm_add_epi32(a.v, b.v)}; }
PACE_INLINE I32 operator-(I32 a, I32 b) { return {_mm_sub_epi32(a.v, b.v)}; }
PACE_INLINE I32 operator&(I32 a, I32 b) { return {_mm_and_si128(a.v, b.v)}; }
PACE_INLINE I32 operator|(I32 a, I32 b) { return {_mm_or_si128(a.v, b.v)}; }
PACE_INLINE I32 operator^(I32 a, I32 b) { return {_mm_xor_si128(a.v, b.v)}; }
template <int n>
PACE_INLINE I32 shift_left(I32 a) {
    return {_mm_slli_epi32(a.v, n)};
}
template <int n>
PACE_INLINE I32 shift_right(I32 a) {
    return {_mm_srli_epi32(a.v, n)};
}

PACE_INLINE int store_where(int32_t* p, I32 a, Mask m) {
    const int set = _mm_movemask_ps(m.v);
    int count = 0;
    if (set == 0) return count;
    int32_t lanes[4];
    _mm_storeu_si128((__m128i*)lanes, a.v);
    for (int i = 0; i < 4; ++i) {
        p[count] = lanes[i];  // no branch: it would be mispredicted half of the time
        count += set >> i & 1;
    }
    return count;
}

PACE_INLINE float reduce_add(F32 a) {
    const __m128 pairs = _mm_add_ps(a.v, _mm_movehl_ps(a.v, a.v));
    return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}
PACE_INLINE float reduce_max(F32 a) {
    const __m128 pairs = _mm_max_ps(a.v, _mm_movehl_ps(a.v, a.v));
    return _mm_cvtss_f32(_mm_max_ss(pairs, _mm_shuffle_ps(pairs, pairs, 1)));
}

PACE_INLINE F32 load_partial(const float* p, int n) {
    float buffer[4] = {};
    for (int i = 0; i < n; ++i) buffer[i] = p[i];
    return load(buffer);
}
PACE_INLINE void store_partial(float* p, F32 a, int n) {
    float buffer[4];
    store(buffer, a);
    for (int i = 0; i < n; ++i) p[i] = buffer[i];
}

PACE_INLINE F32 load(const BF16* p) {
    const __m128i half = _mm_loadl_epi64((const __m128i*)p);
    return {_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_setzero_si128(), half))};
}
PACE_INLINE F32 load(const F16* p) {
    // As to_float(F16) of convert.h.
    const __m128i half = _mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)p), _mm_setzero_si128());
    const __m128i magnitude = _mm_slli_epi32(_mm_and_si128(half, _mm_set1_epi32(0x7fff)), 13);
    const __m128i sign = _mm_slli_epi32(_mm_and_si128(half, _mm_set1_epi32(0x8000)), 16);
    const __m128i special =
        _mm_and_si128(_mm_cmpgt_epi32(magnitude, _mm_set1_epi32((0x7c00 << 13) - 1)), _mm_set1_epi32(0x7f800000));
    const __m128 scaled = _mm_mul_ps(_mm_castsi128_ps(magnitude), _mm_set1_ps(0x1p112f));
    return {_mm_or_ps(scaled, _mm_castsi128_ps(_mm_or_si128(special, sign)))};
}
PACE_INLINE F32 load(const int8_t* p) {
    int32_t bytes;
    memcpy(&bytes, p, sizeof bytes);
    const __m128i four = _mm_cvtsi32_si128(bytes), pairs = _mm_unpacklo_epi8(four, four);
    return {_mm_cvtepi32_ps(_mm_srai_epi32(_mm_unpacklo_epi16(pairs, pairs), 24))};
}
PACE_INLINE void store(BF16* p, F32 a) {
    float buffer[4];
    store(buffer, a);
    for (int i = 0; i < 4; ++i) from_float(buffer[i], p[i]);
}
PACE_INLINE void store(F16* p, F32 a) {
    float buffer[4];
    store(buffer, a);
    for (int i = 0; i < 4; ++i) from_float(buffer[i], p[i]);
}
PACE_INLINE void store(int16_t* p, F32 a) {
    const __m128i v = to_int(a).v;
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi32(v, v));
}
PACE_INLINE void store(int8_t* p, F32 a) {
    const __m128i v = to_int(a).v, shorts = _mm_packs_epi32(v, v);
    const int32_t four = _mm_cvtsi128_si32(_mm_packs_epi16(shorts, shorts));
    memcpy(p, &four, sizeof four);
}
