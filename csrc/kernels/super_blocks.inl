// Super-blocks of weights: the data of each of 16 outputs besides codes, and the conversion of sums of products to
// numbers.
//
// SHAPES      x: M rows from quantize_input(): int8 codes xc, for each 128 inputs a scale xs, for each 16 the sum of
//             their codes. weights: panels of 16 outputs, PanelSuper (pace/types.h). Each super-block of 256 k has a
//             scale d in F16, and maybe one of minima, dm. Each group of 16 or 32 k has an integer s, and maybe m.
//
// DEFINITION  for m: for n:  sum = 0.
//                 for c, every 128 k, ascending:
//
//                     total = sum over groups g of c of s[n][g] * (the sum over k in g of level(W[n][k]) * xc[m][k]).
//                     sum = fma(total, d[n] * xs[m][c], sum).
//                     total = the sum over g in c of m[n][g] * (the sum of xc[m][k] over k in g), with minima.
//                     sum = fma(total, dm[n] * xs[m][c], sum).
//                 sums[m][n] = sum.
//             Totals are integers. level(u) = u - offset, or levels[u] of the header.
//
// NUMERICS    Weights are exactly the values of ggml's blocks; only inputs and sums are rounded. |total| < 2^27 for any
//             codes: 16 * 128 * 127 * 127 * 8. One rounding converts it to fp32. So the bits are the same on every
//             table, and for every tile, chunk and thread.
//
// WHY THIS WAY  Products within a group are added up like nibbles (vec_bytes.inl), with unsigned codes. Group scales
//               then multiply integers, one for each output. So a group costs two instructions, and float operations
//               come only every 128 k. If products are 16-bit sums, the widening instruction also multiplies them by
//               the scale. Offset and minima cost one instruction for two sums of 16 inputs: pairs of numbers times
//               pairs of sums.

template <int kBits, bool kLookup = false>
struct SuperCodes {
    static constexpr int kGroup = kBits >= 4 && kBits <= 5 ? 32 : 16, kGroups = kSuperBlock / kGroup;
    static constexpr int kUnitBytes = Planes<kBits>::kUnitBytes;
    static constexpr bool kUnsigned = !kLookup, kStreams = true;  // units are read from memory
    using Weight = std::conditional_t<kLookup, Factor, Nibbles>;
    using Sum = std::conditional_t<kLookup, SignedSum, NibbleSum>;
    // Number of steps whose products fit a 16-bit Sum: 2 * 127 * (2^bits - 1) each.
    static constexpr int kGroupSteps = kGroup / 4;
    static constexpr int kSumSteps = kLookup || kBits <= 4 || kNibbleSumK > 32 ? kGroupSteps : kBits == 5 ? 4 : 2;

    const Lookup levels;
    const int32_t offset;  // offset that the products include
    explicit SuperCodes(const PackedHeader& h) : levels(h.levels), offset(kLookup ? kSignedOffset : h.offset) {}
    template <int s>
    PACE_INLINE Weight step(const SuperCodes& c, const uint8_t* p) {
        const Bytes codes = Planes<kBits>::template step<s>(p);
        if constexpr (kLookup)
            return of_signed(c.levels(codes));
        else
            return of_nibbles(codes);
    }
    // Bytes in the form of unpacked codes. The return type is deduced: if a Factor is not Bytes, g++ 15 refuses to
    // convert one even in a discarded branch.
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

// Fields of the header that all super-blocks of a call share; computing them takes divisions.
struct SuperWeight {
    const PackedHeader& h;
    const int64_t super_blocks, panel_bytes, block_bytes, scales_bytes, numbers_bytes;
    const GroupScales group_scales;
    const bool has_mins;
    const uint8_t* const panels;
    explicit SuperWeight(const PackedHeader& h)
        : h(h),
          super_blocks(h.k / kSuperBlock),
          panel_bytes(h.panel_bytes()),
          block_bytes(h.super_block_bytes()),
          scales_bytes(h.super_scales_bytes()),
          numbers_bytes(h.group_scales_bytes()),
          group_scales(h.group_scales),
          has_mins(h.has_mins),
          panels((const uint8_t*)h.panel(0)) {}
    const uint8_t* panel(int64_t index) const { return panels + index * panel_bytes; }
};

// The start of a super-block.
template <class Codes>
struct SuperHead {
    F32 scales[kVectors], mins[kVectors];     // for the scales and minima of groups
    const int8_t *group_scales, *group_mins;  // [groups][16]
    const uint8_t* codes;
    alignas(64) int8_t numbers[2][16 * 16];

    SuperHead(const SuperWeight& w, const uint8_t* p) {
        constexpr int kGroups = Codes::kGroups;
        PACE_EACH(v, kVectors) {
            scales[v] = load((const F16*)p + v * kLanes);
            mins[v] = w.has_mins ? load((const F16*)p + kPanelRows + v * kLanes) : zero();
        }
        p += w.scales_bytes;
        group_scales = numbers[0], group_mins = numbers[1];
        if (w.group_scales == GroupScales::Bytes) {
            group_scales = (const int8_t*)p;
        } else if (w.group_scales == GroupScales::NibblePairs) {
            if constexpr (kGroups == 16) unpack_nibble_pairs(p, numbers[0], numbers[1]);
        } else if (w.has_mins) {
            if constexpr (kGroups == 8) unpack_six_bits<16, false>(p, numbers[0]);
            group_mins = numbers[0] + kGroups * 16;
        } else {
            unpack_six_bits<kGroups, true>(p, numbers[0]);
        }
        codes = p + w.numbers_bytes;
    }
};

// ---- Scales of groups, in the form that a table multiplies

template <class Sum>
PACE_INLINE I32 scale_of(I32 number) {
    return std::is_same_v<Sum, I32> || kLanes == 4 ? number : twice(number);
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

// The factors of the sums of inputs, for minima or else the offset. They are the numbers of the two groups in the 32 k
// from 32 j on, or of one group.
template <class Codes>
PACE_INLINE I32 numbers_of_sums(const int8_t* numbers, int j, int v) {
    if constexpr (Codes::kGroup == 32) {
        return twice(load_int(numbers + j * 16 + v * kLanes));
    } else {
        return pair_of(load_int(numbers + 2 * j * 16 + v * kLanes), load_int(numbers + (2 * j + 1) * 16 + v * kLanes));
    }
}
// The two sums of 16 inputs that begin at 32 j, broadcast to every lane.
PACE_INLINE I32 broadcast_sums(const int16_t* sums, int j) {
    int32_t two;
    memcpy(&two, sums + 2 * j, sizeof two);
    return broadcast_int(two);
}

// Adds the products of 128 k to the sums of a row: `total` of products, and `sums` weighted by numbers_of_sums().
template <int kSums>
PACE_INLINE void add_half(I32 (&total)[kSums], const I32 (&sums)[kSums], int32_t offset, const F32* scales,
                          const F32* mins, float x_scale, F32 (&sum)[kSums]) {
    const F32 by = broadcast(x_scale);
    PACE_EACH(v, kSums) {
        if (offset) total[v] = total[v] - multiply(sums[v], broadcast_int(offset));
        sum[v] = fused_fma(to_f32(total[v]), scales[v] * by, sum[v]);
        if (mins) sum[v] = fused_fma(to_f32(sums[v]), mins[v] * by, sum[v]);
    }
}

// Rows of inputs for super-blocks.
struct SuperInputs {
    const InputCode* codes;
    const float* scales;
    const int16_t* sums;
    const int64_t codes_stride, scales_stride, sums_stride;  // distance between rows
    SuperInputs(const PackedHeader& h, const char* x, int64_t x_stride)
        : codes(sizeof(InputCode) == 1 ? (const InputCode*)x : (const InputCode*)QuantizedInput::wide_codes(x, h)),
          scales(QuantizedInput::scales(x, h)),
          sums(QuantizedInput::short_sums(x, h)),
          codes_stride(x_stride / int64_t(sizeof(InputCode))),
          scales_stride(x_stride / 4),
          sums_stride(x_stride / 2) {}
};
