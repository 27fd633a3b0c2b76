// Bytes and nibbles of quantised weights, and their exact products with bytes of an input.
//
//   Bytes      4 kLanes bytes; a lane is four k of one output.
//
//              load_bytes(p), store_bytes(p, b), aligned on level 1; low_nibbles, high_nibbles: 0..15.
//              Lookup(table)(b) = table[b] for bytes b of 0..15.
//
//   of_signed(Bytes)   Any int8, as a Factor for products.
//   of_nibbles(Bytes)  Values 0..15, as Nibbles for products. Up to 63 are allowed if a 16-bit NibbleSum takes fewer of
//                      them.
//
//   store_unpacked(p, Bytes of int8), load_unpacked(p)  Unpacked, of kUnpackedBytes for a panel's four k. On most
//                                                       tables it is a Factor.
//
//   broadcast_input(p)  The four inputs at p, -127..127, for every lane. A Factor and Nibbles multiply InputCodes.
//                       Unpacked multiplies UnpackedInputCodes: int8, or int16 from spread_inputs().
//
//   dot(sum, Factor, input)    SignedSum + the sum of (w + kSignedOffset) x over the four.
//   dot(sum, Nibbles, input)   NibbleSum + the sum of w x. Levels are w - offset, so an initial value of -offset * (sum
//                              of x) gives the sum of levels.
//
//   dot(sum, Unpacked, input)  With kPairsOfProducts: sum + the sum of w x + own_products() of the weights +
//                              own_products() of the inputs.
//
//   AddLanes<Sum>()(acc, sum)  acc + the total of a sum, one number for each lane. A NibbleSum can hold kNibbleSumK of
//                              k. Sums begin as zeros.
//
// NUMERICS     Exact for all of these numbers:
//
//   level 0      Inputs and weights are 16 bits: pmaddwd adds two products in 32 bits, and a pair of 32-bit lanes makes
//                an output.
//
//   level 1      Nibbles: maddubs multiplies unsigned with signed bytes and adds two products in 16 bits, 2 * 15 * 127.
//                Eight of those (32 of k) add up to 30480. Signed weights: maddubs multiplies |w| by x with the sign of
//                w, at most 2 * 128 * 127 = 32512.
//
//                Unpacked weights: 16 bits and pmaddwd. The even bytes of a lane and the odd ones are separate.
//                Winograd's identity ("A New Algorithm for Inner Product", 1968) halves the products. It multiplies
//                sums of a weight and an input.
//
//                  (w0 + x1) (w1 + x0) = w0 x0 + w1 x1 + w0 w1 + x1 x0
//
//                own_products() computes the last two terms once for each group, separately for weights and inputs.
//                Replacing a product by an addition saves no instruction, but four units add and two multiply.
//                |w + x| <= 255, and their products over a group of kInputGroup k add up to less than 2^23.
//
//   level 2      As level 1, but Unpacked weights are like signed ones.
//   level 3+     vpdpbusd adds four products of an unsigned and a signed byte in 32 bits: w + 128, or the nibble. Level
//                1 does so too if the isa/*.cpp names the instruction: PACE_ISA_VPDPBUSD.
template <class Sum>
struct AddLanes;
#undef PACE_HAS_VNNI
#if PACE_ISA_EMULATED || PACE_ISA_LEVEL >= 3 || defined(PACE_ISA_VPDPBUSD)
#define PACE_HAS_VNNI 1
#else
#define PACE_HAS_VNNI 0
#endif

#if PACE_ISA_EMULATED

struct Bytes {
    uint8_t v[64];
};
using Input = Bytes;
using Factor = Bytes;
using Nibbles = Bytes;

PACE_INLINE Bytes load_bytes(const void* p) {
    Bytes result;
    memcpy(result.v, p, sizeof result.v);
    return result;
}
PACE_INLINE void store_bytes(void* p, Bytes a) { memcpy(p, a.v, sizeof a.v); }
PACE_INLINE Bytes low_nibbles(Bytes a) {
    for (int i = 0; i < 64; ++i) a.v[i] &= 15;
    return a;
}
PACE_INLINE Bytes high_nibbles(Bytes a) {
    for (int i = 0; i < 64; ++i) a.v[i] >>= 4;
    return a;
}
struct Lookup {
    int8_t table[16];
    explicit Lookup(const int8_t* levels) { memcpy(table, levels, sizeof table); }
    Bytes operator()(Bytes a) const {
        for (int i = 0; i < 64; ++i) a.v[i] = uint8_t(table[a.v[i]]);
        return a;
    }
};
PACE_INLINE Input broadcast_input(const int8_t* p) {
    Input result;
    for (int i = 0; i < 64; i += 4) memcpy(result.v + i, p, 4);
    return result;
}
PACE_INLINE Factor of_signed(Bytes a) {
    for (int i = 0; i < 64; ++i) a.v[i] ^= 0x80;
    return a;
}
PACE_INLINE Factor of_nibbles(Bytes a) { return a; }
PACE_INLINE I32 dot(I32 acc, Factor w, Input x) {
    for (int i = 0; i < 64; ++i) acc.v[i / 4] += int32_t(w.v[i]) * int32_t(int8_t(x.v[i]));
    return acc;
}

#elif PACE_ISA_LEVEL >= 2

struct Bytes {
    __m512i v;
};
using Nibbles = Bytes;

PACE_INLINE Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
PACE_INLINE void store_bytes(void* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
PACE_INLINE Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
PACE_INLINE Bytes high_nibbles(Bytes a) { return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))}; }
struct Lookup {
    __m512i table;
    explicit Lookup(const int8_t* levels) : table(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)levels))) {}
    Bytes operator()(Bytes a) const { return {_mm512_shuffle_epi8(table, a.v)}; }
};
PACE_INLINE Bytes broadcast_input(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return {_mm512_set1_epi32(four)};
}
PACE_INLINE Nibbles of_nibbles(Bytes a) { return a; }

#if PACE_ISA_LEVEL >= 3
using Factor = Bytes;
PACE_INLINE Factor of_signed(Bytes a) { return {_mm512_xor_si512(a.v, _mm512_set1_epi8((char)0x80))}; }
// Assembly, because g++ 12 copies the sums of a tile to other registers and back for each four k.
PACE_INLINE I32 dot(I32 sum, Factor w, Bytes x) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum.v) : "v"(w.v), "v"(x.v));
    return sum;
}
#else
struct Factor {
    __m512i magnitude;
    __mmask64 negative;
};
PACE_INLINE Factor of_signed(Bytes a) { return {_mm512_abs_epi8(a.v), _mm512_movepi8_mask(a.v)}; }
PACE_INLINE I32 dot(I32 acc, Factor w, Bytes x) {
    const __m512i with_sign = _mm512_mask_sub_epi8(x.v, w.negative, _mm512_setzero_si512(), x.v);
    const __m512i pairs = _mm512_maddubs_epi16(w.magnitude, with_sign);
    return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
struct Shorts {
    __m512i v;
};
PACE_INLINE Shorts dot(Shorts sum, Nibbles w, Bytes x) {
    return {_mm512_add_epi16(sum.v, _mm512_maddubs_epi16(w.v, x.v))};
}
template <>
struct AddLanes<Shorts> {
    I32 operator()(I32 acc, Shorts a) const {
        return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(a.v, _mm512_set1_epi16(1)))};
    }
};
#endif

#elif PACE_ISA_LEVEL == 1

struct Bytes {
    __m256i v;
};
using Nibbles = Bytes;

PACE_INLINE Bytes load_bytes(const void* p) { return {_mm256_loadu_si256((const __m256i*)p)}; }
PACE_INLINE void store_bytes(void* p, Bytes a) { _mm256_store_si256((__m256i*)p, a.v); }
PACE_INLINE Bytes low_nibbles(Bytes a) { return {_mm256_and_si256(a.v, _mm256_set1_epi8(15))}; }
PACE_INLINE Bytes high_nibbles(Bytes a) { return {_mm256_and_si256(_mm256_srli_epi16(a.v, 4), _mm256_set1_epi8(15))}; }
struct Lookup {
    __m256i table;
    explicit Lookup(const int8_t* levels)
        : table(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)levels))) {}
    Bytes operator()(Bytes a) const { return {_mm256_shuffle_epi8(table, a.v)}; }
};
PACE_INLINE Nibbles of_nibbles(Bytes a) { return a; }
PACE_INLINE Bytes broadcast_input(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    return {_mm256_set1_epi32(four)};
}

// Sums stay in their registers and are updated in the order of the source. That is why this is assembly. g++ would
// compute many products before it adds up any, and then run out of the 16 registers.
#ifdef PACE_ISA_VPDPBUSD
using Factor = Bytes;
PACE_INLINE Factor of_signed(Bytes a) { return {_mm256_xor_si256(a.v, _mm256_set1_epi8((char)0x80))}; }
PACE_INLINE I32 dot(I32 sum, Bytes w, Bytes x) {
    __asm__ volatile(PACE_ISA_VPDPBUSD " %2, %1, %0" : "+x"(sum.v) : "x"(w.v), "x"(x.v));
    return sum;
}
#else
struct Factor {
    __m256i magnitude, signs;  // signs: the original weights
};
struct Spread {
    __m256i even, odd;
};
struct Shorts {
    __m256i v;
};
PACE_INLINE Factor of_signed(Bytes a) { return {_mm256_abs_epi8(a.v), a.v}; }
PACE_INLINE Spread broadcast_input(const int16_t* p) {
    int32_t even, odd;
    memcpy(&even, p, sizeof even);
    memcpy(&odd, p + 2, sizeof odd);
    return {_mm256_set1_epi32(even), _mm256_set1_epi32(odd)};
}
PACE_INLINE void add_here(I32& sum, __m256i products) {
    __asm__ volatile("vpaddd %1, %0, %0" : "+x"(sum.v) : "x"(products));
}
PACE_INLINE void add_here(Shorts& sum, __m256i products) {
    __asm__ volatile("vpaddw %1, %0, %0" : "+x"(sum.v) : "x"(products));
}
PACE_INLINE I32 dot(I32 sum, Factor w, Bytes x) {
    const __m256i pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(x.v, w.signs));
    add_here(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    return sum;
}
// For pairs of products: pmaddwd multiplies k and k + 1 together, and k + 2 and k + 3.
struct Unpacked {
    __m256i even, odd;  // bytes of each lane, as 16 bits
};
PACE_INLINE void store_unpacked(uint8_t* p, Bytes a) {
    store_bytes(p, {_mm256_srai_epi16(_mm256_slli_epi16(a.v, 8), 8)});
    store_bytes(p + 64, {_mm256_srai_epi16(a.v, 8)});
}
PACE_INLINE Unpacked load_unpacked(const uint8_t* p) {
    return {_mm256_load_si256((const __m256i*)p), _mm256_load_si256((const __m256i*)(p + 64))};
}
PACE_INLINE I32 dot(I32 sum, Unpacked w, Spread x) {
    add_here(sum, _mm256_madd_epi16(_mm256_add_epi16(w.even, x.odd), _mm256_add_epi16(w.odd, x.even)));
    return sum;
}
PACE_INLINE I32 own_products(I32 sum, Unpacked w) {
    return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(w.even, w.odd))};
}
PACE_INLINE Shorts dot(Shorts sum, Nibbles w, Bytes x) {
    add_here(sum, _mm256_maddubs_epi16(w.v, x.v));
    return sum;
}
template <>
struct AddLanes<Shorts> {
    __m256i ones;
    // Created in place by assembly: a loop of products has no free register for them, but g++ would keep them in one.
    AddLanes() { __asm__ volatile("vpcmpeqw %0, %0, %0\n\tvpsrlw $15, %0, %0" : "=x"(ones)); }
    I32 operator()(I32 acc, Shorts a) const { return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(a.v, ones))}; }
};
#endif

#else

struct Bytes {
    __m128i v;
};
struct Wide {
    __m128i v;  // four of 16 bits, twice
};
struct Factor {
    __m128i low, high;  // 16 bits each: of lanes 0 and 1, of lanes 2 and 3
};
using Nibbles = Factor;
struct PairSums {
    __m128i low, high;
};

PACE_INLINE Bytes load_bytes(const void* p) { return {_mm_loadu_si128((const __m128i*)p)}; }
PACE_INLINE void store_bytes(void* p, Bytes a) { _mm_storeu_si128((__m128i*)p, a.v); }
PACE_INLINE Bytes low_nibbles(Bytes a) { return {_mm_and_si128(a.v, _mm_set1_epi8(15))}; }
PACE_INLINE Bytes high_nibbles(Bytes a) { return {_mm_and_si128(_mm_srli_epi16(a.v, 4), _mm_set1_epi8(15))}; }
struct Lookup {
    int8_t table[16];
    explicit Lookup(const int8_t* levels) { memcpy(table, levels, sizeof table); }
    Bytes operator()(Bytes a) const {
        uint8_t bytes[16];
        memcpy(bytes, &a, sizeof bytes);
        for (int i = 0; i < 16; ++i) bytes[i] = uint8_t(table[bytes[i]]);
        return load_bytes(bytes);
    }
};
// Each byte twice gives 16 bits; shifting right then keeps its sign.
PACE_INLINE Factor of_signed(Bytes a) {
    return {_mm_srai_epi16(_mm_unpacklo_epi8(a.v, a.v), 8), _mm_srai_epi16(_mm_unpackhi_epi8(a.v, a.v), 8)};
}
PACE_INLINE Nibbles of_nibbles(Bytes a) { return of_signed(a); }
PACE_INLINE Wide broadcast_input(const int16_t* p) {
    const __m128i four = _mm_loadl_epi64((const __m128i*)p);
    return {_mm_unpacklo_epi64(four, four)};
}
PACE_INLINE PairSums dot(PairSums sum, Factor w, Wide x) {
    return {_mm_add_epi32(sum.low, _mm_madd_epi16(w.low, x.v)), _mm_add_epi32(sum.high, _mm_madd_epi16(w.high, x.v))};
}
template <>
struct AddLanes<PairSums> {
    I32 operator()(I32 acc, PairSums a) const {
        const __m128 low = _mm_castsi128_ps(a.low), high = _mm_castsi128_ps(a.high);
        const __m128i even = _mm_castps_si128(_mm_shuffle_ps(low, high, 0x88)),
                      odd = _mm_castps_si128(_mm_shuffle_ps(low, high, 0xdd));
        return {_mm_add_epi32(acc.v, _mm_add_epi32(even, odd))};
    }
};

#endif

// Types of the operands and of their sums.
constexpr bool kPairsOfProducts = PACE_ISA_LEVEL == 1 && !PACE_HAS_VNNI;
#if PACE_HAS_VNNI
using InputCode = int8_t;
using SignedSum = I32;
using NibbleSum = I32;
#elif PACE_ISA_LEVEL >= 1
using InputCode = int8_t;
using SignedSum = I32;
using NibbleSum = Shorts;
#else
using InputCode = int16_t;
using SignedSum = PairSums;
using NibbleSum = PairSums;
#endif
using UnpackedInputCode = std::conditional_t<kPairsOfProducts, int16_t, InputCode>;
constexpr int kSignedOffset = PACE_HAS_VNNI ? 128 : 0;
constexpr int kNibbleSumK = std::is_same_v<NibbleSum, SignedSum> ? 1 << 15 : 32;  // 32-bit sums hold more than a group

constexpr int kUnpackedBytes = kPairsOfProducts ? 128 : 64;
#if PACE_ISA_LEVEL != 1 || PACE_HAS_VNNI
using Unpacked = Factor;
#if PACE_HAS_VNNI && PACE_ISA_LEVEL < 5  // a Factor is bytes; tiles of AMX multiply int8
PACE_INLINE void store_unpacked(uint8_t* p, Bytes a) { store_bytes(p, of_signed(a)); }
PACE_INLINE Unpacked load_unpacked(const uint8_t* p) { return load_bytes(p); }
#else
PACE_INLINE void store_unpacked(uint8_t* p, Bytes a) { store_bytes(p, a); }
PACE_INLINE Unpacked load_unpacked(const uint8_t* p) { return of_signed(load_bytes(p)); }
#endif
PACE_INLINE I32 own_products(I32 sum, Unpacked) { return sum; }  // no own products
#endif
constexpr int kVectorBytes = 4 * kLanes;

// Over `count` codes of inputs, a multiple of four: the sum of products of codes k and k + 1, for even k.
PACE_INLINE int32_t own_products(const int8_t* codes, int64_t count) {
    int32_t sum = 0;
    for (int64_t k = 0; k < count; k += 2) sum += codes[k] * codes[k + 1];
    return sum;
}

// Sixteen inputs as 16 bits. On level 1 the even ones of each four come before the odd ones, as in Unpacked.
#if PACE_ISA_LEVEL == 1 && !PACE_HAS_VNNI
PACE_INLINE void spread_inputs(const int8_t* codes, int16_t* out) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    const __m128i bytes = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)codes), order);
    _mm256_storeu_si256((__m256i*)out, _mm256_cvtepi8_epi16(bytes));
}
#elif PACE_ISA_LEVEL == 0
PACE_INLINE void spread_inputs(const int8_t* codes, int16_t* out) {
    const Factor wide = of_signed(load_bytes(codes));
    _mm_storeu_si128((__m128i*)out, wide.low);
    _mm_storeu_si128((__m128i*)(out + 8), wide.high);
}
#else
PACE_INLINE void spread_inputs(const int8_t*, int16_t*) {}  // other tables multiply bytes
#endif

// kLanes bytes at p, as integers of 0..255.
#if PACE_ISA_EMULATED
PACE_INLINE I32 load_unsigned(const uint8_t* p) {
    I32 result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = p[i];
    return result;
}
#elif PACE_ISA_LEVEL >= 2
PACE_INLINE I32 load_unsigned(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
#elif PACE_ISA_LEVEL == 1
PACE_INLINE I32 load_unsigned(const uint8_t* p) { return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))}; }
#else
PACE_INLINE I32 load_unsigned(const uint8_t* p) {
    int32_t four;
    memcpy(&four, p, sizeof four);
    const __m128i zeros = _mm_setzero_si128();
    return {_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zeros), zeros)};
}
#endif

// Sixteen float8_e4m3fn times 1 / kFloat8Unit; NaN becomes 480. Its exponent and mantissa in the fields of an F16 give
// 2^-8 times the value, for subnormals too. A sign-extended code shifted by 7 has all three fields in place, and an
// extra copy of the sign.
constexpr float kFloat8Unit = 256.0f;
PACE_INLINE void load_float8(const uint8_t* p, F32* out) {
#if !PACE_ISA_EMULATED && PACE_ISA_LEVEL >= 1
    const __m256i codes = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), 7);
    const __m256i halves = _mm256_and_si256(codes, _mm256_set1_epi16((short)0xbfff));
#if PACE_ISA_LEVEL == 1
    out[0] = {_mm256_cvtph_ps(_mm256_castsi256_si128(halves))};
    out[1] = {_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#else
    out[0] = {_mm512_cvtph_ps(halves)};
#endif
#else
    for (int v = 0; v < 16 / kLanes; ++v) {
        const I32 code = load_unsigned(p + v * kLanes);
        const F32 magnitude = from_bits(shift_left<20>(code & broadcast_int(0x7f)));
        out[v] = copy_sign(magnitude * broadcast(0x1p120f / kFloat8Unit), from_bits(shift_left<24>(code)));
    }
#endif
}

// a * b + c, rounded once. Level 0 has no such instruction. The product of two fp32 is exact in fp64. A sum in fp64
// rounded to odd then rounds to fp32 like the exact sum.
#if PACE_ISA_LEVEL == 0 && !PACE_ISA_EMULATED
PACE_INLINE __m128d add_to_odd(__m128d a, __m128d b) {
    const __m128d sum = _mm_add_pd(a, b), b_part = _mm_sub_pd(sum, a);
    const __m128d error = _mm_add_pd(_mm_sub_pd(a, _mm_sub_pd(sum, b_part)), _mm_sub_pd(b, b_part));  // exact
    const __m128d zeros = _mm_setzero_pd();
    const __m128i inexact = _mm_castpd_si128(_mm_or_pd(_mm_cmplt_pd(error, zeros), _mm_cmplt_pd(zeros, error)));
    const __m128i raw = _mm_castpd_si128(sum), one = _mm_set1_epi64x(1);
    const __m128i even = _mm_sub_epi64(_mm_and_si128(raw, one), one);  // all ones if the last bit is 0
    // One step away from zero if the error has the sign of the sum, else one step towards zero.
    const __m128i towards = _mm_srli_epi64(_mm_xor_si128(_mm_castpd_si128(error), raw), 63);
    const __m128i step = _mm_sub_epi64(one, _mm_add_epi64(towards, towards));
    return _mm_castsi128_pd(_mm_add_epi64(raw, _mm_and_si128(step, _mm_and_si128(inexact, even))));
}
PACE_INLINE F32 fused_fma(F32 a, F32 b, F32 c) {
    const auto high = [](F32 x) { return _mm_cvtps_pd(_mm_movehl_ps(x.v, x.v)); };
    const auto low = [](F32 x) { return _mm_cvtps_pd(x.v); };
    const __m128 first = _mm_cvtpd_ps(add_to_odd(_mm_mul_pd(low(a), low(b)), low(c)));
    const __m128 second = _mm_cvtpd_ps(add_to_odd(_mm_mul_pd(high(a), high(b)), high(c)));
    return {_mm_movelh_ps(first, second)};
}
#else
PACE_INLINE F32 fused_fma(F32 a, F32 b, F32 c) { return fma(a, b, c); }
#endif
