// XXH64, a hash that finds damage and differences, at about the speed of memory. It is not cryptographic.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pace {

// The hash of `num_bytes` bytes, which need no alignment. Format: github.com/Cyan4973/xxHash, doc/xxhash_spec.md.
uint64_t xxh64(const void* data, size_t num_bytes, uint64_t seed = 0);

}  // namespace pace
