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

// Unpacks SixBits at p to bytes [numbers][16].
template <int kNumbers, bool kSigned>
static void unpack_six_bits(const uint8_t* p, int8_t* out) {
    constexpr int kRow = kNumbers / 4 * 16;
    const auto every_byte = [](uint64_t byte) { return byte * 0x0101010101010101; };
    const auto finish = [&](uint64_t six) {
        if (!kSigned) return six;
        const uint64_t sign = six & every_byte(0x20);
        return six | sign << 1 | sign << 2;
    };
    for (int i = 0; i < kRow; i += 8) {
        uint64_t rows[4];
        for (int row = 0; row < 3; ++row) memcpy(rows + row, p + row * kRow + i, 8);
        rows[3] =
            (rows[0] >> 6 & every_byte(0x03)) | (rows[1] >> 4 & every_byte(0x0c)) | (rows[2] >> 2 & every_byte(0x30));
        for (int row = 0; row < 4; ++row) {
            const uint64_t numbers = finish(rows[row] & every_byte(0x3f));
            memcpy(out + row * kRow + i, &numbers, 8);
        }
    }
}

static void unpack_nibble_pairs(const uint8_t* p, int8_t* low, int8_t* high) {
    for (int i = 0; i < 256; i += 8) {
        uint64_t both, nibbles;
        memcpy(&both, p + i, 8);
        nibbles = both & 0x0f0f0f0f0f0f0f0f;
        memcpy(low + i, &nibbles, 8);
        nibbles = both >> 4 & 0x0f0f0f0f0f0f0f0f;
        memcpy(high + i, &nibbles, 8);
    }
}
