// The vector wrapper that all kernels use.
//
// One file per width defines the same small set of types and functions; PACE_ISA_LEVEL selects the file:
//
//   level 0  generic       4 lanes   vec_sse2.inl       no FMA: fma(a, b, c) rounds twice.
//   level 1  avx2...       8 lanes   vec_avx2.inl.
//   level 2+ avx512...    16 lanes   vec_avx512.inl.
//   emulated              16 lanes   vec_emulated.inl   plain C++, same results as level 2+ bit for bit.
//
// Types: F32 (kLanes floats), I32 (kLanes int32), Mask (kLanes booleans).
//
// Names: `x_partial(.., n)` accesses only the first n lanes in memory, 0 <= n <= kLanes; lanes past n load as zero.
//
//   zero() broadcast(f) load(p) load_partial(p, n) store(p, v) store_partial(p, v, n).
//       p is an unaligned pointer to float, BF16, F16 or int8_t; for store() also int16_t.
//   + - * /   fma(a, b, c) = a * b + c   min max sqrt   (min and max give b if either is NaN).
//
//   less(a, b) less_equal(a, b) is_nan(a) -> Mask;  select(m, a, b) = m ? a : b;  any(m)  m & m.
//
//   store_where(p, I32, m): the lanes of m one after the other; returns their number. May write all of p[0 .. kLanes).
//
//   bits(F32) -> I32, from_bits(I32) -> F32;  to_int (ties to even), to_f32.
//   I32: + - & | ^, shift_left<n>, shift_right<n>.
//   reduce_add(v), reduce_max(v): always the same tree, halves added first.
//
// Stores to BF16 and F16 round to nearest even and keep NaN. Stores to integers round to nearest even; numbers must
// fit.

// The emulated tables serve only tests. Calls are fast enough there. They compile in a third of the time, under
// sanitizers in a tenth.
#undef PACE_INLINE
#if PACE_ISA_EMULATED
#define PACE_INLINE static inline __attribute__((noinline))
#else
#define PACE_INLINE static inline __attribute__((always_inline))
#endif

// PACE_EACH(i, n): a loop over 0 <= i < n, unrolled completely; n is a constant of at most 16.
#define PACE_EACH(i, n) _Pragma("GCC unroll 16") for (int i = 0; i < (n); ++i)

#if PACE_ISA_EMULATED
#include "vec_emulated.inl"
#elif PACE_ISA_LEVEL >= 2
#include "vec_avx512.inl"
#elif PACE_ISA_LEVEL == 1
#include "vec_avx2.inl"
#else
#include "vec_sse2.inl"
#endif

PACE_INLINE F32 zero() { return broadcast(0.0f); }
PACE_INLINE F32 abs(F32 a) { return from_bits(bits(a) & broadcast_int(0x7fffffff)); }
PACE_INLINE F32 negate(F32 a) { return from_bits(bits(a) + broadcast_int(INT32_MIN)); }

// magnitude >= 0 with the sign bit of `sign`.
PACE_INLINE F32 copy_sign(F32 magnitude, F32 sign) {
    return from_bits(bits(magnitude) | (bits(sign) & broadcast_int(INT32_MIN)));
}

// 2^n for integers n in [-126, 127].
PACE_INLINE F32 power_of_two(I32 n) { return from_bits(shift_left<23>(n + broadcast_int(127))); }

// Partial vectors of short elements go through a small buffer. Tails are rare, and no byte past p[n - 1] is accessed.
template <class T>
PACE_INLINE F32 load_partial(const T* p, int n) {
    T buffer[kLanes] = {};
    for (int i = 0; i < n; ++i) buffer[i] = p[i];
    return load(buffer);
}

template <class T>
PACE_INLINE void store_partial(T* p, F32 v, int n) {
    T buffer[kLanes];
    store(buffer, v);
    for (int i = 0; i < n; ++i) p[i] = buffer[i];
}

// Loads n lanes, usually all of them. store_lanes() does the same because a masked store is microcoded on Zen, a plain
// one is not.
template <class T>
PACE_INLINE F32 load_lanes(const T* p, int n) {
    return n == kLanes ? load(p) : load_partial(p, n);
}

template <class T>
PACE_INLINE void store_lanes(T* p, F32 v, int n) {
    if (n == kLanes) {
        store(p, v);
    } else {
        store_partial(p, v, n);
    }
}

// 0, 1, 2, ...
PACE_INLINE F32 lane_numbers() {
    alignas(64) static constexpr float kNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(kNumbers);
}
