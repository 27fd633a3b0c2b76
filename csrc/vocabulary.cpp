// A hash table of pieces, and the search for every split of a piece into two.
#include "pace/vocabulary.h"

#include <bit>

namespace pace {

namespace {

// The hash of a text is a polynomial of its bytes modulo 2^64. So the hash of any substring follows from the hashes of
// the text's prefixes.
constexpr uint64_t kBase = 0x9e3779b97f4a7c15;  // odd

uint64_t extended(uint64_t hash, char byte) { return hash * kBase + (uint8_t(byte) + 1); }

class Table {
  public:
    explicit Table(const std::vector<std::string_view>& pieces)
        : pieces_(pieces), shift_(64 - int(std::bit_width(2 * pieces.size() + 1))), slots_(size_t(1) << (64 - shift_)) {
        for (size_t i = 0; i < pieces.size(); ++i) {
            if (pieces[i].empty()) continue;
            uint64_t hash = 0;
            for (const char byte : pieces[i]) hash = extended(hash, byte);
            size_t at = first_slot(hash);
            while (slots_[at].piece != kNone) at = next(at);
            slots_[at] = {uint32_t(hash), uint32_t(i)};
        }
    }

    // The index of a text, or kNone if it is not a piece.
    uint32_t find(std::string_view text, uint64_t hash) const {
        for (size_t at = first_slot(hash); slots_[at].piece != kNone; at = next(at))
            if (slots_[at].hash == uint32_t(hash) && pieces_[slots_[at].piece] == text) return slots_[at].piece;
        return kNone;
    }

    static constexpr uint32_t kNone = UINT32_MAX;

  private:
    struct Slot {
        uint32_t hash = 0, piece = kNone;
    };
    // The high bits of a product depend on all bits of the hash.
    size_t first_slot(uint64_t hash) const { return hash * 0xd6e8feb86659fd93 >> shift_; }
    size_t next(size_t at) const { return (at + 1) & (slots_.size() - 1); }

    const std::vector<std::string_view>& pieces_;
    int shift_;
    std::vector<Slot> slots_;  // at most half of the slots are used
};

}  // namespace

std::vector<Merge> find_merges(const std::vector<std::string_view>& pieces, const std::vector<uint32_t>& order) {
    const Table table(pieces);
    std::vector<Merge> merges;
    std::vector<uint64_t> hashes, powers = {1};  // hashes[i]: hash of the first i bytes
    for (const uint32_t index : order) {
        const std::string_view piece = pieces[index];
        hashes.assign(1, 0);
        for (const char byte : piece) hashes.push_back(extended(hashes.back(), byte));
        while (powers.size() <= piece.size()) powers.push_back(powers.back() * kBase);
        for (size_t cut = 1; cut < piece.size(); ++cut) {
            if ((piece[cut] & 0xc0) == 0x80) continue;  // inside a character
            const uint32_t left = table.find(piece.substr(0, cut), hashes[cut]);
            if (left == Table::kNone) continue;
            const uint64_t rest = hashes[piece.size()] - hashes[cut] * powers[piece.size() - cut];
            const uint32_t right = table.find(piece.substr(cut), rest);
            if (right != Table::kNone) merges.push_back({left, right});
        }
    }
    return merges;
}

}  // namespace pace
