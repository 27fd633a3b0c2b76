// Matrix product of quantised activations with weights in super-blocks, for many rows.
//
// SHAPES, DEFINITION, NUMERICS  As in super_blocks.inl.
//
// LAYOUT      A block is several super-blocks of a panel, in the form that the table multiplies. It has codes of a byte
//             each, [k / 4][16][4], and scales [16] for each group. Each 32 k have the numbers [16] that multiply sums
//             of inputs. Each 128 k have scales [16] in fp32.
//
// WHY THIS WAY  As in linear_quantized_many.inl, unpacking costs little if a block stays in the first-level cache while
//               all rows pass over it. A tile then has registers for its sums:
//
//     avx2     6 rows x 1 panel   12 sums of 16 bits, 2 weights, an input, a product: all 16 registers. Totals are in
//                                 memory; each group adds to them once.
//              4 rows x 1 panel   for 6 bits, whose sums go to totals every 8 k; and for levels.
//     avx512   6 rows x 2 panels  12 sums, 12 totals, 2 weights, an input: 27 of 32 registers.

constexpr int kSuperBlocksAtOnce = kManyPanels == 1 ? 4 : 2;

struct UnpackedSuperBlocks {
    static constexpr int kMaxK = kSuperBlocksAtOnce * int(kSuperBlock);
    alignas(64) uint8_t codes[16 * kMaxK];
    alignas(64) int32_t group_scales[kMaxK / 16][16], numbers[kMaxK / 32][16];
    alignas(64) float scales[kMaxK / 128][16], mins[kMaxK / 128][16];
};

// The form in which unpacked codes are multiplied. With vpdpbusd, levels are ordinary codes with an offset.
template <class Codes>
struct UnpackedSuper {
    static constexpr bool kSigned = !Codes::kUnsigned && kSignedOffset == 0;
    using Sum = std::conditional_t<kSigned, SignedSum, NibbleSum>;
    static constexpr int kSumSteps = Codes::kSumSteps, kGroupSteps = Codes::kGroupSteps, kGroup = Codes::kGroup;
    static constexpr int kRows = PACE_ISA_LEVEL == 0 ? 2 : kSigned || kSumSteps < kGroupSteps / 2 + 1 ? 4 : 6;
    PACE_INLINE auto weight(const uint8_t* p) {
        if constexpr (kSigned)
            return of_signed(load_bytes(p));
        else
            return of_nibbles(load_bytes(p));
    }
};

PACE_INLINE void store_int(int32_t* p, I32 a) { store((float*)p, from_bits(a)); }
PACE_INLINE I32 load_int(const int32_t* p) { return bits(load((const float*)p)); }

// Unpacks super-blocks [first, end) of a panel.
template <class Codes>
static void unpack_super_blocks(const Codes& codes, const PackedHeader& h, int64_t panel, int64_t first, int64_t end,
                                UnpackedSuperBlocks& block) {
    using Unpacked = UnpackedSuper<Codes>;
    const SuperWeight w(h);
    const uint8_t* p = w.panel(panel) + first * w.block_bytes;
    uint8_t* out = block.codes;
    for (int64_t b = 0; b < end - first; ++b, p += w.block_bytes) {
        const SuperHead<Codes> head(w, p);
        const int8_t* const numbers = h.has_mins ? head.group_mins : head.group_scales;
        PACE_EACH(v, kVectors) {
            const int lane = v * kLanes;
            for (int half = 0; half < 2; ++half) {
                store(block.scales[2 * b + half] + lane, head.scales[v]);
                store(block.mins[2 * b + half] + lane, head.mins[v]);
            }
            for (int g = 0; g < Codes::kGroups; ++g)
                store_int(block.group_scales[b * Codes::kGroups + g] + lane,
                          scale_of<typename Unpacked::Sum>(load_int(head.group_scales + g * 16 + lane)));
            for (int half = 0; half < 2; ++half)
                for (int j = 0; j < 4; ++j)
                    store_int(block.numbers[8 * b + 4 * half + j] + lane,
                              numbers_of_sums<Codes>(numbers + half * Codes::kGroups / 2 * 16, j, v));
        }
        const uint8_t* unit = head.codes;
        for (int u = 0; u < 8; ++u, unit += Codes::kUnitBytes, out += 8 * 64) {
            if constexpr (Codes::kStreams)
                PACE_EACH(line, Codes::kUnitBytes / 64) __builtin_prefetch(unit + 64 * line + kPrefetchBytes);
            unrolled<8>([&](auto s) __attribute__((always_inline)) {
                PACE_EACH(v, kVectors)
                    store_bytes(out + s * 64 + v * kVectorBytes,
                                Codes::template bytes<s>(codes, unit + v * kVectorBytes));
            });
        }
    }
}

#if PACE_ISA_LEVEL < 5

// One tile: R rows x P panels over `halves` times 128 k, which `blocks` contain, from half `first` of the inputs on.
// Adds to `out` unless `first` is 0.
template <class Codes, int R, int P>
[[gnu::noinline]] static void unpacked_super_tile(const PackedHeader& h, const UnpackedSuperBlocks* blocks,
                                                  const char* x, int64_t x_stride, int64_t first, int64_t halves,
                                                  int32_t offset, float* out, int64_t out_stride) {
    using Unpacked = UnpackedSuper<Codes>;
    using Sum = typename Unpacked::Sum;
    constexpr int kSums = P * kVectors, kGroupsOfHalf = 128 / Unpacked::kGroup;
    const SuperInputs inputs(h, x, x_stride);
    const bool has_mins = h.has_mins;
    for (int64_t c = 0; c < halves; ++c) {
        I32 total[R][kSums];
        PACE_EACH(r, R)
            PACE_EACH(v, kSums) total[r][v] = broadcast_int(0);
        const InputCode* codes_of_x = inputs.codes + 128 * (first + c);
        const uint8_t* codes = blocks->codes + c * 128 * 16;
#pragma GCC unroll 1
        for (int g = 0; g < kGroupsOfHalf; ++g)
#pragma GCC unroll 1
            for (int part = 0; part < Unpacked::kGroupSteps; part += Unpacked::kSumSteps) {
                Sum sums[R][kSums];
                PACE_EACH(r, R)
                    PACE_EACH(v, kSums) sums[r][v] = Sum{};
#pragma GCC unroll 8
                for (int s = 0; s < Unpacked::kSumSteps; ++s, codes += 64, codes_of_x += 4) {
                    decltype(Unpacked::weight(codes)) weights[kSums];
                    PACE_EACH(v, kSums)
                        weights[v] = Unpacked::weight(codes + v / kVectors * sizeof(UnpackedSuperBlocks) +
                                                      v % kVectors * kVectorBytes);
                    PACE_EACH(r, R) {
                        const auto input = broadcast_input(codes_of_x + r * inputs.codes_stride);
                        PACE_EACH(v, kSums) sums[r][v] = dot(sums[r][v], weights[v], input);
                    }
                }
                PACE_EACH(v, kSums) {
                    const I32 scale =
                        load_int(blocks[v / kVectors].group_scales[c * kGroupsOfHalf + g] + v % kVectors * kLanes);
                    PACE_EACH(r, R) total[r][v] = add_scaled(total[r][v], sums[r][v], scale);
                }
            }
        F32 scales[kSums], mins[kSums];
        PACE_EACH(v, kSums) {
            scales[v] = load(blocks[v / kVectors].scales[c] + v % kVectors * kLanes);
            mins[v] = load(blocks[v / kVectors].mins[c] + v % kVectors * kLanes);
        }
        PACE_EACH(r, R) {
            I32 sums[kSums];
            F32 row[kSums];
            PACE_EACH(v, kSums) {
                sums[v] = broadcast_int(0);
                row[v] = first + c == 0 ? zero() : load(out + r * out_stride + v * kLanes);
            }
            if (has_mins || offset)
                PACE_EACH(j, 4) {
                    const I32 of_inputs = broadcast_sums(inputs.sums + 8 * (first + c) + r * inputs.sums_stride, j);
                    PACE_EACH(v, kSums)
                        sums[v] = add_pairs(sums[v],
                                            load_int(blocks[v / kVectors].numbers[4 * c + j] + v % kVectors * kLanes),
                                            of_inputs);
                }
            add_half(total[r], sums, offset, scales, has_mins ? mins : nullptr,
                     inputs.scales[first + c + r * inputs.scales_stride], row);
            PACE_EACH(v, kSums) store(out + r * out_stride + v * kLanes, row[v]);
        }
    }
}

// Tiles for `rows` rows, at most those of a tile, x `panels` panels, at most kManyPanels.
template <class Codes, int R = 1>
static void unpacked_super_rows(int64_t rows, const PackedHeader& h, const UnpackedSuperBlocks* blocks, int64_t panels,
                                const char* x, int64_t x_stride, int64_t first, int64_t halves, int32_t offset,
                                float* out, int64_t out_stride) {
    if constexpr (R < UnpackedSuper<Codes>::kRows)
        if (rows != R)
            return unpacked_super_rows<Codes, R + 1>(rows, h, blocks, panels, x, x_stride, first, halves, offset, out,
                                                     out_stride);
    if (panels == kManyPanels)
        unpacked_super_tile<Codes, R, kManyPanels>(h, blocks, x, x_stride, first, halves, offset, out, out_stride);
    else
        unpacked_super_tile<Codes, R, 1>(h, blocks, x, x_stride, first, halves, offset, out, out_stride);
}

template <class Codes>
static void linear_super_many(const QuantizedLinearArgs& a) {
    const PackedHeader& h = *a.weight;
    const Codes codes(h);
    UnpackedSuperBlocks blocks[kManyPanels];
    const int64_t super_blocks = h.k / kSuperBlock;
    for (int64_t b = 0; b < super_blocks; b += kSuperBlocksAtOnce) {
        const int64_t end = super_blocks - b < kSuperBlocksAtOnce ? super_blocks : b + kSuperBlocksAtOnce;
        for (int64_t panel = 0; panel < a.panel_count; panel += kManyPanels) {
            const int64_t panels = a.panel_count - panel < kManyPanels ? a.panel_count - panel : kManyPanels;
            for (int64_t p = 0; p < panels; ++p)
                unpack_super_blocks(codes, h, a.first_panel + panel + p, b, end, blocks[p]);
            for_tiles(a.rows, UnpackedSuper<Codes>::kRows, [&](int64_t row, int64_t rows) {
                unpacked_super_rows<Codes>(rows, h, blocks, panels, (const char*)a.x + row * a.x_stride, a.x_stride,
                                           2 * b, 2 * (end - b), codes.offset,
                                           a.sums + row * a.sums_stride + panel * 16, a.sums_stride);
            });
        }
    }
}

#endif
