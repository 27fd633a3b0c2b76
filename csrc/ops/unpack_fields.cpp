// Fields of a few bits, as ggml's blocks hold codes, each to a byte of its own.
#include <algorithm>
#include <stdexcept>

#include "pace/ops.h"

namespace pace {

namespace {

// Fields of a chunk: some 20 us of work.
constexpr int64_t kChunkFields = 128 * 1024;

template <bool merge>
void unpack(const uint8_t* __restrict source, int64_t bytes, int64_t run, int bits, int shift,
            uint8_t* __restrict out) {
    const int mask = (1 << bits) - 1;
    for (int64_t begin = 0; begin < bytes; begin += run) {
        for (int low = 0; low < 8; low += bits, out += run) {
            for (int64_t i = 0; i < run; ++i) {
                const auto field = uint8_t((source[begin + i] >> low & mask) << shift);
                out[i] = merge ? uint8_t(out[i] | field) : field;
            }
        }
    }
}

}  // namespace

void UnpackFieldsOp::prepare(int) {
    if ((bits != 1 && bits != 2 && bits != 4) || run_bytes < 1 || block_bytes % run_bytes || shift < 0 ||
        shift + bits > 8)
        throw std::invalid_argument("fields have 1, 2 or 4 bits, in whole runs of bytes, and end within a byte");
    blocks_per_chunk = std::max<int64_t>(1, kChunkFields / std::max<int64_t>(1, fields_of_block()));
    chunk_count = divide_up(blocks, blocks_per_chunk);
}

void UnpackFieldsOp::run(int, int64_t chunk, int) const {
    const auto unpack_block = merge ? unpack<true> : unpack<false>;
    const int64_t end = std::min(blocks, (chunk + 1) * blocks_per_chunk);
    for (int64_t block = chunk * blocks_per_chunk; block < end; ++block)
        unpack_block(source + block * source_stride, block_bytes, run_bytes, bits, shift,
                     out + block * fields_of_block());
}

}  // namespace pace
