// What the files of packed weights share.
#pragma once

#include "pace/ops.h"

namespace pace {

// Where a logical row lives.
struct Place {
    int64_t panel, row;
};

Place place_of(const PackedHeader& h, int64_t row);

// Of `count` logical rows from `row` on, how many follow each other in one panel: to its end, or to where the gate rows
// end.
int64_t rows_in_panel(const PackedHeader& h, int64_t row, int64_t count);

// Chunks of about 256 KB of weight: enough of them to share, large enough not to be felt.
int64_t rows_of_chunk(const PackedHeader& h);

// Where a panel begins in memory that may be written.
inline uint8_t* panel_at(const PackedHeader& h, void* weight, int64_t panel) {
    return static_cast<uint8_t*>(weight) + (h.panel(panel) - reinterpret_cast<const char*>(&h));
}

// A super-block of one row: codes [256], a byte each, whole numbers of its groups, and two F16 numbers.
struct SuperBlock {
    const uint8_t* codes;
    const int8_t *group_scales, *group_mins;
    F16 scale, min;
};

// Writes it as a row's part of the super-block of a panel that begins at `block`.
void pack_super_block(const PackedHeader& h, int64_t row, const SuperBlock& from, uint8_t* block);

// The values [k] of one row, those that products multiply, in fp32.
void unpack_quantized_row(const PackedHeader& h, Place place, const int32_t* order, float* out);

// The same of a weight in super-blocks (ops/super_weight.cpp).
void unpack_super_row(const PackedHeader& h, Place place, const int32_t* order, float* out);

}  // namespace pace
