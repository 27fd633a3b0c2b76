// Four independent chains of multiplications, each over every fourth word: one core reads about 15 GB/s without any
// vector instructions, on every CPU alike.
#include "pace/xxh64.h"

#include <bit>
#include <cstring>
#include <initializer_list>

namespace pace {

namespace {

constexpr uint64_t kPrime1 = 0x9e3779b185ebca87, kPrime2 = 0xc2b2ae3d27d4eb4f, kPrime3 = 0x165667b19e3779f9,
                   kPrime4 = 0x85ebca77c2b2ae63, kPrime5 = 0x27d4eb2f165667c5;

template <class Word>
uint64_t read(const uint8_t* bytes) {
    Word word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

uint64_t round(uint64_t lane, uint64_t word) { return std::rotl(lane + word * kPrime2, 31) * kPrime1; }

}  // namespace

uint64_t xxh64(const void* data, size_t num_bytes, uint64_t seed) {
    const uint8_t* bytes = static_cast<const uint8_t*>(data);
    const uint8_t* const end = bytes + num_bytes;
    uint64_t hash = seed + kPrime5;
    if (num_bytes >= 32) {
        uint64_t a = seed + kPrime1 + kPrime2, b = seed + kPrime2, c = seed, d = seed - kPrime1;
        for (; end - bytes >= 32; bytes += 32) {
            a = round(a, read<uint64_t>(bytes));
            b = round(b, read<uint64_t>(bytes + 8));
            c = round(c, read<uint64_t>(bytes + 16));
            d = round(d, read<uint64_t>(bytes + 24));
        }
        hash = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
        for (const uint64_t lane : {a, b, c, d}) hash = (hash ^ round(0, lane)) * kPrime1 + kPrime4;
    }
    hash += num_bytes;
    for (; end - bytes >= 8; bytes += 8)
        hash = std::rotl(hash ^ round(0, read<uint64_t>(bytes)), 27) * kPrime1 + kPrime4;
    if (end - bytes >= 4) {
        hash = std::rotl(hash ^ read<uint32_t>(bytes) * kPrime1, 23) * kPrime2 + kPrime3;
        bytes += 4;
    }
    for (; bytes < end; ++bytes) hash = std::rotl(hash ^ *bytes * kPrime5, 11) * kPrime1;
    hash = (hash ^ hash >> 33) * kPrime2;
    hash = (hash ^ hash >> 29) * kPrime3;
    return hash ^ hash >> 32;
}

}  // namespace pace
