// Merges of a vocabulary of pieces.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace pace {

// Indices of two pieces that together form a third one.
struct Merge {
    uint32_t left, right;
};

// Finds every pair of pieces that together form a piece. For each index in `order`, returns the pairs that form that
// piece, the shortest left piece first. Pieces are UTF-8 and distinct; an empty piece is ignored. Time is linear in
// their bytes.
std::vector<Merge> find_merges(const std::vector<std::string_view>& pieces, const std::vector<uint32_t>& order);

}  // namespace pace
