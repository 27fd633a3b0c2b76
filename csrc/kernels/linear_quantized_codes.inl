// Codes of quantised weights: decoding of each kind, and products with codes of inputs. See linear_quantized.inl.

// ---- In a panel. A step is 64 bytes; each vector of it has kFactors weights of four k.
//
//   decode(codes, p, w)      the weights of a vector, for immediate multiplication.
//   unpack(codes, p, out)    a whole step in the form of Unpacked; returns the end of the output.

// Tiles of at least kPrefetchRows rows, and unpack_codes(), prefetch codes this far ahead. On most processors, one row
// with few instructions per line relies on the hardware prefetcher, which software prefetches would disturb
// (pace/prefetch.h).
constexpr int kPrefetchBytes = 4096, kNever = 1 << 30;

// True for tiles of R rows that prefetch. One row also does if two do, on some processors.
template <class Codes, int R>
PACE_INLINE bool prefetches() {
    if constexpr (R >= Codes::kPrefetchRows) return true;
    if constexpr (R + 1 == Codes::kPrefetchRows) return kPrefetchesOneRow;
    return false;
}
constexpr bool kOneRowIsSlow = PACE_ISA_LEVEL <= 1 && !PACE_HAS_VNNI;

// Number of k that a NibbleSum can hold, for codes up to PackedHeader::kMaxDistance.
constexpr int kDistanceSumK = kNibbleSumK > 32 ? kInputGroup : 16;

struct CodesI8 {
    using Unpacked = struct UnpackedSigned;
    using Weight = Factor;
    using Input = InputCode;
    using Sum = SignedSum;
    static constexpr int kStep = 4, kFactors = 1, kStepBytes = 64, kSumK = kInputGroup;
    static constexpr int kPrefetchRows = kOneRowIsSlow ? 1 : 2;
    static constexpr bool kHasStarts = kSignedOffset != 0;
    explicit CodesI8(const PackedHeader&) {}
    PACE_INLINE void decode(const CodesI8&, const uint8_t* p, Factor* w) { w[0] = of_signed(load_bytes(p)); }
    PACE_INLINE auto broadcast(const InputCode* x) { return broadcast_input(x); }
    PACE_INLINE uint8_t* unpack(const CodesI8&, const uint8_t* p, uint8_t* out) {
        PACE_EACH(v, kVectors) store_unpacked(out + v * kVectorBytes, load_bytes(p + v * kVectorBytes));
        return out + kUnpackedBytes;
    }
};

struct CodesU4Levels {
    using Unpacked = struct UnpackedSigned;
    using Weight = Factor;
    using Input = InputCode;
    using Sum = SignedSum;
    static constexpr int kStep = 8, kFactors = 2, kStepBytes = 64, kSumK = kInputGroup;
    static constexpr int kPrefetchRows = PACE_ISA_LEVEL <= 1 ? 1 : 2;  // because of the table lookups, with VNNI too
    static constexpr bool kHasStarts = kSignedOffset != 0;
    const Lookup levels;
    explicit CodesU4Levels(const PackedHeader& h) : levels(h.levels) {}
    PACE_INLINE void decode(const CodesU4Levels& codes, const uint8_t* p, Factor* w) {
        const Bytes both = load_bytes(p);
        w[0] = of_signed(codes.levels(low_nibbles(both)));
        w[1] = of_signed(codes.levels(high_nibbles(both)));
    }
    PACE_INLINE auto broadcast(const InputCode* x) { return broadcast_input(x); }
    PACE_INLINE uint8_t* unpack(const CodesU4Levels& codes, const uint8_t* p, uint8_t* out) {
        PACE_EACH(v, kVectors) {
            const Bytes both = load_bytes(p + v * kVectorBytes);
            store_unpacked(out + v * kVectorBytes, codes.levels(low_nibbles(both)));
            store_unpacked(out + kUnpackedBytes + v * kVectorBytes, codes.levels(high_nibbles(both)));
        }
        return out + 2 * kUnpackedBytes;
    }
};

// Codes with levels c - 8.
struct CodesU4 {
    using Unpacked = struct UnpackedNibbles;
    using Weight = Nibbles;
    using Input = InputCode;
    using Sum = NibbleSum;
    static constexpr int kStep = 8, kFactors = 2, kStepBytes = 64, kSumK = kNibbleSumK;
    static constexpr int kPrefetchRows = kOneRowIsSlow ? 1 : 2;
    static constexpr bool kHasStarts = true;
    explicit CodesU4(const PackedHeader&) {}
    PACE_INLINE void decode(const CodesU4&, const uint8_t* p, Nibbles* w) {
        const Bytes both = load_bytes(p);
        w[0] = of_nibbles(low_nibbles(both));
        w[1] = of_nibbles(high_nibbles(both));
    }
    PACE_INLINE auto broadcast(const InputCode* x) { return broadcast_input(x); }
    PACE_INLINE uint8_t* unpack(const CodesU4&, const uint8_t* p, uint8_t* out) {
        PACE_EACH(v, kVectors) {
            const Bytes both = load_bytes(p + v * kVectorBytes);
            store_bytes(out + v * kVectorBytes, low_nibbles(both));
            store_bytes(out + 64 + v * kVectorBytes, high_nibbles(both));
        }
        return out + 128;
    }
};

// Levels close together, such as those of MXFP4. Distances from the smallest level are multiplied like nibbles, without
// magnitudes and signs.
struct CodesU4Near {
    using Unpacked = struct UnpackedDistances;
    using Weight = Nibbles;
    using Input = InputCode;
    using Sum = NibbleSum;
    static constexpr int kStep = 8, kFactors = 2, kStepBytes = 64, kSumK = kDistanceSumK;
    static constexpr int kPrefetchRows = PACE_ISA_LEVEL <= 1 ? 1 : 2;  // because of the table lookups, with VNNI too
    static constexpr bool kHasStarts = true;
    const Lookup distances;
    explicit CodesU4Near(const PackedHeader& h) : distances(Distances(h).of_code) {}
    PACE_INLINE void decode(const CodesU4Near& codes, const uint8_t* p, Nibbles* w) {
        const Bytes both = load_bytes(p);
        w[0] = of_nibbles(codes.distances(low_nibbles(both)));
        w[1] = of_nibbles(codes.distances(high_nibbles(both)));
    }
    PACE_INLINE auto broadcast(const InputCode* x) { return broadcast_input(x); }
    PACE_INLINE uint8_t* unpack(const CodesU4Near& codes, const uint8_t* p, uint8_t* out) {
        PACE_EACH(v, kVectors) {
            const Bytes both = load_bytes(p + v * kVectorBytes);
            store_bytes(out + v * kVectorBytes, codes.distances(low_nibbles(both)));
            store_bytes(out + 64 + v * kVectorBytes, codes.distances(high_nibbles(both)));
        }
        return out + 128;
    }

  private:
    struct Distances {
        int8_t of_code[16];
        explicit Distances(const PackedHeader& h) {
            for (int c = 0; c < 16; ++c) of_code[c] = int8_t(h.levels[c] - h.min_level());
        }
    };
};

// Codes in planes. A step is a unit of planes.inl. A 16-bit sum holds a group of inputs for 1 and 2 bits, and half of a
// unit for 5.
template <int bits>
struct CodesPlanes {
    static constexpr bool kSmall = bits <= 2;
    static constexpr int kBits = bits, kTo = Planes<bits>::kTo;
    static constexpr int kPlaces =
        bits == 1 || (bits == 2 && PACE_HAS_VNNI) ? 4 : 1;  // 16 bits hold no products of 192
    using Unpacked = std::conditional_t<kSmall, struct UnpackedSmall, struct UnpackedDistances>;
    using Weight = Nibbles;
    using Input = InputCode;
    using Sum = NibbleSum;
    static constexpr int kStep = 32, kFactors = 8, kStepBytes = Planes<kBits>::kUnitBytes,
                         kSumK = kSmall ? int(kInputGroup) : kDistanceSumK;
    static constexpr int kPrefetchRows = 1;
    static constexpr bool kHasStarts = true;
    explicit CodesPlanes(const PackedHeader&) {}
    // Step s of a unit; in place, it is a code times 2^(kBits (s % kPlaces)).
    template <int s, bool in_place = false>
    PACE_INLINE Nibbles weight(const uint8_t* p) {
        if constexpr (in_place)
            return of_nibbles(
                shifted_field<s * kBits % 8, kBits, s % kPlaces * kBits>(load_bytes(p + s * kBits / 8 * 64)));
        else
            return of_nibbles(Planes<kBits>::template step<s>(p));
    }
    PACE_INLINE auto broadcast(const InputCode* x) { return broadcast_input(x); }
    PACE_INLINE uint8_t* unpack(const CodesPlanes&, const uint8_t* p, uint8_t* out) {
        unrolled<8>([&](auto s) __attribute__((always_inline)) {
            PACE_EACH(v, kVectors)
                store_bytes(out + s * 64 + v * kVectorBytes, Planes<kBits>::template step<s>(p + v * kVectorBytes));
        });
        return out + 8 * 64;
    }
};
template <class Codes>
constexpr bool kInPlanes = false;
template <int kBits>
constexpr bool kInPlanes<CodesPlanes<kBits>> = true;

// Unpacks `count` codes for each output of a panel, a whole number of steps, from p on. Returns the end of the output.
template <class Codes>
PACE_INLINE uint8_t* unpack_codes(const Codes& codes, const uint8_t* p, int64_t count, uint8_t* out) {
    for (int64_t k = 0; k < count; k += Codes::kStep, p += Codes::kStepBytes) {
        __builtin_prefetch(p + kPrefetchBytes);
        out = Codes::unpack(codes, p, out);
    }
    return out;
}

// ---- Unpacked, in the first-level cache. Each vector of a step is one weight.

struct UnpackedSigned {
    using Weight = Unpacked;
    using Input = UnpackedInputCode;
    using Sum = SignedSum;
    static constexpr int kStep = 4, kFactors = 1, kStepBytes = kUnpackedBytes, kSumK = kInputGroup;
    static constexpr int kPrefetchRows = kNever;
    static constexpr int kRows = kPairsOfProducts ? 4 : kManyRows;
    static constexpr bool kHasStarts = kSignedOffset != 0 || kPairsOfProducts, kHasOwnProducts = kPairsOfProducts,
                          kUnrolledEnd = true;
    PACE_INLINE void decode(const UnpackedSigned&, const uint8_t* p, Unpacked* w) { w[0] = load_unpacked(p); }
    PACE_INLINE auto broadcast(const UnpackedInputCode* x) { return broadcast_input(x); }
};

struct UnpackedNibbles {
    using Weight = Nibbles;
    using Input = InputCode;
    using Sum = NibbleSum;
    static constexpr int kStep = 4, kFactors = 1, kStepBytes = 64, kSumK = kNibbleSumK;
    static constexpr int kPrefetchRows = kNever;
    static constexpr int kRows = kManyRows;
    static constexpr bool kHasStarts = true, kHasOwnProducts = false;
    // avx2 without VNNI is faster with a loop: benchmarks/RESULTS.md, "Sizes of tiles and blocks".
    static constexpr bool kUnrolledEnd = PACE_ISA_LEVEL >= 2 || PACE_HAS_VNNI;
    PACE_INLINE void decode(const UnpackedNibbles&, const uint8_t* p, Nibbles* w) { w[0] = of_nibbles(load_bytes(p)); }
    PACE_INLINE auto broadcast(const InputCode* x) { return broadcast_input(x); }
};

struct UnpackedDistances : UnpackedNibbles {
    static constexpr int kSumK = kDistanceSumK;
    PACE_INLINE void decode(const UnpackedDistances&, const uint8_t* p, Nibbles* w) {
        w[0] = of_nibbles(load_bytes(p));
    }
};

// Up to 3: a 16-bit sum holds a whole group of inputs, 32 * 2 * 3 * 127 = 24384.
struct UnpackedSmall : UnpackedNibbles {
    static constexpr int kSumK = int(kInputGroup);
    PACE_INLINE void decode(const UnpackedSmall&, const uint8_t* p, Nibbles* w) { w[0] = of_nibbles(load_bytes(p)); }
};

// ---- Products of one group of inputs. They advance x and w past the multiplied data.

template <>
struct AddLanes<I32> {
    I32 operator()(I32 acc, I32 sum) const { return acc + sum; }
};

// Adds products of `count` k, of R rows and P panels, to `sums`.
template <class Codes, int R, int P>
PACE_INLINE void add_steps(const Codes& codes, const typename Codes::Input*& x, int64_t x_stride, const uint8_t*& w,
                           int64_t panel_bytes, int64_t count, typename Codes::Sum (&sums)[R][P * kVectors]) {
    for (int64_t k = 0; k < count; k += Codes::kStep, x += Codes::kStep, w += Codes::kStepBytes) {
        if (prefetches<Codes, R>())
            PACE_EACH(line, Codes::kStepBytes / 64) __builtin_prefetch(w + 64 * line + kPrefetchBytes);
        if constexpr (R * P == 1) {  // one vector at a time, because registers are scarce
            decltype(Codes::broadcast(x)) inputs[Codes::kFactors];
            PACE_EACH(q, Codes::kFactors) inputs[q] = Codes::broadcast(x + 4 * q);
            PACE_EACH(v, kVectors) {
                typename Codes::Weight weights[Codes::kFactors];
                Codes::decode(codes, w + v * kVectorBytes, weights);
                PACE_EACH(q, Codes::kFactors) sums[0][v] = dot(sums[0][v], weights[q], inputs[q]);
            }
        } else {
            typename Codes::Weight weights[P * kVectors][Codes::kFactors];
            PACE_EACH(v, P * kVectors)
                Codes::decode(codes, w + v / kVectors * panel_bytes + v % kVectors * kVectorBytes, weights[v]);
            PACE_EACH(q, Codes::kFactors)
                PACE_EACH(r, R) {
                    const auto input = Codes::broadcast(x + r * x_stride + 4 * q);
                    PACE_EACH(v, P * kVectors) sums[r][v] = dot(sums[r][v], weights[v][q], input);
                }
        }
    }
}

// The number of sums for which codes are multiplied where they lie: the registers, less those for everything else.
constexpr int kInPlaceSums = PACE_ISA_LEVEL == 0 ? 0 : PACE_ISA_LEVEL == 1 ? 8 : 24;

// The same for codes in planes whose sums hold all of `count`; adds to `dots`. Codes of 1 and 2 bits take more
// instructions than a line takes to arrive. So few rows multiply them where they lie in a byte, with sums for each
// place, and shift the sums. These are also the chains of products that vpdpbusd needs, which waits for the one before.
template <class Codes, int R, int P>
PACE_INLINE void add_units(const typename Codes::Input*& x, int64_t x_stride, const uint8_t*& w, int64_t panel_bytes,
                           int64_t count, I32 (&dots)[R][P * kVectors]) {
    using Sum = typename Codes::Sum;
    constexpr int kSums = P * kVectors;
    constexpr bool kInPlace = Codes::kPlaces > 1 && R * kSums * Codes::kPlaces <= kInPlaceSums;
    constexpr int kChains = kInPlace ? Codes::kPlaces : !PACE_HAS_VNNI || R * kSums > 4 ? 1 : R * kSums > 2 ? 2 : 4;
    Sum sums[kChains][R][kSums];
    PACE_EACH(c, kChains)
        PACE_EACH(r, R)
            PACE_EACH(v, kSums) sums[c][r][v] = Sum{};
    for (int64_t k = 0; k < count; k += Codes::kStep, x += Codes::kStep, w += Codes::kStepBytes) {
        if (prefetches<Codes, R>())
            PACE_EACH(line, Codes::kStepBytes / 64) __builtin_prefetch(w + 64 * line + kPrefetchBytes);
        unrolled<Codes::kFactors>([&](auto s) __attribute__((always_inline)) {
            typename Codes::Weight weights[kSums];
            PACE_EACH(v, kSums)
                weights[v] =
                    Codes::template weight<s, kInPlace>(w + v / kVectors * panel_bytes + v % kVectors * kVectorBytes);
            PACE_EACH(r, R) {
                const auto input = Codes::broadcast(x + r * x_stride + 4 * s);
                PACE_EACH(v, kSums) {
                    Sum& sum = sums[s % kChains][r][v];
                    sum = dot(sum, weights[v], input);
                }
            }
        });
    }
    const AddLanes<Sum> add_lanes;
    unrolled<kChains>([&](auto c) __attribute__((always_inline)) {
        constexpr int kShift = kInPlace ? Codes::kBits * c - Codes::kTo : 0;
        PACE_EACH(r, R)
            PACE_EACH(v, kSums) {
                if constexpr (kShift == 0)
                    dots[r][v] = add_lanes(dots[r][v], sums[c][r][v]);
                else if constexpr (kShift > 0)
                    dots[r][v] = dots[r][v] + halved<kShift>(add_lanes(broadcast_int(0), sums[c][r][v]));
                else
                    dots[r][v] = dots[r][v] + shift_left<-kShift>(add_lanes(broadcast_int(0), sums[c][r][v]));
            }
    });
}

// The same for codes with steps longer than a narrow sum can hold.
template <class Codes, int R, int P>
PACE_INLINE void add_parts_of_steps(const typename Codes::Input*& x, int64_t x_stride, const uint8_t*& w,
                                    int64_t panel_bytes, int64_t count, I32 (&dots)[R][P * kVectors]) {
    using Sum = typename Codes::Sum;
    constexpr int kParts = Codes::kStep / Codes::kSumK, kFactors = Codes::kFactors / kParts;
    for (int64_t k = 0; k < count; k += Codes::kStep, x += Codes::kStep, w += Codes::kStepBytes) {
        if (prefetches<Codes, R>())
            for (int line = 0; line < Codes::kStepBytes; line += 64) __builtin_prefetch(w + line + kPrefetchBytes);
        unrolled<kParts>([&](auto part) __attribute__((always_inline)) {
            Sum sums[R][P * kVectors];
            PACE_EACH(r, R)
                PACE_EACH(v, P * kVectors) sums[r][v] = Sum{};
            unrolled<kFactors>([&](auto factor) __attribute__((always_inline)) {
                constexpr int s = part * kFactors + factor;
                typename Codes::Weight weights[P * kVectors];
                PACE_EACH(v, P * kVectors)
                    weights[v] =
                        Codes::template weight<s>(w + v / kVectors * panel_bytes + v % kVectors * kVectorBytes);
                PACE_EACH(r, R) {
                    const auto input = Codes::broadcast(x + r * x_stride + 4 * s);
                    PACE_EACH(v, P * kVectors) sums[r][v] = dot(sums[r][v], weights[v], input);
                }
            });
            const AddLanes<Sum> add_lanes;
            PACE_EACH(r, R)
                PACE_EACH(v, P * kVectors) dots[r][v] = add_lanes(dots[r][v], sums[r][v]);
        });
    }
}

// Computes the dot products of levels over `count` k. Sums of codes begin with start(r, v). Codes with narrower sums
// add those up over kSumK of k at a time.
template <class Codes, int R, int P, class Start>
PACE_INLINE void dots_of_group(const Codes& codes, const typename Codes::Input*& x, int64_t x_stride, const uint8_t*& w,
                               int64_t panel_bytes, int64_t count, const Start& start, I32 (&dots)[R][P * kVectors]) {
    using Sum = typename Codes::Sum;
    PACE_EACH(r, R)
        PACE_EACH(v, P * kVectors) dots[r][v] = start(r, v);
    if constexpr (Codes::kSumK < Codes::kStep) {
        add_parts_of_steps<Codes, R, P>(x, x_stride, w, panel_bytes, count, dots);
    } else if constexpr (kInPlanes<Codes>) {
        add_units<Codes, R, P>(x, x_stride, w, panel_bytes, count, dots);
    } else if constexpr (std::is_same_v<Sum, I32>) {
        add_steps<Codes, R, P>(codes, x, x_stride, w, panel_bytes, count, dots);
    } else {
        for (int64_t k = 0; k < count; k += Codes::kSumK) {
            Sum sums[R][P * kVectors];
            PACE_EACH(r, R)
                PACE_EACH(v, P * kVectors) sums[r][v] = Sum{};
            add_steps<Codes, R, P>(codes, x, x_stride, w, panel_bytes,
                                   count - k < Codes::kSumK ? count - k : Codes::kSumK, sums);
            const AddLanes<Sum> add_lanes;
            PACE_EACH(r, R)
                PACE_EACH(v, P * kVectors) dots[r][v] = add_lanes(dots[r][v], sums[r][v]);
        }
    }
}

// Adds the products of a group to the sums of a row.
template <int kSums>
PACE_INLINE void add_group(const I32 (&dots)[kSums], const F32* scales, const F32* mins, const float* x_scale,
                           const float* x_sum, F32 (&sum)[kSums]) {
    PACE_EACH(v, kSums) sum[v] = fused_fma(to_f32(dots[v]), scales[v] * broadcast(*x_scale), sum[v]);
    if (!mins) return;
    PACE_EACH(v, kSums) sum[v] = fused_fma(mins[v] * broadcast(*x_scale), broadcast(*x_sum), sum[v]);
}

// Fields of the header that all tiles of a call share; computing them takes divisions.
struct QuantizedWeight {
    const PackedHeader& h;
    const int64_t k_padded, group, groups, input_group, input_groups, panel_bytes, pair_scales_bytes;
    const char *const row_scales, *const panels;
    explicit QuantizedWeight(const PackedHeader& h)
        : h(h),
          k_padded(h.k_padded),
          group(h.group),
          groups(h.groups()),
          input_group(h.input_group()),
          input_groups(h.input_groups()),
          panel_bytes(h.panel_bytes()),
          pair_scales_bytes(h.pair_scales_bytes()),
          row_scales(h.row_scales()),
          panels(h.panel(0)) {}
    const char* panel(int64_t index) const { return panels + index * panel_bytes; }
    // Loads scales for the 16 outputs of a panel, or the powers of two for group scales; 1 with token_inputs.
    void load_row_scales(int64_t panel, F32* scales) const {
        if (h.token_inputs) {
            PACE_EACH(v, kVectors) scales[v] = broadcast(1.0f);
            return;
        }
        if (group) return load_powers((const int8_t*)row_scales + 16 * panel, scales);
        PACE_EACH(v, kVectors) scales[v] = load((const float*)row_scales + 16 * panel + v * kLanes);
    }
    // Number of k in input group g.
    int64_t count(int64_t g) const {
        return k_padded - g * input_group < input_group ? k_padded - g * input_group : input_group;
    }
};

// Rows of inputs: codes as int8 or int16, and the scales, sums and starts of their groups.
template <class Code>
struct InputRows {
    const Code* const codes;
    const float *const scales, *const sums;
    const int32_t* const starts;
    const int64_t codes_stride, stride;  // distance between rows: for codes, for the rest
    InputRows(const QuantizedWeight& w, const char* x, int64_t x_stride)
        : codes(sizeof(Code) == 1 ? (const Code*)x : (const Code*)QuantizedInput::wide_codes(x, w.h)),
          scales(QuantizedInput::scales(x, w.h)),
          sums(scales + w.input_groups),
          starts((const int32_t*)(sums + w.input_groups)),
          codes_stride(x_stride / int64_t(sizeof(Code))),
          stride(x_stride / 4) {}
};
