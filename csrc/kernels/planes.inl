// Codes of 1 to 6 bits and the small integers of their groups, as they lie in panels of 16 outputs.
//
// LAYOUT      A unit is 32 k of 16 outputs, `bits` lines of 64 bytes. The outputs lie in a line as in
//             linear_quantized.inl: byte 4 n + k % 4 belongs to output n. Step s of a unit is k = 4 s .. 4 s + 3.
//
//               low bits    4 of them: 4 lines; step s in line s / 2, the low nibble if s is even, else the high.
//
//                           2 of them: 2 lines; step s in line s / 4, bits 2 (s % 4) and the next.
//
//                           1 of them: 1 line; step s is bit s of a byte. Products use 0 and 2, the distances of the
//                           levels -1 and 1.
//
//               high bits   the rest, after the low ones. For 3 and 5 bits 1 line; step s is bit s of a byte.
//                           For 6 bits 2 lines; step s in line s / 4, bits 2 (s % 4) and the next.
//
//             SixBits: numbers j = 0 .. 15 (or 7) of a super-block for 16 outputs, a quarter of them in each of four
//             rows. Three rows are bytes [quarter][16]. Their low 6 bits are the row's own numbers. Their high 2 bits
//             are the fourth row's numbers, lowest two bits first. Signed numbers are in two's complement.

// Calls f(0), ..., f(count - 1) with compile-time constants.
template <int count, class F, int... i>
PACE_INLINE void unrolled(const F& f, std::integer_sequence<int, i...>) {
    (f(std::integral_constant<int, i>()), ...);
}
template <int count, class F>
PACE_INLINE void unrolled(const F& f) {
    unrolled<count>(f, std::make_integer_sequence<int, count>());
}

template <int kBits>
struct Planes {
    static constexpr int kLowBits = kBits == 1 ? 1 : kBits <= 3 ? 2 : 4, kHighBits = kBits - kLowBits;
    static constexpr int kTo = kBits == 1;  // the place of the low bits
    static constexpr int kUnitBytes = 64 * kBits;

    // Step s of the unit at p, as bytes, for the outputs of one vector; add kVectorBytes to p for the next vector.
    template <int s>
    PACE_INLINE Bytes step(const uint8_t* p) {
        constexpr int kLowLine = s * kLowBits / 8, kLowBit = s * kLowBits % 8;
        const Bytes low = shifted_field<kLowBit, kLowBits, kTo>(load_bytes(p + 64 * kLowLine));
        if constexpr (kHighBits == 0) {
            return low;
        } else {
            constexpr int kHighLine = kLowBits + s * kHighBits / 8, kHighBit = s * kHighBits % 8;
            return low | shifted_field<kHighBit, kHighBits, kLowBits>(load_bytes(p + 64 * kHighLine));
        }
    }
};

// Fields of the bytes of a word, like those of Bytes.
template <int from, int bits, int to>
PACE_INLINE uint64_t shifted_field(uint64_t bytes) {
    if constexpr (from > to) bytes >>= from - to;
    if constexpr (from < to) bytes <<= to - from;
    constexpr uint64_t kMask = ((1ull << bits) - 1) << to;
    return bytes & kMask * 0x0101010101010101ull;
}

// Loads and stores eight bytes as a word, or a vector of them.
template <class Part>
PACE_INLINE Part load_part(const void* p) {
    if constexpr (std::is_same_v<Part, Bytes>) {
        return load_bytes(p);
    } else {
        Part part;
        memcpy(&part, p, sizeof part);
        return part;
    }
}
PACE_INLINE void store_part(void* p, Bytes part) { store_bytes(p, part); }
PACE_INLINE void store_part(void* p, uint64_t part) { memcpy(p, &part, sizeof part); }

// Unpacks SixBits at p to bytes [numbers][16] at an address that store_bytes() takes. Rows shorter than a vector are
// unpacked in words.
template <int kNumbers, bool kSigned>
static void unpack_six_bits(const uint8_t* p, int8_t* out) {
    constexpr int kRow = kNumbers / 4 * 16;
    using Part = std::conditional_t<(kRow < kVectorBytes), uint64_t, Bytes>;
    for (int i = 0; i < kRow; i += int(sizeof(Part))) {
        Part rows[4];
        for (int row = 0; row < 3; ++row) rows[row] = load_part<Part>(p + row * kRow + i);
        rows[3] = shifted_field<6, 2, 0>(rows[0]) | shifted_field<6, 2, 2>(rows[1]) | shifted_field<6, 2, 4>(rows[2]);
        for (int row = 0; row < 4; ++row) {
            Part six = shifted_field<0, 6, 0>(rows[row]);
            if (kSigned) six = six | shifted_field<5, 1, 6>(six) | shifted_field<5, 1, 7>(six);
            store_part(out + row * kRow + i, six);
        }
    }
}

static void unpack_nibble_pairs(const uint8_t* p, int8_t* low, int8_t* high) {
    for (int i = 0; i < 256; i += kVectorBytes) {
        const Bytes both = load_bytes(p + i);
        store_bytes(low + i, low_nibbles(both));
        store_bytes(high + i, high_nibbles(both));
    }
}
