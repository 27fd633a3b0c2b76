// The largest element of a row that several threads compute piece by piece.
//
// Candidate   64 bits that grow with the value, and among equal values with a lower index: any thread may raise them to
//             the larger one. -0 equals 0. NaN is larger than all.
#pragma once

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>

namespace pace {

// No element yet. `index_of_candidate` then returns kNotFound.
constexpr int64_t kNoCandidate = 0, kNotFound = -2;

// `index` < 2^32.
inline uint64_t candidate_of(float value, int64_t index) {
    if (std::isnan(value)) return ~uint64_t(0);
    const uint32_t bits = std::bit_cast<uint32_t>(value + 0.0f);
    const uint32_t key = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t(key) << 32 | uint32_t(~index);
}

inline void raise_candidate(int64_t& candidate, uint64_t other) {
    const std::atomic_ref<int64_t> shared(candidate);
    int64_t seen = shared.load(std::memory_order_relaxed);
    while (uint64_t(seen) < other && !shared.compare_exchange_weak(seen, int64_t(other), std::memory_order_relaxed)) {
    }
}

// The index, or -1 if the value is not finite.
inline int64_t index_of_candidate(int64_t candidate) {
    if (candidate == kNoCandidate) return kNotFound;
    const uint32_t key = uint32_t(uint64_t(candidate) >> 32), bits = key >> 31 ? key & 0x7fffffffu : ~key;
    return std::isfinite(std::bit_cast<float>(bits)) ? int64_t(uint32_t(~uint64_t(candidate))) : -1;
}

}  // namespace pace
