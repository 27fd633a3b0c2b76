// Merges of a vocabulary of pieces.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace pace {

// Two pieces, by their index, that make a third one.
struct Merge {
    uint32_t left, right;
};

// Every pair of pieces that makes a piece: for each index in `order` the pairs that make that piece, the shorter left
// one first. Pieces are UTF-8; an empty one counts as none, and no two are equal. Takes linear time in their bytes.
std::vector<Merge> find_merges(const std::vector<std::string_view>& pieces, const std::vector<uint32_t>& order);

}  // namespace pace
