// Shared by the files of packed weights.
#pragma once

#include "pace/ops.h"

namespace pace {

// The position of a logical row.
struct Place {
    int64_t panel, row;
};

Place place_of(const PackedHeader& h, int64_t row);

// The number of logical rows, of `count` from `row` on, that are consecutive in one panel. It ends with the panel, or
// with the gate rows.
int64_t rows_in_panel(const PackedHeader& h, int64_t row, int64_t count);

// Rows in chunks of about 256 KB of weight: small enough to distribute, large enough that their overhead is negligible.
int64_t rows_of_chunk(const PackedHeader& h);

// The start of a panel, writable.
inline uint8_t* panel_at(const PackedHeader& h, void* weight, int64_t panel) {
    return static_cast<uint8_t*>(weight) + (h.panel(panel) - reinterpret_cast<const char*>(&h));
}

// The number of k in a unit of kernels/planes.inl.
constexpr int kUnit = 32;

// Packs one row's codes [kUnit] of a unit, a byte each. `out` is the row's first byte in the unit.
using PackUnit = void (*)(const uint8_t* codes, uint8_t* out);
PackUnit pack_unit(int bits);

// The code of column k of a unit; `unit` is the row's first byte in it.
int code_of_unit(const uint8_t* unit, int bits, int k);

// A super-block of one row: codes [256], a byte each, the integers of its groups, and two F16 numbers.
struct SuperBlock {
    const uint8_t* codes;
    const int8_t *group_scales, *group_mins;
    F16 scale, min;
};

// Writes `from` as one row of the super-block at `block` in a panel.
void pack_super_block(const PackedHeader& h, int64_t row, const SuperBlock& from, uint8_t* block);

// The values [k] of one row, as products use them, in fp32.
void unpack_quantized_row(const PackedHeader& h, Place place, const int32_t* order, float* out);

// The same for a weight in super-blocks (ops/super_weight.cpp).
void unpack_super_row(const PackedHeader& h, Place place, const int32_t* order, float* out);

// The same for points of grids (ops/grid_weight.cpp).
void unpack_grid_row(const PackedHeader& h, Place place, const int32_t* order, float* out);

// From ggml's block of such a type: codes [256] and the integers of its groups. Returns its scale.
F16 unpack_grid_block(Code code, const uint8_t* block, uint8_t* codes, int8_t* group_scales);

// Writes ggml's block as one row of the super-block at `to` in a panel. Returns its scale.
F16 pack_grid_block(Code code, const uint8_t* block, int64_t row, uint8_t* to);

}  // namespace pace
