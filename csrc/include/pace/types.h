// Types that every part of the C++ shares: storage formats, activations, the header of a packed weight.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pace {

// Storage formats that are only bits: arithmetic happens in fp32, after a load of kernels/vec.inl.
struct BF16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

// I8 is a dtype of keys and values alone: int8_t times a scale for each head and position (attention.h).
enum class DType : uint32_t { F32 = 0, BF16 = 1, F16 = 2, I8 = 3 };

constexpr size_t dtype_bytes(DType dtype) { return dtype == DType::F32 ? 4 : dtype == DType::I8 ? 1 : 2; }

// The elementwise functions an epilogue can apply. Definitions (x in fp32):
//   Silu       x / (1 + exp(-x))
//   Gelu       x/2 (1 + erf(x / sqrt 2))
//   GeluTanh   x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))    also "gelu_new" and "gelu_fast"
//   QuickGelu  x / (1 + exp(-1.702 x))
//   Relu       max(x, 0)
enum class Activation : uint32_t { None = 0, Silu, Gelu, GeluTanh, QuickGelu, Relu, kCount };

// Order of the elements within a panel of 16 output rows; drawn in kernels/pack.inl and docs/architecture.md.
enum class Layout : uint32_t {
    PanelF32 = 1,    // [k][16]
    PanelF16,        // [k][16]
    PanelBF16Split,  // [k][8] lanes of 32 bits: row c low, row c + 8 high
    PanelBF16,       // [k][16]
    PanelBF16Pair,   // [k/2][16][2], k padded with zeros to a multiple of kPairPadding
};

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kPanelRows = 16;

// K of PanelBF16Pair is padded to whole AMX tiles (32 k) on every table, so that one layout serves both tables that use
// it.
constexpr int64_t kPairPadding = 32;

// The first 64 bytes of a packed weight; panels follow at once. A kernel given another layout than its own raises.
struct PackedHeader {
    static constexpr uint32_t kMagic = 0x45434150;  // "PACE"
    uint32_t magic;
    Layout layout;
    DType dtype;
    uint32_t glu;  // 1: rows are [gate; up], stored as alternating panels
    int64_t n;     // logical output rows
    int64_t k;     // logical inputs
    int64_t k_padded;
    int64_t panels;
    uint8_t reserved[16];
};
static_assert(sizeof(PackedHeader) == 64);

}  // namespace pace
