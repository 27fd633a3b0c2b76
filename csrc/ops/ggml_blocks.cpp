// Unpacks rows in ggml's blocks, as GGUF files contain them: to codes and scales, or straight into packed weights.
//
// LAYOUT    A row is a sequence of blocks of 32 to 256 weights. ggml-common.h defines their structs, and ggml-quants.c
//           their meaning.
//
// NUMERICS  Nothing is rounded here: codes and scales are those of the file. Minima of super-blocks change their sign.
//
// WHY THIS WAY  Sixteen rows at a time are unpacked to arrays that stay in cache, and packed from there.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ggml_fields.h"
#include "ggml_ternary.h"
#include "pace/grids.h"
#include "quantized_weight.h"

namespace pace {

namespace {

constexpr int kMXFP4 = 39, kNVFP4 = 40, kWideQ2_0 = 142;

// ---- The types: weights and bytes in a block, and `unpack`, which returns true if its scales are finite.

struct Q4_0 {
    static constexpr int kWeights = 32, kBytes = 18;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<16, 16, 4>(b + 2, out.codes);
        *out.scales = to_float(half_at(b));
        return is_finite(half_at(b));
    }
};

struct Q4_1 {
    static constexpr int kWeights = 32, kBytes = 20;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<16, 16, 4>(b + 4, out.codes);
        *out.scales = to_float(half_at(b)), *out.mins = to_float(half_at(b + 2));
        return is_finite(half_at(b)) && is_finite(half_at(b + 2));
    }
};

struct Q5_0 {
    static constexpr int kWeights = 32, kBytes = 22;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<16, 16, 4>(b + 6, out.codes);
        add_fields<4, 1, 1, 4>(b + 2, out.codes);
        *out.scales = to_float(half_at(b));
        return is_finite(half_at(b));
    }
};

struct Q5_1 {
    static constexpr int kWeights = 32, kBytes = 24;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<16, 16, 4>(b + 8, out.codes);
        add_fields<4, 1, 1, 4>(b + 4, out.codes);
        *out.scales = to_float(half_at(b)), *out.mins = to_float(half_at(b + 2));
        return is_finite(half_at(b)) && is_finite(half_at(b + 2));
    }
};

struct Q8_0 {
    static constexpr int kWeights = 32, kBytes = 34;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        std::memcpy(out.codes, b + 2, 32);
        *out.scales = to_float(half_at(b));
        return is_finite(half_at(b));
    }
};

struct MXFP4 {
    static constexpr int kWeights = 32, kBytes = 17;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<16, 16, 4>(b + 1, out.codes);
        *out.scales = power_of_two(b[0]);
        return b[0] != 255;
    }
};

// A scale for each 16 weights, whose 8 bytes of codes follow those of the other scales.
struct NVFP4 {
    static constexpr int kWeights = 64, kBytes = 36;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        for (int g = 0; g < 4; ++g) {
            unpack_fields<8, 8, 4>(b + 4 + 8 * g, out.codes + 16 * g);
            out.scales[g] = unsigned_e4m3(b[g]);
        }
        return true;
    }
};

struct Q2_K {
    static constexpr int kWeights = 256, kBytes = 84;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<64, 32, 2>(b + 16, out.codes);
        for (int g = 0; g < 16; ++g) out.group_scales[g] = b[g] & 15, out.group_mins[g] = b[g] >> 4;
        *out.super_scales = half_at(b + 80), *out.super_mins = negative(half_at(b + 82));
        return is_finite(*out.super_scales) && is_finite(*out.super_mins);
    }
};

struct Q3_K {
    static constexpr int kWeights = 256, kBytes = 110;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<64, 32, 2>(b + 32, out.codes);
        add_fields<32, 32, 1, 2>(b, out.codes);
        uint8_t groups[16];
        unpack_fields<8, 8, 4>(b + 96, groups);
        add_fields<4, 4, 2, 4>(b + 104, groups);
        for (int g = 0; g < 16; ++g) out.group_scales[g] = int8_t(groups[g] - 32);
        *out.super_scales = half_at(b + 108);
        return is_finite(*out.super_scales);
    }
};

// Q4_K and Q5_K begin alike: two float16 numbers, and for each of 8 groups a 6-bit scale and a 6-bit minimum.
bool unpack_six_bits(const uint8_t* b, const Arrays& out) {
    const uint8_t *first = b + 4, *second = b + 8, *third = b + 12;
    for (int g = 0; g < 4; ++g) {
        out.group_scales[g] = first[g] & 63, out.group_scales[g + 4] = (third[g] & 15) | first[g] >> 6 << 4;
        out.group_mins[g] = second[g] & 63, out.group_mins[g + 4] = third[g] >> 4 | second[g] >> 6 << 4;
    }
    *out.super_scales = half_at(b), *out.super_mins = negative(half_at(b + 2));
    return is_finite(*out.super_scales) && is_finite(*out.super_mins);
}

struct Q4_K {
    static constexpr int kWeights = 256, kBytes = 144;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<128, 32, 4>(b + 16, out.codes);
        return unpack_six_bits(b, out);
    }
};

struct Q5_K {
    static constexpr int kWeights = 256, kBytes = 176;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<128, 32, 4>(b + 48, out.codes);
        add_fields<32, 32, 1, 4>(b + 16, out.codes);
        return unpack_six_bits(b, out);
    }
};

struct Q6_K {
    static constexpr int kWeights = 256, kBytes = 210;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<128, 64, 4>(b, out.codes);
        add_fields<64, 32, 2, 4>(b + 128, out.codes);
        std::memcpy(out.group_scales, b + 192, 16);
        *out.super_scales = half_at(b + 208);
        return is_finite(*out.super_scales);
    }
};

struct IQ4_XS {
    static constexpr int kWeights = 256, kBytes = 136;
    static bool unpack(const uint8_t* b, const Arrays& out) {
        unpack_fields<128, 16, 4>(b + 8, out.codes);
        uint8_t groups[8];
        unpack_fields<4, 1, 4>(b + 4, groups);
        add_fields<2, 1, 2, 4>(b + 2, groups);
        for (int g = 0; g < 8; ++g) out.group_scales[g] = int8_t(groups[g] - 32);
        *out.super_scales = half_at(b);
        return is_finite(*out.super_scales);
    }
};

template <Code code>
struct PointsOf {
    static constexpr int kWeights = 256, kBytes = grid_block_bytes(code);
    static bool unpack(const uint8_t* b, const Arrays& out) {
        *out.super_scales = unpack_grid_block(code, b, out.codes, out.group_scales);
        return is_finite(*out.super_scales);
    }
};

// ---- Types by number, and rows of a type

struct Type {
    int weights, bytes, bits, group;
    bool in_super_blocks, has_mins;
    Code grid;  // None: codes
    bool (*unpack_row)(const uint8_t* row, int64_t blocks, Arrays out);
};

template <class Block, int kGroup>
constexpr bool kInSuperBlocks = Block::kWeights == kSuperBlock && kGroup < kSuperBlock;

template <class Block, bool kHasMins, int kGroup>
bool unpack_row(const uint8_t* row, int64_t blocks, Arrays out) {
    constexpr bool kSuper = kInSuperBlocks<Block, kGroup>;
    constexpr int kGroups = Block::kWeights / kGroup;
    bool finite = true;
    for (int64_t i = 0; i < blocks; ++i, row += Block::kBytes) {
        finite &= Block::unpack(row, out);
        out.codes += Block::kWeights;
        if constexpr (kSuper) {
            out.group_scales += kGroups, ++out.super_scales;
            if constexpr (kHasMins) out.group_mins += kGroups, ++out.super_mins;
        } else {
            out.scales += kGroups;
            if constexpr (kHasMins) out.mins += kGroups;
        }
    }
    return finite;
}

template <class Block, int kBits, bool kHasMins = false, int kGroup = 32>
constexpr Type type_of(Code grid = Code::None) {
    return {Block::kWeights,
            Block::kBytes,
            kBits,
            kGroup,
            kInSuperBlocks<Block, kGroup>,
            kHasMins,
            grid,
            unpack_row<Block, kHasMins, kGroup>};
}

template <Code code>
constexpr Type grid_of() {
    return type_of<PointsOf<code>, code_bits(code), false, grid_type(code).group>(code);
}

Type find_type(int number) {
    switch (number) {
        case 2:
        case 20:  // IQ4_NL, which differs only in its levels
            return type_of<Q4_0, 4>();
        case 3:
            return type_of<Q4_1, 4, true>();
        case 6:
            return type_of<Q5_0, 5>();
        case 7:
            return type_of<Q5_1, 5, true>();
        case 8:
            return type_of<Q8_0, 8>();
        case 10:
            return type_of<Q2_K, 2, true, 16>();
        case 11:
            return type_of<Q3_K, 3, false, 16>();
        case 12:
            return type_of<Q4_K, 4, true>();
        case 13:
            return type_of<Q5_K, 5, true>();
        case 14:
            return type_of<Q6_K, 6, false, 16>();
        case 16:
            return grid_of<Code::IQ2XXS>();
        case 17:
            return grid_of<Code::IQ2XS>();
        case 18:
            return grid_of<Code::IQ3XXS>();
        case 19:
            return grid_of<Code::IQ1S>();
        case 21:
            return grid_of<Code::IQ3S>();
        case 22:
            return grid_of<Code::IQ2S>();
        case 23:
            return type_of<IQ4_XS, 4>();
        case 29:
            return grid_of<Code::IQ1M>();
        case 34:
            return type_of<TQ1_0, 2, false, 256>();
        case 35:
            return type_of<TQ2_0, 2, false, 256>();
        case kMXFP4:
            return type_of<MXFP4, 4>();
        case kNVFP4:
            return type_of<NVFP4, 4, false, 16>();
        case 41:
            return type_of<Q1_0, 1, false, 128>();
        case 42:
            return type_of<Q2_0<64>, 2, false, 64>();
        case kWideQ2_0:
            return type_of<Q2_0<128>, 2, false, 128>();
    }
    throw std::invalid_argument("no type " + std::to_string(number) + " of ggml's blocks is implemented");
}

// Number of blocks in a row of k weights; throws std::invalid_argument if it is not an integer.
int64_t blocks_of_row(const Type& type, int64_t k) {
    if (k % type.weights)
        throw std::invalid_argument("rows are multiples of " + std::to_string(type.weights) + " weights; got " +
                                    std::to_string(k));
    return k / type.weights;
}

// The start of row r in arrays of whole rows.
Arrays row_of(const Arrays& rows, const Type& type, int64_t k, int64_t r) {
    Arrays row = rows;
    const int64_t groups = k / type.group, supers = k / kSuperBlock;
    row.codes += r * k;
    if (type.in_super_blocks) {
        row.group_scales += r * groups, row.super_scales += r * supers;
        if (type.has_mins) row.group_mins += r * groups, row.super_mins += r * supers;
    } else {
        row.scales += r * groups;
        if (type.has_mins) row.mins += r * groups;
    }
    return row;
}

// Thread-local memory for arrays of up to kPanelRows rows.
Arrays scratch_arrays(int64_t k) {
    thread_local std::vector<uint64_t> memory;
    const int64_t codes = kPanelRows * k, groups = round_up(codes / 16, 8);
    memory.resize(size_t(divide_up(codes, 8) + groups));  // a group takes up to 8 bytes: two floats, or less
    auto* const floats = reinterpret_cast<float*>(memory.data() + divide_up(codes, 8));
    auto* const bytes = reinterpret_cast<int8_t*>(floats);
    auto* const halves = reinterpret_cast<F16*>(bytes + 2 * groups);
    return {reinterpret_cast<uint8_t*>(memory.data()),
            floats,
            floats + groups,
            bytes,
            bytes + groups,
            halves,
            halves + groups / 2};
}

}  // namespace

void UnpackBlocksOp::prepare(int) {
    const Type type = find_type(source.type);
    blocks = blocks_of_row(type, k);
    rows_per_chunk = std::max<int64_t>(1, 128 * 1024 / std::max<int64_t>(1, k));
    chunk_count = divide_up(rows, rows_per_chunk);
}

void UnpackBlocksOp::run(int, int64_t chunk, int) const {
    const Type type = find_type(source.type);
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk);
    for (int64_t r = chunk * rows_per_chunk; r < end; ++r)
        type.unpack_row(source.data + r * source.stride, blocks, row_of(out, type, k, r));
}

void PackBlocksOp::prepare(int) {
    const PackedHeader& h = part_of_rows(weight, row, rows);
    const Type type = find_type(source.type);
    if (h.bits != type.bits || int(h.group) != type.group || h.in_super_blocks() != type.in_super_blocks ||
        bool(h.has_mins) != type.has_mins || (h.layout == Layout::PanelGrid ? h.grid() : Code::None) != type.grid)
        throw std::invalid_argument("this weight does not hold what these blocks do");
    blocks = blocks_of_row(type, h.k);
    weight = const_cast<PackedHeader*>(&h);
    rows_per_chunk = rows_of_chunk(h);
    chunk_count = divide_up(rows, rows_per_chunk);
}

// Packs rows [r, r + count), all in one panel, of a type with super-blocks: one super-block of all rows at a time.
static bool pack_super_blocks(const PackBlocksOp& op, const Type& type, const PackedHeader& h, int64_t r,
                              int64_t count) {
    const Place place = place_of(h, op.row + r);
    uint8_t codes[kSuperBlock];
    int8_t group_scales[16], group_mins[16];
    F16 scale = {}, min = {};
    bool finite = true;
    for (int64_t b = 0; b < op.blocks; ++b) {
        uint8_t* const block = panel_at(h, op.weight, place.panel) + b * h.super_block_bytes();
        for (int64_t i = 0; i < count; ++i) {
            const uint8_t* const source = op.source.data + (r + i) * op.source.stride + b * type.bytes;
            if (type.grid != Code::None) {
                finite &= is_finite(pack_grid_block(type.grid, source, place.row + i, block));
                continue;
            }
            finite &= type.unpack_row(source, 1, {codes, nullptr, nullptr, group_scales, group_mins, &scale, &min});
            pack_super_block(h, place.row + i, {codes, group_scales, group_mins, scale, min}, block);
        }
    }
    return finite;
}

// The same for a type without super-blocks, through arrays of whole rows.
static bool pack_rows_of_blocks(const PackBlocksOp& op, const Type& type, const PackedHeader& h, int64_t r,
                                int64_t count) {
    const Arrays arrays = scratch_arrays(h.k);
    bool finite = true;
    for (int64_t i = 0; i < count; ++i)
        finite &= type.unpack_row(op.source.data + (r + i) * op.source.stride, op.blocks, row_of(arrays, type, h.k, i));
    if (op.source.type == kMXFP4 || op.source.type == kNVFP4)  // their levels are stored as twice their values
        for (int64_t i = 0; i < count * (h.k / type.group); ++i) arrays.scales[i] *= 0.5f;
    PackQuantizedOp pack = {
        op.weight, op.row + r, count, arrays.codes, h.k, arrays.scales, type.has_mins ? arrays.mins : nullptr,
        false,     0,          0};
    pack.prepare(1);
    for (int64_t chunk = 0; chunk < pack.chunks(0); ++chunk) pack.run(0, chunk, 0);
    return finite;
}

void PackBlocksOp::run(int, int64_t chunk, int) const {
    const PackedHeader& h = packed_header(weight);
    const Type type = find_type(source.type);
    const auto pack = type.in_super_blocks ? pack_super_blocks : pack_rows_of_blocks;
    const int64_t end = std::min(rows, (chunk + 1) * rows_per_chunk);
    bool finite = true;
    for (int64_t r = chunk * rows_per_chunk; r < end;) {
        const int64_t count = rows_in_panel(h, row + r, end - r);
        finite &= pack(*this, type, h, r, count);
        r += count;
    }
    if (!finite) *all_finite = false;
}

}  // namespace pace
