// Types shared by all of the C++: dtypes, activations, the header of a packed weight.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pace {

// Dtypes for storage only: arithmetic happens in fp32, after a load of kernels/vec.inl.
struct BF16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

// I8 is a dtype only for keys and values: int8_t times a scale for each head and position (attention.h).
enum class DType : uint8_t { F32 = 0, BF16 = 1, F16 = 2, I8 = 3 };

constexpr size_t dtype_bytes(DType dtype) { return dtype == DType::F32 ? 4 : dtype == DType::I8 ? 1 : 2; }

// The elementwise functions an epilogue can apply. Definitions (x in fp32):
//   Silu       x / (1 + exp(-x)).
//   Gelu       x/2 (1 + erf(x / sqrt 2)).
//   GeluTanh   x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))); also called "gelu_new" and "gelu_fast".
//   QuickGelu  x / (1 + exp(-1.702 x)).
//   Relu       max(x, 0).
//   Relu2      max(x, 0)^2.
//   Tanh       tanh(x).
//   Clamp      x, not below low and not above high.
//   Xielu      alpha_p x^2 + beta x if x > 0, else alpha_n (exp(min(x, eps)) - 1 - x) + beta x.
//   ClampedSwiglu  glu only: g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = up in [-limit, limit]
enum class Activation : uint32_t {
    None = 0,
    Silu,
    Gelu,
    GeluTanh,
    QuickGelu,
    Relu,
    Relu2,
    Tanh,
    Clamp,
    Xielu,
    ClampedSwiglu,
    kCount
};

// An activation, and the numbers in its definition.
struct ActivationFunction {
    Activation kind;
    float low = 0, high = 0;                            // for Clamp
    float limit = 0, alpha = 0;                         // for ClampedSwiglu
    float alpha_p = 0, alpha_n = 0, beta = 0, eps = 0;  // for Xielu; eps <= 0

    ActivationFunction(Activation kind = Activation::None) : kind(kind) {}
};

// Order of the elements within a panel of 16 output rows; drawn in kernels/pack.inl and docs/architecture/kernels.md.
enum class Layout : uint16_t {
    PanelF32 = 1,    // [k][16]
    PanelF16,        // [k][16]
    PanelBF16Split,  // [k][8] lanes of 32 bits: row c low, row c + 8 high
    PanelBF16,       // [k][16]
    PanelBF16Pair,   // [k/2][16][2], k padded with zeros (padded_pairs)
    // Quantised layouts have the same bytes for every table. Scales of groups are stored between the codes.
    PanelI8,  // [k/4][16][4] int8
    PanelU4,  // [k/8][16][4] bytes: low nibbles k..k+3, high nibbles k+4..k+7
    PanelF8,  // [k][16] float8_e4m3fn
    // Codes of other widths, in units of 32 k; see kernels/planes.inl.
    PanelPlanes,  // 1, 2 and 5 bits
    PanelSuper,   // 2 to 6 bits, in super-blocks
    PanelGrid,    // points of grids, in super-blocks; see pace/grids.h
    // Several weights, stacked by rows: see PackedHeader.
    Parts,
};

// The type of code for each element of a quantised weight (pace/ops/weight_layout.py); None for dense weights.
// IQ1S to IQ3S are points of grids: ggml's IQ types of 1 to 3 bits.
enum class Code : uint32_t { None = 0, I8, U4, F8, U2, U3, U5, U6, IQ1S, IQ1M, IQ2XXS, IQ2XS, IQ2S, IQ3XXS, IQ3S, U1 };

constexpr bool is_grid(Code code) { return code >= Code::IQ1S && code <= Code::IQ3S; }

// Bits of an unpacked code.
constexpr int code_bits(Code code) {
    constexpr int kBits[] = {0, 8, 4, 8, 2, 3, 5, 6, 3, 3, 3, 3, 3, 4, 4, 1};
    return kBits[int(code)];
}

// Bytes of ggml's block of 256 weights.
constexpr int grid_block_bytes(Code code) {
    constexpr int kBytes[] = {50, 56, 66, 74, 82, 98, 110};
    return kBytes[int(code) - int(Code::IQ1S)];
}

// The format of group scales and minima in a super-block. They are integers:
//   Bytes        8 bits, signed; no minima.
//   SixBits      6 bits, signed if there are no minima: kernels/planes.inl.
//   NibblePairs  4 bits, the minimum in the high bits of a byte.
enum class GroupScales : uint8_t { None = 0, Bytes, SixBits, NibblePairs };

// The formats of pace/quant, which turn rows of floats into codes and scales. Codebook is nf4 and fp4.
enum class Quantizer : uint32_t { Int8, Int4, AffineInt4, Codebook, MXFP4, MXFP8, FP8, Q2K, Q3K, Q4K, Q5K, Q6K };

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t value, int64_t multiple) { return divide_up(value, multiple) * multiple; }

constexpr int64_t kPanelRows = 16;

// K of PanelBF16Pair is padded to whole AMX tiles (32 k) on every table, so that one layout serves both tables that use
// it.
constexpr int64_t kPairPadding = 32;

// Half a tile is enough for a short K, such as the rank of an adapter.
constexpr int64_t padded_pairs(int64_t k) {
    return k <= kPairPadding / 2 ? kPairPadding / 2 : round_up(k, kPairPadding);
}

// Number of inputs that share a scale, if weights have row scales, or groups that are multiples of this, or
// super-blocks.
constexpr int64_t kInputGroup = 128;

// Maximum number of inputs of a weight with token_inputs.
constexpr int64_t kMaxTokenInputs = 1 << 16;

// Number of weights in a row whose group scales share one scale: ggml's super-block.
constexpr int64_t kSuperBlock = 256;

// Number of inputs in each sum of codes, for minima and offsets of super-blocks.
constexpr int64_t kInputSum = 16;

// The first 64 bytes of a packed weight. The rest follows:
//
//   dense        panels [16][k_padded] of the dtype.
//
//   quantised    row scales: float [panels][16] if a scale serves a whole row; else exponents, int8 [panels][16].
//                panels: codes, k ascending. With group scales, for every two groups:
//                        scales F16 [2][16], minima F16 [2][16] if any, codes of the two groups.
//                Each panel begins at a multiple of 64 bytes, and is read as one stream from first byte to last.
//
//   super-blocks panels: for every 256 k, scales F16 [16], scales of minima F16 [16] if any. The GroupScales
//                of 256 / group groups and 16 rows follow, then codes. The size is that of ggml's blocks of these rows.
//
//   grids        panels: super-blocks as pace/grids.h draws them. The size is that of ggml's blocks, too.
//
//   parts        int64 offsets [parts()] from this header to the headers of other weights, which are stacked by rows.
//                A glu weight has two parts, gate and up.
//
// A group's scale is its F16 times 2 to the row's exponent. In a super-block it is the group's integer times the F16. A
// kernel raises if it is given a layout other than its own.
struct PackedHeader {
    static constexpr uint32_t kMagic = 0x45434150;          // "PACE"
    static constexpr int64_t kPairScales = 2 * kPanelRows;  // F16 numbers for two groups
    static constexpr int kMaxDistance = 32;                 // 16 bits hold eight products with inputs: 8 * 32 * 127
    uint32_t magic;
    Layout layout;
    uint8_t glu : 1;           // 1: rows are [gate; up], stored as alternating panels
    uint8_t token_inputs : 1;  // 1: all inputs of a token share one scale, and sums over k are exact
    uint8_t has_mins;          // 1: groups have minima next to their scales
    DType dtype;               // F32 if quantised: the dtype of unpacked rows
    uint8_t bits;              // in a code
    uint8_t offset;            // a code stands for code - offset (one bit: 2 code - 1); for PanelGrid: the Code
    GroupScales group_scales;
    uint32_t group;  // consecutive weights in a row that share a scale; 0 = the whole row. For Parts: their number
    int64_t n;       // logical output rows
    int64_t k;       // logical inputs
    int64_t k_padded;
    int64_t panels;
    int8_t levels[16];  // for 4 bits and grids: the factor of each code

    constexpr bool quantized() const { return layout >= Layout::PanelI8 && layout != Layout::Parts; }
    constexpr bool in_super_blocks() const { return layout == Layout::PanelSuper || layout == Layout::PanelGrid; }
    constexpr Code grid() const { return Code(offset); }
    // True if every level is code - offset.
    constexpr bool has_even_levels() const {
        bool even = true;
        for (int c = 0; c < 16; ++c) even &= levels[c] == c - offset;
        return even;
    }
    constexpr int min_level() const {
        int least = levels[0];
        for (int c = 1; c < 16; ++c) least = levels[c] < least ? levels[c] : least;
        return least;
    }
    constexpr int max_level() const {
        int most = levels[0];
        for (int c = 1; c < 16; ++c) most = levels[c] > most ? levels[c] : most;
        return most;
    }
    // True if products use each code's distance from the smallest level: codes in planes, and 4-bit codes whose levels
    // are close together. Other codes use their signed levels.
    constexpr bool multiplies_distances() const {
        return (layout == Layout::PanelU4 || layout == Layout::PanelPlanes) &&
               max_level() - min_level() <= kMaxDistance;
    }

    // -- parts; a weight of any other layout is its own only part
    constexpr int parts() const { return layout == Layout::Parts ? int(group) : 1; }
    const PackedHeader& part(int index) const {
        if (layout != Layout::Parts) return *this;
        const char* const self = reinterpret_cast<const char*>(this);
        return *reinterpret_cast<const PackedHeader*>(self + reinterpret_cast<const int64_t*>(this + 1)[index]);
    }

    // -- quantised weights
    constexpr int64_t groups() const { return group ? divide_up(k, group) : 1; }
    // Number of inputs that share a scale: gcd(group, kInputGroup).
    constexpr int64_t input_group() const {
        const int64_t power = group & -group;
        return group && !in_super_blocks() && power < kInputGroup ? power : kInputGroup;
    }
    constexpr int64_t input_groups() const { return divide_up(k_padded, input_group()); }

    // -- offsets and sizes, in bytes
    constexpr int64_t row_scales_bytes() const {
        return !quantized() || in_super_blocks() ? 0
               : group                           ? round_up(panels * kPanelRows, 64)
                                                 : panels * kPanelRows * int64_t(sizeof(float));
    }
    // Size of the first `count` columns of a panel, without scales.
    constexpr int64_t codes_bytes(int64_t count) const {
        const int64_t elements = kPanelRows * count;
        return quantized() ? elements * bits / 8 : elements * int64_t(dtype_bytes(dtype));
    }
    // Size of the scales, and minima, of two groups.
    constexpr int64_t pair_scales_bytes() const {
        return group ? kPairScales * int64_t(sizeof(F16)) * (1 + has_mins) : 0;
    }
    // Offset in a panel of group g's scales [16]; its minima [16] are kPairScales numbers after them. codes_offset() is
    // the same for the codes of column k.
    constexpr int64_t scales_offset(int64_t g) const {
        return g / 2 * (pair_scales_bytes() + codes_bytes(2 * int64_t(group))) +
               g % 2 * kPanelRows * int64_t(sizeof(F16));
    }
    constexpr int64_t codes_offset(int64_t k) const {
        return codes_bytes(k) + (group ? (k / (2 * int64_t(group)) + 1) * pair_scales_bytes() : 0);
    }
    // Sizes in a super-block of 16 rows: its scales; scales and minima of its groups; the whole.
    constexpr int64_t super_scales_bytes() const { return kPanelRows * int64_t(sizeof(F16)) * (1 + has_mins); }
    constexpr int64_t group_scales_bytes() const {
        const int64_t numbers = kSuperBlock / group * kPanelRows;
        return group_scales == GroupScales::SixBits ? numbers * (1 + has_mins) * 6 / 8 : numbers;
    }
    constexpr int64_t super_block_bytes() const {
        if (layout == Layout::PanelGrid) return kPanelRows * grid_block_bytes(grid());
        return super_scales_bytes() + group_scales_bytes() + codes_bytes(kSuperBlock);
    }
    constexpr int64_t panel_bytes() const {
        if (in_super_blocks()) return round_up(k / kSuperBlock * super_block_bytes(), 64);
        return codes_bytes(k_padded) + divide_up(groups(), 2) * pair_scales_bytes();
    }
    const char* row_scales() const { return reinterpret_cast<const char*>(this + 1); }
    const char* panel(int64_t index) const { return row_scales() + row_scales_bytes() + index * panel_bytes(); }
    int64_t bytes() const { return int64_t(sizeof(PackedHeader)) + row_scales_bytes() + panels * panel_bytes(); }
};
static_assert(sizeof(PackedHeader) == 64);

}  // namespace pace
