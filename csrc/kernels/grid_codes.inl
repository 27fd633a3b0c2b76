// Points of grids (pace/grids.h) as codes of super-blocks.
//
// SHAPES, DEFINITION, NUMERICS  As in super_blocks.inl: level(u) = levels[u] of the header, d = the stored d times the
//             type's unit, which is exact.
//
// LAYOUT      At its start, a super-block of a panel is expanded into the first-level cache. A unit then has codes of
//             four bits (planes.inl): digit | flag << digit_bits. If digits have two bits, the fourth bit may be
//             anything.
//
// WHY THIS WAY  A look-up yields the digits of 8 weights (4 in IQ3) as four bytes, so a table has at most 8 KB. There
//             are two ways. One is ordinary loads, a little less than a cycle for each. The other permutes words in
//             registers, 64 entries at a time, on the tables with AVX-512. For a grid of 2048 points that is no faster.
//             Gathers are slower than loads on many processors. A vector that is loaded at once after scalar stores to
//             it would wait for them. So flags are added, and products begin, when all points are looked up.

template <int kDigitBits, int kGroupSize>
struct GridCodes {
    static constexpr int kGroup = kGroupSize, kGroups = kSuperBlock / kGroup, kUnitBytes = Planes<4>::kUnitBytes;
    static constexpr bool kUnsigned = true, kStreams = false;
    using Weight = Nibbles;
    using Sum = NibbleSum;
    // Distances from the lowest level are at most 86, or 62 in IQ3: 2 * 127 of them fit a 16-bit Sum once or twice.
    static constexpr int kGroupSteps = kGroup / 4;
    static constexpr int kSumSteps = kNibbleSumK > 32 ? kGroupSteps : kDigitBits == 2 ? 1 : 2;

    const Lookup distances;
    const int32_t offset;
    explicit GridCodes(const PackedHeader& h) : distances(Distances(h).of_code), offset(-h.min_level()) {}
    template <int s>
    PACE_INLINE Weight step(const GridCodes& c, const uint8_t* p) {
        return of_nibbles(bytes<s>(c, p));
    }
    template <int s>
    PACE_INLINE Bytes bytes(const GridCodes& c, const uint8_t* p) {
        return c.distances(Planes<4>::template step<s>(p));
    }

  private:
    struct Distances {
        int8_t of_code[16];
        explicit Distances(const PackedHeader& h) {
            const int least = h.min_level();
            for (int c = 0; c < 16; ++c) of_code[c] = int8_t(h.levels[c] - least);
        }
    };
};

template <Code kType>
PACE_INLINE const auto& points_of_type() {
    if constexpr (kType == Code::IQ1S || kType == Code::IQ1M)
        return kPointsIQ1;
    else if constexpr (kType == Code::IQ2XXS)
        return kPointsIQ2XXS;
    else if constexpr (kType == Code::IQ2XS)
        return kPointsIQ2XS;
    else if constexpr (kType == Code::IQ2S)
        return kPointsIQ2S;
    else if constexpr (kType == Code::IQ3XXS)
        return kPointsIQ3XXS;
    else
        return kPointsIQ3S;
}

PACE_INLINE I32 load_shorts(const uint8_t* p) { return shift_right<16>(bits(load((const BF16*)p))); }

// Of fields of `width` bits, `stride` apart from bit `from` on: the first as bits 8.. of each lane, the third 16 above.
template <int width, int stride, int from>
PACE_INLINE I32 high_bits(I32 fields) {
    const I32 mask = broadcast_int((1 << width) - 1);
    return shift_left<8>(shift_right<from>(fields) & mask) |
           shift_left<24>(shift_right<from + 2 * stride>(fields) & mask);
}

// ---- Look-ups. `even` has the numbers of points 0 and 2 of each row in the halves of its lane, `odd` of 1 and 3.
// Their digits become four lines, one for each point, or in IQ3 two.

template <bool kHalves, int count>
PACE_INLINE void look_up(const GridPoints<count>& points, const uint8_t* even, const uint8_t* odd, uint8_t* out) {
    const auto lane = [&](uint64_t point) __attribute__((always_inline)) { return points.lanes[point & 0xffff]; };
    const auto store_two = [](int line, uint32_t first, uint32_t second, uint8_t* to) __attribute__((always_inline)) {
        const uint64_t both = first | uint64_t(second) << 32;
        memcpy(to + 64 * line, &both, 8);
    };
#pragma GCC unroll 4
    for (int n = 0; n < 64; n += 8) {  // of two rows
        uint64_t a, b;
        memcpy(&a, even + n, 8);
        memcpy(&b, odd + n, 8);
        if constexpr (kHalves) {
            store_two(0, lane(a) | lane(b) << 4, lane(a >> 32) | lane(b >> 32) << 4, out + n);
            store_two(1, lane(a >> 16) | lane(b >> 16) << 4, lane(a >> 48) | lane(b >> 48) << 4, out + n);
        } else {
            store_two(0, lane(a), lane(a >> 32), out + n);
            store_two(1, lane(b), lane(b >> 32), out + n);
            store_two(2, lane(a >> 16), lane(a >> 48), out + n);
            store_two(3, lane(b >> 16), lane(b >> 48), out + n);
        }
    }
}

// Flags in the places of a line's codes: bits `line` and `line` + 4 of each byte as bits kDigitBits and kDigitBits + 4.
template <int kDigitBits, int line>
PACE_INLINE I32 flags_of_line(I32 flags) {
    if constexpr (line > kDigitBits) return shift_right<line - kDigitBits>(flags);
    return shift_left<line <= kDigitBits ? kDigitBits - line : 0>(flags);
}

// Adds the flags [16] of a unit to its digits.
template <int kDigitBits>
PACE_INLINE void add_flags(const uint8_t* flags, uint8_t* unit) {
    const I32 mask = broadcast_int(int32_t(0x11111111u << kDigitBits));
    PACE_EACH(v, kVectors) {
        const I32 of_rows = bits(load((const float*)flags + v * kLanes));
        unrolled<4>([&](auto line) __attribute__((always_inline)) {
            float* const at = (float*)(unit + 64 * line) + v * kLanes;
            store(at, from_bits(bits(load(at)) | (flags_of_line<kDigitBits, line>(of_rows) & mask)));
        });
    }
}

#if PACE_ISA_LEVEL >= 2 && !PACE_ISA_EMULATED
constexpr int kMostPermuted = 1024;  // points in a grid

// Entries `numbers` of `count` words, from a word on that `numbers` do not count.
template <int count>
PACE_INLINE __m512i permuted_words(const uint16_t* words, __m512i numbers) {
    if constexpr (count == 64) {
        return _mm512_permutex2var_epi16(_mm512_load_si512(words), numbers, _mm512_load_si512(words + 32));
    } else {
        const __m512i low = permuted_words<count / 2>(words, numbers);
        const __m512i high = permuted_words<count / 2>(words + count / 2, numbers);
        return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(numbers, _mm512_set1_epi16(count / 2)), low, high);
    }
}
// Bits of a where `mask` has ones, else of b.
PACE_INLINE __m512i bits_of_either(uint32_t mask, __m512i a, __m512i b) {
    return _mm512_ternarylogic_epi32(_mm512_set1_epi32(int(mask)), a, b, 0xca);
}
// Writes lines with their flags, from line kFirst of a unit on.
template <bool kHalves, int kFirst, int count>
PACE_INLINE void permute(const GridPoints<count>& points, __m512i even, __m512i odd, I32 flags, uint8_t* unit) {
    const __m512i a = permuted_words<count>(points.words, even), b = permuted_words<count>(points.words, odd);
    const __m512i upper_a = _mm512_srli_epi32(a, 16), upper_b = _mm512_srli_epi32(b, 16);
    if constexpr (kHalves) {
        const auto nibbles = [](__m512i w) __attribute__((always_inline)) {  // and others
            return bits_of_either(0x00000f0f, w, _mm512_slli_epi32(w, 12));
        };
        const auto line = [&](auto number, __m512i low, __m512i high) __attribute__((always_inline)) {
            const __m512i digits = bits_of_either(0x07070707, nibbles(low), _mm512_slli_epi32(nibbles(high), 4));
            const __m512i of_line = flags_of_line<3, kFirst + number>(flags).v;
            _mm512_storeu_si512(unit + 64 * (kFirst + number), bits_of_either(0x77777777, digits, of_line));
        };
        line(std::integral_constant<int, 0>(), a, b);
        line(std::integral_constant<int, 1>(), upper_a, upper_b);
    } else {
        const auto line = [&](auto number, __m512i w) __attribute__((always_inline)) {
            const __m512i digits = bits_of_either(0x00003333, w, _mm512_slli_epi32(w, 14));
            const __m512i of_line = flags_of_line<2, number>(flags).v;
            _mm512_storeu_si512(unit + 64 * number, bits_of_either(0x33333333, digits, of_line));
        };
        line(std::integral_constant<int, 0>(), a);
        line(std::integral_constant<int, 1>(), b);
        line(std::integral_constant<int, 2>(), upper_a);
        line(std::integral_constant<int, 3>(), upper_b);
    }
}
#endif

// ---- A super-block

// Numbers 2 b + 1 for the low and the high four bits b of sixteen bytes.
static void unpack_odd_pairs(const uint8_t* p, int8_t* low, int8_t* high) {
    for (int i = 0; i < 16; i += 8) {
        uint64_t both;
        memcpy(&both, p + i, 8);
        const uint64_t ones = 0x0101010101010101, of_low = (both & 15 * ones) << 1 | ones,
                       of_high = (both >> 3 & 30 * ones) | ones;
        memcpy(low + i, &of_low, 8);
        memcpy(high + i, &of_high, 8);
    }
}

// From a unit at p: the flags of kLanes rows, bits that `rest` describes, and numbers of groups if they are there.
template <Code kType>
PACE_INLINE I32 flags_of(const uint8_t* p, int lane, I32& rest, int8_t* numbers) {
    constexpr GridType kGrid = grid_type(kType);
    constexpr int kPointBytes = kGrid.weights == 8 ? 64 : 128;
    const uint8_t* const behind = p + kPointBytes + (kGrid.sign_bits ? 64 : 0);
    if constexpr (kGrid.sign_bits == 0) {
        rest = load_shorts(behind + 2 * lane);
        if constexpr (kType == Code::IQ1S) {
            store(numbers + lane, to_f32((shift_right<11>(rest) & broadcast_int(14)) | broadcast_int(1)));
            return broadcast_int(0) - shift_right<15>(rest);
        }
        const I32 four = (shift_right<3>(rest) & broadcast_int(1)) | (shift_right<6>(rest) & broadcast_int(2)) |
                         (shift_right<9>(rest) & broadcast_int(4)) | (shift_right<12>(rest) & broadcast_int(8));
        const I32 byte = four | shift_left<4>(four), two = byte | shift_left<8>(byte);
        return two | shift_left<16>(two);
    } else {
        const I32 stored = bits(load((const float*)(p + kPointBytes) + lane));
        if constexpr (kGrid.sign_bits == 8) {
            rest = load_unsigned(behind + lane);
            return stored;
        }
        rest = shift_right<28>(stored);
        if constexpr (kGrid.group == 32) store(numbers + lane, to_f32(shift_left<1>(rest) | broadcast_int(1)));
        const I32 signs = stored & broadcast_int(0x0fffffff), halves = signs ^ shift_right<16>(signs),
                  byte = halves ^ shift_right<8>(halves);
        return signs | shift_left<28>(byte ^ shift_right<4>(byte));
    }
}

// Expands the super-block at p to units of GridCodes and numbers [groups][16]. Returns its d [16], maybe in `scales`.
template <Code kType>
[[gnu::noinline]] static const F16* expand_super_block(const uint8_t* p, int8_t* numbers, uint8_t* units, F16* scales) {
    constexpr GridType kGrid = grid_type(kType);
    constexpr int kUnitBytes = Planes<4>::kUnitBytes, kGroupsOfUnit = 32 / kGrid.group;
    constexpr bool kHalves = kGrid.weights == 4;
    constexpr int kPointLines = kHalves ? 2 : 1;
    constexpr int kWidth = kType == Code::IQ1S || kType == Code::IQ1M ? 3 : kType == Code::IQ2S ? 2 : 1;
    [[maybe_unused]] constexpr int kStride = kType == Code::IQ1M ? 4 : kWidth;
    constexpr bool kHasHighBits = kType != Code::IQ2XXS && kType != Code::IQ3XXS;
    const auto& points = points_of_type<kType>();
#if PACE_ISA_LEVEL >= 2 && !PACE_ISA_EMULATED
    constexpr bool kPermutes = sizeof points.words <= kMostPermuted * sizeof(uint16_t);
#else
    constexpr bool kPermutes = false;
#endif
    alignas(64) uint8_t flags[8][64];
    const uint8_t* unit = p + kGrid.front_bytes;
    for (int u = 0; u < 8; ++u, unit += kGrid.unit_bytes, numbers += 16 * kGroupsOfUnit) {
        for (int line = 0; line < kGrid.unit_bytes; line += 64) __builtin_prefetch(unit + line + kPrefetchBytes);
        alignas(64) uint8_t even[kPointLines][64], odd[kPointLines][64];
        PACE_EACH(v, kVectors) {
            const int lane = v * kLanes;
            I32 rest;
            store((float*)flags[u] + lane, from_bits(flags_of<kType>(unit, lane, rest, numbers)));
            if constexpr (kType == Code::IQ1M) {
                const I32 four = load_shorts(p + 32 * (u / 2) + 2 * lane);
                const I32 two = u % 2 ? shift_right<6>(four) : four;
                store(numbers + lane, to_f32((shift_left<1>(two) & broadcast_int(14)) | broadcast_int(1)));
                store(numbers + 16 + lane, to_f32((shift_right<2>(two) & broadcast_int(14)) | broadcast_int(1)));
            }
            unrolled<kPointLines>([&](auto line) __attribute__((always_inline)) {
                const I32 low = bits(load((const float*)(unit + 64 * line) + lane)), mask = broadcast_int(0x00ff00ff);
                I32 of_even = low & mask, of_odd = shift_right<8>(low) & mask;
                if constexpr (kHasHighBits) {
                    of_even = of_even | high_bits<kWidth, kStride, 4 * line>(rest);
                    of_odd = of_odd | high_bits<kWidth, kStride, 4 * line + kStride>(rest);
                }
                store((float*)even[line] + lane, from_bits(of_even));
                store((float*)odd[line] + lane, from_bits(of_odd));
            });
        }
        if constexpr (kType == Code::IQ2XS || kType == Code::IQ2S)
            unpack_odd_pairs(unit + kGrid.unit_bytes - 16, numbers, numbers + 16);
        unrolled<kPointLines>([&](auto line) __attribute__((always_inline)) {
#if PACE_ISA_LEVEL >= 2 && !PACE_ISA_EMULATED
            if constexpr (kPermutes)
                return permute<kHalves, 2 * line>(points, _mm512_load_si512(even[line]), _mm512_load_si512(odd[line]),
                                                  bits(load((const float*)flags[u])), units + u * kUnitBytes);
#endif
            look_up<kHalves>(points, even[line], odd[line], units + u * kUnitBytes + 128 * line);
        });
    }
    for (int u = 0; !kPermutes && u < 8; ++u) add_flags<kGrid.digit_bits>(flags[u], units + u * kUnitBytes);
    if constexpr (kType == Code::IQ3S)
        for (int pair = 0; pair < 4; ++pair)
            unpack_odd_pairs(p + 32 + 16 * pair, numbers + (2 * pair - 8) * 16, numbers + (2 * pair - 7) * 16);
    if constexpr (kType != Code::IQ1M) return (const F16*)p;
    for (int n = 0; n < 16; ++n) {
        uint16_t parts[4];
        for (int i = 0; i < 4; ++i) memcpy(parts + i, p + 32 * i + 2 * n, 2);
        scales[n] = {
            uint16_t(parts[0] >> 12 | (parts[1] >> 8 & 0x00f0) | (parts[2] >> 4 & 0x0f00) | (parts[3] & 0xf000))};
    }
    return scales;
}

template <int kDigitBits, int kGroupSize>
struct SuperHead<GridCodes<kDigitBits, kGroupSize>> {
    using Codes = GridCodes<kDigitBits, kGroupSize>;
    F32 scales[kVectors], mins[kVectors];
    const int8_t *group_scales, *group_mins;
    const uint8_t* codes;
    alignas(64) int8_t numbers[Codes::kGroups * 16];
    alignas(64) uint8_t units[8 * Codes::kUnitBytes];

    SuperHead(const SuperWeight& w, const uint8_t* p) : group_scales(numbers), group_mins(numbers), codes(units) {
        F16 assembled[16];
        const F16* const d = expand(w.h.grid(), p, assembled);
        const F32 unit = broadcast(grid_unit(w.h.grid()));
        PACE_EACH(v, kVectors) {
            scales[v] = load(d + v * kLanes) * unit;
            mins[v] = zero();
        }
    }

  private:
    const F16* expand(Code type, const uint8_t* p, F16* assembled) {
        if constexpr (kDigitBits == 3)
            return type == Code::IQ3S ? expand_super_block<Code::IQ3S>(p, numbers, units, assembled)
                                      : expand_super_block<Code::IQ3XXS>(p, numbers, units, assembled);
        else if constexpr (kGroupSize == 32)
            return type == Code::IQ1S ? expand_super_block<Code::IQ1S>(p, numbers, units, assembled)
                                      : expand_super_block<Code::IQ2XXS>(p, numbers, units, assembled);
        else
            return type == Code::IQ1M    ? expand_super_block<Code::IQ1M>(p, numbers, units, assembled)
                   : type == Code::IQ2XS ? expand_super_block<Code::IQ2XS>(p, numbers, units, assembled)
                                         : expand_super_block<Code::IQ2S>(p, numbers, units, assembled);
    }
};
