// Grids: the codebooks of ggml's types IQ1 to IQ3, and the layout of weights that are points of them.
//
// A point has a digit for each of 8 neighbouring weights, or of 4 in IQ3. Files have the point's number. Each weight
// also has a flag: its sign, or in IQ1 the side to which its level is shifted. So a weight is
//
//   levels[digit | flag << digit_bits] * number * grid_unit * d
//
// with an odd number for each group of 16 or 32, and a float16 d for each 256. This product is exact in fp32.
//
// LAYOUT      A super-block of a panel has the bits of ggml's blocks of its 16 rows. First comes its front:
//
//               IQ1_M     uint16 [4][16], as in ggml's block: four bits of d, and 3 bits for each of four groups.
//               others    d, F16 [16].
//               IQ3_S     then bytes [4][16]: the numbers of two groups, 4 bits each.
//
//             Then come 8 units of 32 k:
//
//               points    low 8 bits of the numbers of 4 points (8 in IQ3), [16][4] (twice in IQ3).
//               flags     32 bits [16], except for IQ1. Bit (s % 2) * 4 + s / 2 of byte j belongs to weight 4 s + j. So
//                         8 neighbours are bits i and i + 4 of all bytes. Where ggml stores only seven of eight signs,
//                         their parity gives the eighth, bits 28 to 31. Four other bits are there instead:
//                         IQ2_XXS, IQ3_XXS the number of the group; IQ2_XS the ninth bit of each point.
//               rest      IQ2_XS    bytes [16]: the numbers of both groups.
//                         IQ2_S     bytes [16]: two high bits of each point; then as IQ2_XS.
//                         IQ3_S     bytes [16]: the ninth bit of each point.
//                         IQ1_S     uint16 [16]: 3 high bits of each point, 3 of the number, and the flag of all.
//                         IQ1_M     uint16 [16]: 3 high bits and the flag of each point.
//
//             A number of b bits stands for 2 b + 1.
#pragma once

#include "pace/types.h"

namespace pace {

struct GridType {
    int weights;     // of a point
    int digit_bits;  // of a digit
    int group;       // weights that share a number
    int sign_bits;   // stored for 8 weights; 0: flags are not signs
    int front_bytes, unit_bytes;
    int8_t levels[16];  // a code of three bits may have any fourth bit
};

constexpr float grid_unit(Code code) { return code == Code::IQ3S ? 1.0f : code == Code::IQ3XXS ? 0.5f : 0.125f; }

constexpr GridType grid_type(Code code) {
    GridType type = {8, 2, code == Code::IQ1S || code == Code::IQ2XXS ? 32 : 16, 0, 32, 96, {}};
    constexpr GridType kThrees = {4, 3, 32, 0, 32, 0, {}};
    int8_t levels[8] = {8, 25, 43};
    switch (code) {
        case Code::IQ1S:
        case Code::IQ1M:
            if (code == Code::IQ1M) type.front_bytes = 128;
            for (int digit = 0; digit < 3; ++digit)
                type.levels[digit] = int8_t(8 * digit - 7), type.levels[4 + digit] = int8_t(8 * digit - 9);
            break;
        case Code::IQ2XXS:
            type.sign_bits = 7, type.unit_bytes = 128;
            break;
        case Code::IQ2XS:
            type.sign_bits = 7, type.unit_bytes = 144;
            break;
        case Code::IQ2S:
            type.sign_bits = 8, type.unit_bytes = 160;
            break;
        case Code::IQ3XXS:
            type = kThrees, type.sign_bits = 7, type.unit_bytes = 192;
            for (int digit = 0; digit < 8; ++digit) levels[digit] = int8_t(digit < 7 ? 4 * digit + 2 : 31);
            break;
        default:
            type = kThrees, type.sign_bits = 8, type.front_bytes = 96, type.unit_bytes = 208;
            for (int digit = 0; digit < 8; ++digit) levels[digit] = int8_t(2 * digit + 1);
    }
    for (int digit = 0; type.sign_bits && digit < 1 << type.digit_bits; ++digit)
        type.levels[digit] = levels[digit], type.levels[(1 << type.digit_bits) + digit] = int8_t(-levels[digit]);
    for (int code = 0; type.digit_bits == 2 && code < 8; ++code) type.levels[8 + code] = type.levels[code];
    return type;
}

// Digits of points, in ascending order of the sum of digit[j] * base^j. Byte j of a lane has digit j in its low four
// bits. In grids of 8 its high four bits have digit j + 4. A word has bytes 0 and 1 of the lane. The digits of bytes 2
// and 3 are above them, by two bits, or by four in grids of 4.
template <int count>
struct GridPoints {
    alignas(64) uint32_t lanes[count];
    alignas(64) uint16_t words[count];
};
extern const GridPoints<2048> kPointsIQ1;
extern const GridPoints<256> kPointsIQ2XXS;
extern const GridPoints<512> kPointsIQ2XS;
extern const GridPoints<1024> kPointsIQ2S;
extern const GridPoints<256> kPointsIQ3XXS;
extern const GridPoints<512> kPointsIQ3S;

}  // namespace pace
