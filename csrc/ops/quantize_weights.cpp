// Rows of floats to codes and scales, several rows in each chunk. The arguments are in the order of
// pace.ops.native.quantize. The computation is in kernels/quantize_weights.inl.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "pace/ops.h"

namespace pace {

namespace {

// Elements in a chunk: about 50 us of work.
constexpr int64_t kChunkElements = 64 * 1024;

// Packs two codes into a byte, the first in the low bits; unused bits of the last byte are zero.
void pack_nibbles(const uint8_t* codes, int64_t k, uint8_t* out) {
    for (int64_t i = 0; i < k / 2; ++i) out[i] = uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
    if (k % 2) out[k / 2] = codes[k - 1];
}

}  // namespace

void QuantizeRowsOp::prepare(int) {
    if (row.k < 1 || row.group < 1 || rows < 0)
        throw std::invalid_argument("rows to quantise have at least one element, and so have groups");
    if (row.super_scales && row.k % kSuperBlock)
        throw std::invalid_argument("rows of super-blocks are multiples of 256 weights");
    rows_per_chunk = std::max<int64_t>(1, kChunkElements / row.k);
    chunk_count = divide_up(rows, rows_per_chunk);
}

void QuantizeRowsOp::run(int, int64_t chunk, int) const {
    const bool in_super_blocks = row.super_scales != nullptr;
    const int64_t groups = divide_up(row.k, row.group), supers = row.k / kSuperBlock,
                  staged = in_super_blocks ? kSuperBlock : std::min(row.group, row.k),
                  stage_floats = QuantizeRow::stage_floats(staged);
    QuantizeRow args = row;
    args.group = std::min(row.group, row.k);
    args.stage = static_cast<float*>(thread_scratch(size_t(stage_floats) * sizeof(float) + size_t(row.k) + 15));
    args.codes = reinterpret_cast<uint8_t*>(args.stage + stage_floats);
    const int64_t source_bytes = source_stride * int64_t(dtype_bytes(row.source_dtype));
    for (int64_t r = chunk * rows_per_chunk; r < std::min(rows, (chunk + 1) * rows_per_chunk); ++r) {
        args.source = static_cast<const char*>(row.source) + r * source_bytes;
        if (in_super_blocks) {
            args.group_scales = row.group_scales + r * groups;
            args.super_scales = row.super_scales + r * supers;
            args.group_mins = row.group_mins ? row.group_mins + r * groups : nullptr;
            args.super_mins = row.super_mins ? row.super_mins + r * supers : nullptr;
        } else {
            args.scales = row.scales + r * groups;
            args.mins = row.mins ? row.mins + r * groups : nullptr;
        }
        if (!kernels().quantize_row(args)) {
            all_finite->store(false, std::memory_order_relaxed);
            return;
        }
        if (nibbles) {
            pack_nibbles(args.codes, row.k, row.codes + r * divide_up(row.k, 2));
        } else {
            std::memcpy(row.codes + r * row.k, args.codes, size_t(row.k));
        }
    }
}

}  // namespace pace
