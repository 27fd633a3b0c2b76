// Super-blocks of weights: what one of 16 outputs holds besides codes, and how sums of products of codes become numbers.
//
// SHAPES      x: M rows as quantize_input() leaves them: int8 codes xc, for each 128 inputs a scale xs, for each 16 the sum of their codes;
//             weights: panels of 16 outputs, PanelSuper (pace/types.h): super-blocks of 256 k, each with a scale d and maybe
//             one of minima dm in F16, and for each group of 16 or 32 k a whole number s, and m.
//
// DEFINITION  for m: for n:  sum = 0
//                 for c, every 128 k, ascending:
//                     total = the sum over groups g in c of s[n][g] * (the sum over k in g of level(W[n][k]) * xc[m][k])   in integers
//                     sum = fma(total, d[n] * xs[m][c], sum)
//                     total = the sum over g in c of m[n][g] * (the sum of xc[m][k] over k in g)                           with minima
//                     sum = fma(total, dm[n] * xs[m][c], sum)
//                 sums[m][n] = sum
//             level(u) = u - offset, or levels[u] of the header.
//
// NUMERICS    The weights are exact: what a block of ggml says, and nothing is rounded but inputs and sums. |total| < 2^27 whatever the
//             codes: 16 * 128 * 127 * 127 * 8. It becomes fp32 by one rounding. So the bits are the same on every table, and
//             for every tile, chunk and thread.
//
// WHY THIS WAY  Products within a group are added up as nibbles are (vec_bytes.inl), of unsigned codes. Scales of groups then multiply
//             integers, one for each output, so that a group costs two instructions, and what takes floats comes every 128 k.
//             Where products are sums of 16 bits, the scale multiplies those, in the instruction that widens them. Offset
//             and minima cost one instruction for two sums of 16 inputs: pairs of numbers times pairs of sums.

template <int kBits, bool kLookup = false>
struct SuperCodes {
    static constexpr int kGroup = kBits >= 4 && kBits <= 5 ? 32 : 16, kGroups = kSuperBlock / kGroup;
    static constexpr int kUnitBytes = Planes<kBits>::kUnitBytes;
    static constexpr bool kUnsigned = !kLookup;
    using Weight = std::conditional_t<kLookup, Factor, Nibbles>;
    using Sum = std::conditional_t<kLookup, SignedSum, NibbleSum>;
    // Steps whose products a Sum of 16 bits holds: 2 * 127 * (2^bits - 1) each.
    static constexpr int kGroupSteps = kGroup / 4;
    static constexpr int kSumSteps = kLookup || kBits <= 4 || kNibbleSumK > 32 ? kGroupSteps : kBits == 5 ? 4 : 2;

    const Lookup levels;
    const int32_t offset;  // that products were taken with
    explicit SuperCodes(const PackedHeader& h) : levels(h.levels), offset(kLookup ? kSignedOffset : h.offset) {}
    template <int s>
    PACE_INLINE Weight step(const SuperCodes& c, const uint8_t* p) {
        const Bytes codes = Planes<kBits>::template step<s>(p);
        if constexpr (kLookup)
            return of_signed(c.levels(codes));
        else
            return of_nibbles(codes);
    }
    // Bytes, as unpacked ones are stored. Its type is deduced: where a Factor is no Bytes, g++ 15 refuses to convert one
    // even in the branch that is left out.
    template <int s>
    PACE_INLINE auto bytes(const SuperCodes& c, const uint8_t* p) {
        const Bytes codes = Planes<kBits>::template step<s>(p);
        if constexpr (!kLookup)
            return codes;
        else if constexpr (kSignedOffset != 0)
            return of_signed(c.levels(codes));
        else
            return c.levels(codes);
    }
};

// What a super-block begins with.
template <class Codes>
struct SuperHead {
    F32 scales[kVectors], mins[kVectors];     // of groups' scales and minima
    const int8_t *group_scales, *group_mins;  // [groups][16]
    const uint8_t* codes;
    alignas(64) int8_t numbers[2][16 * 16];

    SuperHead(const PackedHeader& h, const uint8_t* p) {
        constexpr int kGroups = Codes::kGroups;
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            scales[v] = load((const F16*)p + v * kLanes);
            mins[v] = h.has_mins ? load((const F16*)p + kPanelRows + v * kLanes) : zero();
        }
        p += h.super_scales_bytes();
        group_scales = numbers[0], group_mins = numbers[1];
        if (h.group_scales == GroupScales::Bytes) {
            group_scales = (const int8_t*)p;
        } else if (h.group_scales == GroupScales::NibblePairs) {
            if constexpr (kGroups == 16) unpack_nibble_pairs(p, numbers[0], numbers[1]);
        } else if (h.has_mins) {
            if constexpr (kGroups == 8) unpack_six_bits<16, false>(p, numbers[0]);
            group_mins = numbers[0] + kGroups * 16;
        } else {
            unpack_six_bits<kGroups, true>(p, numbers[0]);
        }
        codes = p + h.group_scales_bytes();
    }
};

// ---- Scales of groups, as a table multiplies them.

// A lane's number in both of its halves, or two numbers in one lane.
PACE_INLINE I32 pair_of(I32 low, I32 high) { return (low & broadcast_int(0xffff)) | shift_left<16>(high); }

template <class Sum>
PACE_INLINE I32 scale_of(I32 number) {
    return std::is_same_v<Sum, I32> || kLanes == 4 ? number : pair_of(number, number);
}
// total + scale * sum, lane by lane.
template <class Sum>
PACE_INLINE I32 add_scaled(I32 total, Sum sum, I32 scale) {
    if constexpr (std::is_same_v<Sum, I32>)
        return total + multiply(sum, scale);
    else if constexpr (kLanes == 4)
        return total + multiply(AddLanes<Sum>()(broadcast_int(0), sum), scale);
    else
        return add_pairs(total, I32{sum.v}, scale);
}

// What minima, or else the offset, multiply: the numbers of the two groups that the 32 k from 32 j on lie in, or of one.
template <class Codes>
PACE_INLINE I32 numbers_of_sums(const int8_t* numbers, int j, int v) {
    if constexpr (Codes::kGroup == 32) {
        const I32 number = load_int(numbers + j * 16 + v * kLanes);
        return pair_of(number, number);
    } else {
        return pair_of(load_int(numbers + 2 * j * 16 + v * kLanes), load_int(numbers + (2 * j + 1) * 16 + v * kLanes));
    }
}
// The two sums of 16 inputs that begin at 32 j, in every lane.
PACE_INLINE I32 broadcast_sums(const int16_t* sums, int j) {
    int32_t two;
    memcpy(&two, sums + 2 * j, sizeof two);
    return broadcast_int(two);
}

// What 128 k add to the sums of a row: `total` of products, `sums` as numbers_of_sums() weighs them.
template <int kSums>
PACE_INLINE void add_half(I32 (&total)[kSums], const I32 (&sums)[kSums], int32_t offset, const F32* scales,
                          const F32* mins, float x_scale, F32 (&sum)[kSums]) {
    const F32 by = broadcast(x_scale);
#pragma GCC unroll 16
    for (int v = 0; v < kSums; ++v) {
        if (offset) total[v] = total[v] - multiply(sums[v], broadcast_int(offset));
        sum[v] = fused_fma(to_f32(total[v]), scales[v] * by, sum[v]);
        if (mins) sum[v] = fused_fma(to_f32(sums[v]), mins[v] * by, sum[v]);
    }
}

// Rows of inputs of super-blocks.
struct SuperInputs {
    const InputCode* codes;
    const float* scales;
    const int16_t* sums;
    const int64_t codes_stride, scales_stride, sums_stride;  // from row to row
    SuperInputs(const PackedHeader& h, const char* x, int64_t x_stride)
        : codes(sizeof(InputCode) == 1 ? (const InputCode*)x : (const InputCode*)QuantizedInput::wide_codes(x, h)),
          scales(QuantizedInput::scales(x, h)),
          sums(QuantizedInput::short_sums(x, h)),
          codes_stride(x_stride / int64_t(sizeof(InputCode))),
          scales_stride(x_stride / 4),
          sums_stride(x_stride / 2) {}
};
