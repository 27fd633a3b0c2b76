// vec.inl in plain C++: the 16 lanes of AVX-512 on any machine, for tests of the wide tiling, packing and tail code.
constexpr int kLanes = 16;

struct F32 {
    float v[16];
};
struct I32 {
    int32_t v[16];
};
struct Mask {
    bool v[16];
};

// One operation on every lane; `expression` may use the lane number i.
#define PACE_LANES(Type, expression)                         \
    Type result;                                             \
    for (int i = 0; i < 16; ++i) result.v[i] = (expression); \
    return result

PACE_INLINE F32 broadcast(float f) { PACE_LANES(F32, f); }
PACE_INLINE I32 broadcast_int(int32_t n) { PACE_LANES(I32, n); }
template <class T>
PACE_INLINE F32 load(const T* p) {
    PACE_LANES(F32, to_float(p[i]));
}
template <class T>
PACE_INLINE void store(T* p, F32 a) {
    for (int i = 0; i < 16; ++i) from_float(a.v[i], p[i]);
}

PACE_INLINE F32 operator+(F32 a, F32 b) { PACE_LANES(F32, a.v[i] + b.v[i]); }
PACE_INLINE F32 operator-(F32 a, F32 b) { PACE_LANES(F32, a.v[i] - b.v[i]); }
PACE_INLINE F32 operator*(F32 a, F32 b) { PACE_LANES(F32, a.v[i] * b.v[i]); }
PACE_INLINE F32 operator/(F32 a, F32 b) { PACE_LANES(F32, a.v[i] / b.v[i]); }
PACE_INLINE F32 fma(F32 a, F32 b, F32 c) { PACE_LANES(F32, __builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
PACE_INLINE F32 min(F32 a, F32 b) { PACE_LANES(F32, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
PACE_INLINE F32 max(F32 a, F32 b) { PACE_LANES(F32, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
PACE_INLINE F32 sqrt(F32 a) { PACE_LANES(F32, __builtin_sqrtf(a.v[i])); }

PACE_INLINE Mask less(F32 a, F32 b) { PACE_LANES(Mask, a.v[i] < b.v[i]); }
PACE_INLINE Mask less_equal(F32 a, F32 b) { PACE_LANES(Mask, a.v[i] <= b.v[i]); }
PACE_INLINE Mask is_nan(F32 a) { PACE_LANES(Mask, a.v[i] != a.v[i]); }
PACE_INLINE F32 select(Mask m, F32 a, F32 b) { PACE_LANES(F32, m.v[i] ? a.v[i] : b.v[i]); }
PACE_INLINE bool any(Mask m) {
    bool found = false;
    for (int i = 0; i < 16; ++i) found |= m.v[i];
    return found;
}

PACE_INLINE Mask operator&(Mask a, Mask b) { PACE_LANES(Mask, a.v[i] && b.v[i]); }
PACE_INLINE int store_where(int32_t* p, I32 a, Mask m) {
    int count = 0;
    for (int i = 0; i < 16; ++i) {
        if (m.v[i]) p[count++] = a.v[i];
    }
    return count;
}

PACE_INLINE I32 bits(F32 a) { PACE_LANES(I32, (int32_t)float_bits(a.v[i])); }
PACE_INLINE F32 from_bits(I32 a) { PACE_LANES(F32, bits_float((uint32_t)a.v[i])); }
PACE_INLINE F32 to_f32(I32 a) { PACE_LANES(F32, (float)a.v[i]); }
// Like cvtss2si: ties to even; NaN and numbers that do not fit give INT32_MIN, as the wide instruction.
PACE_INLINE I32 to_int(F32 a) { PACE_LANES(I32, _mm_cvtss_si32(_mm_set_ss(a.v[i]))); }
PACE_INLINE I32 operator+(I32 a, I32 b) { PACE_LANES(I32, (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i])); }
PACE_INLINE I32 operator-(I32 a, I32 b) { PACE_LANES(I32, (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i])); }
PACE_INLINE I32 operator&(I32 a, I32 b) { PACE_LANES(I32, a.v[i] & b.v[i]); }
PACE_INLINE I32 operator|(I32 a, I32 b) { PACE_LANES(I32, a.v[i] | b.v[i]); }
PACE_INLINE I32 operator^(I32 a, I32 b) { PACE_LANES(I32, a.v[i] ^ b.v[i]); }
template <int n>
PACE_INLINE I32 shift_left(I32 a) {
    PACE_LANES(I32, (int32_t)((uint32_t)a.v[i] << n));
}
template <int n>
PACE_INLINE I32 shift_right(I32 a) {
    PACE_LANES(I32, (int32_t)((uint32_t)a.v[i] >> n));
}

PACE_INLINE float reduce_add(F32 a) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
    return a.v[0];
}
PACE_INLINE float reduce_max(F32 a) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
    return a.v[0];
}

PACE_INLINE void store(int8_t* p, F32 a) {
    const I32 rounded = to_int(a);
    for (int i = 0; i < 16; ++i) p[i] = int8_t(rounded.v[i]);
}
PACE_INLINE void store(int16_t* p, F32 a) {
    const I32 rounded = to_int(a);
    for (int i = 0; i < 16; ++i) p[i] = int16_t(rounded.v[i]);
}

#undef PACE_LANES
