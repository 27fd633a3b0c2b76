// Weights that are points of grids: from ggml's blocks to panels (pace/grids.h), and from either to codes and numbers.
//
// NUMERICS  All values are stored exactly, and an unpacked element is exact in fp32.
#include <cstring>

#include "pace/convert.h"
#include "pace/grids.h"
#include "quantized_weight.h"

namespace pace {

namespace {

constexpr int kUnits = 8;  // of 32 weights in a block

// A block of 256 weights of any of the types.
struct Block {
    F16 scale;
    int8_t numbers[16];          // of groups, as stored: b for 2 b + 1
    uint16_t points[kUnits][8];  // up to eight in a unit
    uint32_t flags[kUnits];      // in the order of panels
};

template <class T>
T read(const uint8_t* p) {
    T value;
    std::memcpy(&value, p, sizeof value);
    return value;
}
void write16(uint8_t* p, int value) {
    const auto bits = uint16_t(value);
    std::memcpy(p, &bits, sizeof bits);
}

// The flags of 8 neighbours, the first in bit 0, as those of the first 8 weights of a unit.
uint32_t spread(uint32_t flags) {
    const auto to_bytes = [](uint32_t four) { return four * 0x00204081 & 0x01010101; };  // a bit for each byte
    return to_bytes(flags & 15) | to_bytes(flags >> 4) << 4;
}
// The sign that makes their number even, as the eighth.
uint32_t with_parity(uint32_t seven) { return seven | uint32_t(__builtin_parity(seven)) << 7; }

// 28 bits: four times seven signs.
uint32_t spread_signs(uint32_t signs) {
    uint32_t flags = 0;
    for (int i = 0; i < 4; ++i) flags |= spread(with_parity(signs >> 7 * i & 127)) << i;
    return flags;
}
// 32 bits: four times eight.
uint32_t spread_bytes(uint32_t signs) {
    uint32_t flags = 0;
    for (int i = 0; i < 4; ++i) flags |= spread(signs >> 8 * i & 255) << i;
    return flags;
}

// ---- ggml's blocks (ggml-common.h)

void read_unit_of_ones(Code code, const uint8_t* b, int u, Block& to) {
    const bool large = code == Code::IQ1M;
    const int high = read<uint16_t>(b + (large ? 32 : 34) + 2 * u), stride = large ? 4 : 3;
    for (int i = 0; i < 4; ++i)
        to.points[u][i] = uint16_t(b[(large ? 0 : 2) + 4 * u + i] | (high >> stride * i & 7) << 8);
    if (large) {
        to.flags[u] = 0;
        for (int i = 0; i < 4; ++i) to.flags[u] |= (high >> (4 * i + 3) & 1 ? 0x11111111u : 0u) << i;
        const int numbers = read<uint16_t>(b + 48 + u / 2 * 2) >> 6 * (u % 2);
        to.numbers[2 * u] = int8_t(numbers & 7), to.numbers[2 * u + 1] = int8_t(numbers >> 3 & 7);
    } else {
        to.flags[u] = high >> 15 ? 0xffffffffu : 0u;
        to.numbers[u] = int8_t(high >> 12 & 7);
    }
}

void read_unit_of_twos(Code code, const uint8_t* b, int u, Block& to) {
    if (code == Code::IQ2XXS) {
        const auto signs = read<uint32_t>(b + 2 + 8 * u + 4);
        for (int i = 0; i < 4; ++i) to.points[u][i] = b[2 + 8 * u + i];
        to.flags[u] = spread_signs(signs);
        to.numbers[u] = int8_t(signs >> 28);
        return;
    }
    const bool small = code == Code::IQ2XS;
    uint32_t signs = 0;
    for (int i = 0; i < 4; ++i) {
        if (small) {
            const auto both = read<uint16_t>(b + 2 + 8 * u + 2 * i);
            to.points[u][i] = both & 511;
            signs |= uint32_t(both >> 9) << 7 * i;
        } else {
            to.points[u][i] = uint16_t(b[2 + 4 * u + i] | (b[66 + u] >> 2 * i & 3) << 8);
        }
    }
    to.flags[u] = small ? spread_signs(signs) : spread_bytes(read<uint32_t>(b + 34 + 4 * u));
    const int numbers = b[(small ? 66 : 74) + u];
    to.numbers[2 * u] = int8_t(numbers & 15), to.numbers[2 * u + 1] = int8_t(numbers >> 4);
}

void read_unit_of_threes(Code code, const uint8_t* b, int u, Block& to) {
    const bool small = code == Code::IQ3XXS;
    const int high = small ? 0 : b[66 + u];
    for (int i = 0; i < 8; ++i) to.points[u][i] = uint16_t(b[2 + 8 * u + i] | (high >> i & 1) << 8);
    const auto signs = read<uint32_t>(b + (small ? 66 : 74) + 4 * u);
    to.flags[u] = small ? spread_signs(signs) : spread_bytes(signs);
    to.numbers[u] = int8_t(small ? signs >> 28 : b[106 + u / 2] >> 4 * (u % 2) & 15);
}

F16 scale_of_ones(const uint8_t* numbers, int stride) {
    int bits = 0;
    for (int i = 0; i < 4; ++i) bits |= (read<uint16_t>(numbers + stride * i) >> 12) << 4 * i;
    return {uint16_t(bits)};
}

Block read_block(Code code, const uint8_t* b) {
    const GridType type = grid_type(code);
    Block block = {};
    block.scale = code == Code::IQ1M ? scale_of_ones(b + 48, 2) : F16{read<uint16_t>(b)};
    const auto read_unit = type.weights == 4    ? read_unit_of_threes
                           : type.sign_bits > 0 ? read_unit_of_twos
                                                : read_unit_of_ones;
    for (int u = 0; u < kUnits; ++u) read_unit(code, b, u, block);
    return block;
}

// ---- Panels

constexpr uint32_t kTop = 0xf0000000;

void write_rest(Code code, const Block& from, int u, int row, uint8_t* rest) {
    const uint16_t* const points = from.points[u];
    const auto high = [&](int stride) {
        int bits = 0;
        for (int i = 0; i < (code == Code::IQ3S ? 8 : 4); ++i) bits |= points[i] >> 8 << stride * i;
        return bits;
    };
    const uint8_t numbers = uint8_t(from.numbers[2 * u] | from.numbers[2 * u + 1] << 4);  // if groups have 16
    switch (code) {
        case Code::IQ1S:
            return write16(rest + 2 * row, high(3) | from.numbers[u] << 12 | int(from.flags[u] & 1) << 15);
        case Code::IQ1M: {
            int flags = 0;
            for (int i = 0; i < 4; ++i) flags |= int(from.flags[u] >> i & 1) << (4 * i + 3);
            return write16(rest + 2 * row, high(4) | flags);
        }
        case Code::IQ2XS:
            rest[row] = numbers;
            return;
        case Code::IQ2S:
            rest[row] = uint8_t(high(2)), rest[16 + row] = numbers;
            return;
        case Code::IQ3S:
            rest[row] = uint8_t(high(1));
            return;
        default:
            return;
    }
}

void write_row(Code code, const Block& from, int row, uint8_t* to) {
    const GridType type = grid_type(code);
    if (code == Code::IQ1M) {
        for (int i = 0; i < 4; ++i) {
            int numbers = from.scale.bits >> 4 * i << 12;
            for (int g = 0; g < 4; ++g) numbers |= from.numbers[4 * i + g] << 3 * g;
            write16(to + 32 * i + 2 * row, numbers);
        }
    } else {
        write16(to + 2 * row, from.scale.bits);
    }
    if (code == Code::IQ3S)
        for (int i = 0; i < 4; ++i) to[32 + 16 * i + row] = uint8_t(from.numbers[2 * i] | from.numbers[2 * i + 1] << 4);
    for (int u = 0; u < kUnits; ++u) {
        uint8_t* unit = to + type.front_bytes + u * type.unit_bytes;
        for (int i = 0; i < 32 / type.weights; ++i)
            unit[64 * (i / 4) + 4 * row + i % 4] = uint8_t(from.points[u][i] & 255);
        unit += 64 * (8 / type.weights);
        if (type.sign_bits) {
            uint32_t flags = from.flags[u];
            if (type.sign_bits == 7) {
                uint32_t top = uint32_t(from.numbers[u]);
                if (code == Code::IQ2XS) {
                    top = 0;
                    for (int i = 0; i < 4; ++i) top |= uint32_t(from.points[u][i] >> 8) << i;
                }
                flags = (flags & ~kTop) | top << 28;
            }
            std::memcpy(unit + 4 * row, &flags, sizeof flags);
            unit += 64;
        }
        write_rest(code, from, u, row, unit);
    }
}

void read_rest(Code code, const uint8_t* rest, int u, int row, Block& to) {
    uint16_t* const points = to.points[u];
    const auto add_high = [&](int bits, int width, int stride) {
        for (int i = 0; i < (code == Code::IQ3S ? 8 : 4); ++i)
            points[i] = uint16_t(points[i] | (bits >> stride * i & ((1 << width) - 1)) << 8);
    };
    const auto set_numbers = [&](int both) {
        to.numbers[2 * u] = int8_t(both & 15), to.numbers[2 * u + 1] = int8_t(both >> 4);
    };
    switch (code) {
        case Code::IQ1S: {
            const int bits = read<uint16_t>(rest + 2 * row);
            add_high(bits, 3, 3);
            to.numbers[u] = int8_t(bits >> 12 & 7);
            to.flags[u] = bits >> 15 ? 0xffffffffu : 0u;
            return;
        }
        case Code::IQ1M: {
            const int bits = read<uint16_t>(rest + 2 * row);
            add_high(bits, 3, 4);
            to.flags[u] = 0;
            for (int i = 0; i < 4; ++i) to.flags[u] |= (bits >> (4 * i + 3) & 1 ? 0x11111111u : 0u) << i;
            return;
        }
        case Code::IQ2XS:
            return set_numbers(rest[row]);
        case Code::IQ2S:
            add_high(rest[row], 2, 2);
            return set_numbers(rest[16 + row]);
        case Code::IQ3S:
            return add_high(rest[row], 1, 1);
        default:
            return;
    }
}

Block read_row(Code code, const uint8_t* from, int row) {
    const GridType type = grid_type(code);
    Block block = {};
    block.scale = code == Code::IQ1M ? scale_of_ones(from + 2 * row, 32) : F16{read<uint16_t>(from + 2 * row)};
    for (int g = 0; code == Code::IQ1M && g < 16; ++g)
        block.numbers[g] = int8_t(read<uint16_t>(from + 32 * (g / 4) + 2 * row) >> 3 * (g % 4) & 7);
    for (int g = 0; code == Code::IQ3S && g < 8; ++g)
        block.numbers[g] = int8_t(from[32 + 16 * (g / 2) + row] >> 4 * (g % 2) & 15);
    for (int u = 0; u < kUnits; ++u) {
        const uint8_t* unit = from + type.front_bytes + u * type.unit_bytes;
        for (int i = 0; i < 32 / type.weights; ++i) block.points[u][i] = unit[64 * (i / 4) + 4 * row + i % 4];
        unit += 64 * (8 / type.weights);
        if (type.sign_bits) {
            uint32_t flags = read<uint32_t>(unit + 4 * row);
            if (type.sign_bits == 7) {
                const uint32_t top = flags >> 28;
                flags &= ~kTop;
                for (int i = 0; i < 4; ++i) flags |= uint32_t(__builtin_parity(flags & 0x11111111u << i)) << (28 + i);
                if (code == Code::IQ2XS)
                    for (int i = 0; i < 4; ++i) block.points[u][i] = uint16_t(block.points[u][i] | (top >> i & 1) << 8);
                else
                    block.numbers[u] = int8_t(top);
            }
            block.flags[u] = flags;
            unit += 64;
        }
        read_rest(code, unit, u, row, block);
    }
    return block;
}

// ---- Codes

uint32_t digits_of_point(Code code, int point) {
    switch (code) {
        case Code::IQ1S:
        case Code::IQ1M:
            return kPointsIQ1.lanes[point];
        case Code::IQ2XXS:
            return kPointsIQ2XXS.lanes[point];
        case Code::IQ2XS:
            return kPointsIQ2XS.lanes[point];
        case Code::IQ2S:
            return kPointsIQ2S.lanes[point];
        case Code::IQ3XXS:
            return kPointsIQ3XXS.lanes[point];
        default:
            return kPointsIQ3S.lanes[point];
    }
}

// Codes [256], and the numbers of groups as factors.
void write_codes(Code code, const Block& from, uint8_t* codes, int8_t* numbers) {
    const GridType type = grid_type(code);
    for (int g = 0; g < int(kSuperBlock) / type.group; ++g) numbers[g] = int8_t(2 * from.numbers[g] + 1);
    for (int k = 0; k < kSuperBlock; ++k) {
        const int u = k / 32, step = k % 32 / 4, j = k % 4;
        const uint32_t lane = digits_of_point(code, from.points[u][k % 32 / type.weights]);
        const uint32_t digit = lane >> (8 * j + (type.weights == 8 ? step % 2 * 4 : 0)) & ((1u << type.digit_bits) - 1);
        const uint32_t flag = from.flags[u] >> (8 * j + step % 2 * 4 + step / 2) & 1;
        codes[k] = uint8_t(digit | flag << type.digit_bits);
    }
}

}  // namespace

F16 unpack_grid_block(Code code, const uint8_t* block, uint8_t* codes, int8_t* numbers) {
    const Block from = read_block(code, block);
    write_codes(code, from, codes, numbers);
    return from.scale;
}

F16 pack_grid_block(Code code, const uint8_t* block, int64_t row, uint8_t* to) {
    const Block from = read_block(code, block);
    write_row(code, from, int(row), to);
    return from.scale;
}

void unpack_grid_row(const PackedHeader& h, Place place, const int32_t* order, float* out) {
    const int group = int(h.group);
    const auto* block = reinterpret_cast<const uint8_t*>(h.panel(place.panel));
    for (int64_t first = 0; first < h.k; first += kSuperBlock, block += h.super_block_bytes()) {
        const Block from = read_row(h.grid(), block, int(place.row));
        uint8_t codes[kSuperBlock];
        int8_t numbers[16];
        write_codes(h.grid(), from, codes, numbers);
        const float scale = to_float(from.scale) * grid_unit(h.grid());
        for (int k = 0; k < kSuperBlock; ++k)
            out[order ? order[first + k] : first + k] = float(h.levels[codes[k]] * numbers[k / group]) * scale;
    }
}

}  // namespace pace
